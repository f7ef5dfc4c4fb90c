"""Where values stand among sorted ones, without a loop."""

import jax
import jax.numpy as jnp

_AT_ONCE = 1 << 18
"""So many comparisons take less time than the kernels that they save."""


def search(ordered: jax.Array, values: jax.Array, side: str = "left") -> jax.Array:
    """Returns `jnp.searchsorted(ordered, values, side)` in int32, as one kernel where both are short.

    A search by halving is a loop, which a GPU runs as a chain of small kernels. Unrolled it is one or two kernels per
    halving, each of which takes time to compile. Comparing all with all is one.
    """
    method = "compare_all" if ordered.size * values.size <= _AT_ONCE else "scan_unrolled"
    return jnp.searchsorted(ordered, values, side=side, method=method).astype(jnp.int32)
