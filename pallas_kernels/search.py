"""Search in sorted arrays without a loop."""

import jax
import jax.numpy as jnp

_AT_ONCE = 1 << 18
"""Up to so many comparisons are faster than the kernels of a binary search."""


def search(ordered: jax.Array, values: jax.Array, side: str = "left") -> jax.Array:
    """Returns `jnp.searchsorted(ordered, values, side)` in int32, as one kernel where both are short.

    A binary search is a loop, which a GPU runs as a chain of small kernels. Unrolled it is one or two kernels per
    step, each of which takes time to compile. Comparing all with all is one kernel.
    """
    method = "compare_all" if ordered.size * values.size <= _AT_ONCE else "scan_unrolled"
    return jnp.searchsorted(ordered, values, side=side, method=method).astype(jnp.int32)
