"""Batch invariance: the bits of a row do not depend on the number of rows, nor on what the other rows are.

Elsewhere an operation chooses its kernel, its tile and the parts of its sums by the number of rows, because that is
faster. While a program is traced under `batch_invariant`, each choice is one for all numbers of rows, and the order of
a row's sums is fixed. The switch is part of the keys of jax's caches.

On a CPU that is not enough. XLA sums rows by a library where an array has more than 4,096 values, and in another order
below. And LLVM multiplies and adds in one step or in two, in a loop's vectors and in its last values, so that the place
of a row matters. `CPU_OPTIONS` leave out both. The C++ kernels stay as they are.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax import lax

_traced = jax.make_user_context(False)

CPU_OPTIONS: Mapping[str, str | int] = {"xla_cpu_experimental_ynn_fusion_type": "", "xla_backend_optimization_level": 0}
"""Options of XLA with which a batch-invariant program is compiled for a CPU: no YNNPACK, and no optimizations of LLVM,
whose scalar code rounds every product and every sum."""

PLANNED_ROWS = 128
"""Rows that the tiles of dense products are chosen for: as many as one tile has."""

TILE_ROWS = 64
"""Rows of a tile of a grouped product."""


def required() -> bool:
    """Returns whether the program that is traced must be batch-invariant."""
    return bool(_traced.value)


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Traces batch-invariant kernels in the block."""
    with _traced(True):
        yield


def planned_rows(rows: int) -> int:
    """Returns the rows that a tile is chosen for: `rows`, or one number for all where invariance is required."""
    return PLANNED_ROWS if required() else rows


def in_blocks(product: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns `product(x)` of rows x `[T, ...]`; where invariance is required, of `PLANNED_ROWS` rows at a time.

    It is for products that XLA gives to a library, which chooses an algorithm by their shape.
    """
    if not required():
        return product(x)
    padded = jnp.pad(x, ((0, -len(x) % PLANNED_ROWS), *(((0, 0),) * (x.ndim - 1))))
    out = lax.map(product, padded.reshape(-1, PLANNED_ROWS, *x.shape[1:]))
    return out.reshape(-1, *out.shape[2:])[: len(x)]
