"""Writing the rows of new tokens into the page pool by TMA, in place: the kernel behind `write_pages`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mla.write import DROPPED
from pallas_kernels.mosaic import plgpu

_ROWS = 8  # of a thread block
_TMA_BYTES = 16  # the innermost axis of a copy is a multiple of this
_TMA_ELEMENTS = 256  # and no axis is longer


@functools.partial(jax.jit, static_argnames="interpret")
def write_rows(
    pages: jax.Array, rows: jax.Array, targets: jax.Array, offsets: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """See `write.write_rows`. Eight rows are fetched with one copy and stored with one each.

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


def unsupported(pages: jax.Array) -> str | None:
    """Returns why the kernel cannot write to this pool, or None if it can."""
    return None if _chunk(pages) else f"rows of {pages.shape[2]} x {pages.dtype} do not split into pieces for TMA"


def _chunk(pages: jax.Array) -> int:
    """Returns the length of the longest equal pieces of a row that TMA can copy; 0 if there are none."""
    width, least = pages.shape[2], _TMA_BYTES // pages.dtype.itemsize
    lengths = [n for n in range(least, min(width, _TMA_ELEMENTS) + 1, least) if width % n == 0]
    return max((n for n in lengths if width // n <= _TMA_ELEMENTS), default=0)
