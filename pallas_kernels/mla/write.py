"""Writing the rows of new tokens into the page pool, in place: in jax.numpy, and on Hopper by TMA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mla.layout import fp8_page_bytes
from pallas_kernels.mosaic import plgpu

DROPPED = -1
"""The page of a row that is not written."""

_ROWS = 8  # of a thread block
_TMA_BYTES = 16  # the innermost axis of a copy is a multiple of this
_TMA_ELEMENTS = 256  # and no axis is longer


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


@functools.partial(jax.jit, static_argnames="interpret")
def write_rows_mosaic(
    pages: jax.Array, rows: jax.Array, targets: jax.Array, offsets: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """See `write_rows`. Eight rows are fetched with one copy and stored with one each.

    Equal calls of a program share a trace and a lowering.
    """
    padding = -rows.shape[0] % _ROWS
    rows = jnp.pad(rows, ((0, padding), (0, 0)))
    targets = jnp.pad(targets, (0, padding), constant_values=DROPPED)
    offsets = jnp.pad(offsets, (0, padding))
    chunk = _chunk(pages)
    pool = jax.new_ref(pages.reshape(*pages.shape[:2], -1, chunk))
    kernel = plgpu.kernel(
        _body,
        out_type=(),
        grid=(rows.shape[0] // _ROWS,),
        grid_names=("block",),
        scratch_types={
            "staging": plgpu.SMEM((_ROWS, rows.shape[1] // chunk, chunk), rows.dtype),
            "full": plgpu.Barrier(),
        },
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="mla_write",
        interpret=interpret,
    )
    kernel(rows.reshape(rows.shape[0], -1, chunk), targets, offsets, pool)
    return jax.freeze(pool).reshape(pages.shape)


def _body(rows, targets, offsets, pool, *, staging, full):
    first = lax.axis_index("block") * _ROWS
    plgpu.copy_gmem_to_smem(rows.at[pl.ds(first, _ROWS)], staging, full)
    plgpu.barrier_wait(full)
    for row in range(_ROWS):
        target = targets[first + row]

        @pl.when(target != DROPPED)
        def _(row=row, target=target):
            plgpu.copy_smem_to_gmem(staging.at[row], pool.at[target, offsets[first + row]])

    plgpu.wait_smem_to_gmem(0)


def mosaic_unsupported(pages: jax.Array) -> str | None:
    """Returns why that kernel cannot write to this pool, or None if it can."""
    return None if _chunk(pages) else f"rows of {pages.shape[2]} x {pages.dtype} do not split into pieces for TMA"


def _chunk(pages: jax.Array) -> int:
    """Returns the length of the longest equal pieces of a row that TMA can copy; 0 if there are none."""
    width, least = pages.shape[2], _TMA_BYTES // pages.dtype.itemsize
    lengths = [n for n in range(least, min(width, _TMA_ELEMENTS) + 1, least) if width % n == 0]
    return max((n for n in lengths if width // n <= _TMA_ELEMENTS), default=0)
