"""The outputs of the decode kernel: its stores at the end of a piece, and the pieces of split requests combined."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mla.schedule import DecodeSchedule
from pallas_kernels.mosaic import plgpu

_ROWS_PER_BLOCK = 8  # a warpgroup for each; row counts are multiples of 8
_THREADS = 128  # of a warpgroup
_EMPTY = -1e29  # a piece without keys has log-sum-exp -1e30
_LN2 = math.log(2)
LSE = 6
"""The row of `vectors` in which the log-sum-exp is staged."""


def store_whole(memory: Any, half: int, piece: Any, output: Any, lse: Any) -> None:
    """Stores a warpgroup's half of a group's output, in the queries' type, and with the left half the log-sum-exp."""
    staging, quarter = memory.smem.query[1].at[half], memory.shape.quarter
    for number, values in enumerate(output):
        staging[:, pl.ds(number * quarter, quarter)] = values.astype(memory.shape.dtype)
    if half == 0:
        memory.smem.vectors[LSE] = lse
    plgpu.commit_smem()
    width = memory.shape.half
    rows, columns = pl.ds(0, memory.shape.tile_rows), pl.ds(half * width, width)
    plgpu.copy_smem_to_gmem(staging.at[rows], memory.out.at[piece.group, memory.tile_rows, columns])
    if half == 0:
        plgpu.copy_smem_to_gmem(memory.smem.vectors.at[LSE, rows], memory.lse.at[piece.group, memory.tile_rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def store_partial(memory: Any, half: int, piece: Any, output: Any, lse: Any) -> None:
    """Stores float32, in two steps: the queries' shared memory holds a quarter of a tile per step and warpgroup."""
    staging, width, quarter = memory.smem.query[2].at[half], memory.shape.half, memory.shape.quarter
    rows = pl.ds(0, memory.shape.tile_rows)
    if half == 0:
        memory.smem.vectors[LSE] = lse
    for step, values in enumerate(output):
        staging[...] = values
        plgpu.commit_smem()
        columns = pl.ds(half * width + step * quarter, quarter)
        plgpu.copy_smem_to_gmem(staging.at[rows], memory.partial_out.at[piece.partial, memory.tile_rows, columns])
        if half == 0 and step == 0:
            plgpu.copy_smem_to_gmem(
                memory.smem.vectors.at[LSE, rows], memory.partial_lse.at[piece.partial, memory.tile_rows]
            )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def combine_splits(
    out: jax.Array,
    lse: jax.Array,
    partial_out: jax.Array,
    partial_lse: jax.Array,
    schedule: DecodeSchedule,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Fills in `out` [B, rows, R] and `lse` [B, rows] of the split groups; the others stay.

    Args:
      partial_out, partial_lse: float32 `[2 * parts, rows, R]` and `[2 * parts, rows]` of `mosaic_decode`.
    """
    _, rows, width = out.shape
    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    kernel = plgpu.kernel(
        functools.partial(_body, width),
        out_type=(),
        grid=(schedule.cuts.shape[0] - 1, rows // _ROWS_PER_BLOCK),
        grid_names=("part", "block"),
        num_threads=_ROWS_PER_BLOCK,
        thread_name="row",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mla_combine",
        interpret=interpret,
    )
    kernel(partial_out, partial_lse, schedule.cuts.reshape(-1), schedule.last_part, out_ref, lse_ref)
    return jax.freeze(out_ref), jax.freeze(lse_ref)


def _body(width, partial_out, partial_lse, cuts, last_part, out, lse):
    """Runs in a block, for the group whose first piece is the last of its part, if there is one."""
    first = lax.axis_index("part")
    row = lax.axis_index("block") * _ROWS_PER_BLOCK + lax.axis_index("row")
    group = cuts[2 * first + 2]
    begins_here = (cuts[2 * first] < group) | (cuts[2 * first + 1] == 0)
    split = begins_here & (cuts[2 * first + 3] > 0)

    def log_weight(part):
        """Returns the index and log-sum-exp of a part's piece; a part without pages has none."""
        partial = 2 * part + jnp.where(cuts[2 * part] == group, 0, 1)
        wrote = (cuts[2 * part] != cuts[2 * part + 2]) | (cuts[2 * part + 1] != cuts[2 * part + 3])
        return partial, jnp.where(wrote, partial_lse[partial, row], -jnp.inf)

    @pl.when(split)
    def _():
        last = last_part[group]
        top = lax.fori_loop(first, last + 1, lambda p, top: jnp.maximum(top, log_weight(p)[1]), jnp.float32(-1e30))

        layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // _THREADS)

        def add(part, carry):
            partial, log_sum = log_weight(part)

            def written():
                weight = jnp.exp2(log_sum - top)
                return carry[0] + weight, carry[1] + plgpu.load(partial_out.at[partial, row], layout=layout) * weight

            return lax.cond(log_sum > -jnp.inf, written, lambda: carry)

        zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
        total, acc = lax.fori_loop(first, last + 1, add, (jnp.float32(0), zero))
        out[group, row] = (acc / total).astype(out.dtype)
        lse[group, row] = jnp.where(top > _EMPTY, (top + jnp.log(total) / _LN2) * _LN2, jnp.inf)
