"""Writing the rows of new tokens into the page pool in plain jax.numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.mla.layout import fp8_page_bytes

DROPPED = -1
"""The page of a row that is not written."""


def write_rows(pages: jax.Array, rows: jax.Array, targets: jax.Array, offsets: jax.Array) -> jax.Array:
    """Writes `rows` [T, W] to `pages[targets, offsets]`; rows with target DROPPED are not written.

    One scatter, in place if `pages` is donated. XLA turns that of a single row into a slice update, which XLA:CPU
    repeats for each reader, on copies of the pool, unless an optimization barrier prevents it.
    """
    written = pages.at[_droppable(pages, targets), offsets].set(rows, mode="drop")
    return lax.optimization_barrier(written) if len(rows) == 1 else written


def write_fp8_rows(
    pages: jax.Array, rows: jax.Array, targets: jax.Array, offsets: jax.Array, value_width: int
) -> jax.Array:
    """Writes FP8 rows `[T, W]`, whose bytes are not contiguous in their page; see `write_rows`."""
    return write_bytes(pages, rows, targets, offsets, fp8_page_bytes(value_width, pages.shape[2]))


def write_bytes(
    pages: jax.Array, rows: jax.Array, targets: jax.Array, offsets: jax.Array, page_bytes: np.ndarray
) -> jax.Array:
    """Writes rows of bytes `[T, W]` to positions `page_bytes` `[64, W]` of their page; see `write_rows`."""
    count, tokens, row_bytes = pages.shape
    places = jnp.asarray(page_bytes)[jnp.clip(offsets, 0, tokens - 1)]  # [T, W]
    flat = pages.reshape(count, tokens * row_bytes)
    return flat.at[_droppable(pages, targets)[:, None], places].set(rows, mode="drop").reshape(pages.shape)


def _droppable(pages: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.where(targets == DROPPED, pages.shape[0], targets)  # a negative index would count from the end
