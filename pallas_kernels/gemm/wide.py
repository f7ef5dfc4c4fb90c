"""The wide kernel: activations are the tensor core's rows. For many rows, where arithmetic is the limit."""

import dataclasses
from typing import ClassVar

import jax
from jax.experimental import pallas as pl

from pallas_kernels.gemm.kernel import WG_ROWS, GemmKernel, Refs
from pallas_kernels.gemm.schedule import Tile
from pallas_kernels.mosaic import plgpu, row_layout


@dataclasses.dataclass(frozen=True)
class WideKernel(GemmKernel):
    """[Gx, M, K] x [Gw, N, K] -> [Gx, M, N]: 128 rows by tile_n columns per block, 64 rows per warpgroup."""

    rows: ClassVar[int] = 2 * WG_ROWS
    """Rows of a tile."""

    def __post_init__(self):
        if self.tile_m != self.rows:
            raise ValueError(f"a tile of {type(self).__name__} has {self.rows} rows, got {self.tile_m}")
        super().__post_init__()

    @property
    def product_shape(self) -> tuple[int, int]:
        return WG_ROWS, self.tile_n

    def operands(self, refs: Refs, stage, warpgroup) -> tuple:
        return refs.x_s.at[stage, pl.ds(warpgroup * WG_ROWS, WG_ROWS)], refs.w_s.at[stage].T

    def load_x_scale(self, refs: Refs, stage, warpgroup) -> tuple[jax.Array, int]:
        rows = refs.x_scale_s.at[stage, pl.ds(warpgroup * WG_ROWS, WG_ROWS)]
        return plgpu.load(rows, layout=row_layout()), 0

    def out_buffer(self):
        dtype = self.out_type.dtype
        return plgpu.SMEM((2, WG_ROWS, self.tile_n), dtype, transforms=self.out_transforms(self.tile_n))

    def store(self, refs: Refs, warpgroup, tile: Tile, sums: list[jax.Array]) -> None:
        out_s, width = refs.o_s.at[warpgroup], self.tile_n // len(sums)
        for j, part in enumerate(sums):
            out_s[:, pl.ds(j * width, width)] = part.astype(self.out_type.dtype)
        plgpu.commit_smem()
        row, columns = tile.row + warpgroup * WG_ROWS, pl.ds(self.column(tile), self.tile_n)
        plgpu.copy_smem_to_gmem(out_s, refs.out.at[tile.x_group, pl.ds(row, WG_ROWS), columns])
