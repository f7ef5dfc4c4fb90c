"""The stores of the decode kernel at the end of a piece, staged in the shared memory of its queries."""

from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels.mosaic import plgpu

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
