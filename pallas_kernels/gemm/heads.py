"""The kernel for products of one weight per head: tokens stay the outer axis, as in attention.

With few tokens it is bound by reading the weights: 128 heads of DeepSeek-V3 are 17 MB, of which every multiprocessor
streams an equal share through its ring. So tiles have at least 64 rows, although the tensor core then computes padding.
"""

import dataclasses

import jax
from jax.experimental import pallas as pl

from pallas_kernels.gemm.kernel import WG_ROWS, GemmKernel, Refs
from pallas_kernels.gemm.schedule import Tile
from pallas_kernels.mosaic import plgpu


@dataclasses.dataclass(frozen=True)
class HeadKernel(GemmKernel):
    """[M, G, K] x [Gw, N, K] -> [M, G, N] bfloat16; the two warpgroups share a tile's 128 rows, or its columns.

    Attributes:
      transposed: weights are [Gw, K, N]; the tensor core supports either order of bfloat16.
    """

    transposed: bool = False

    def __post_init__(self):
        if self.tile_m not in (WG_ROWS, 2 * WG_ROWS) or self.tile_n != 2 * WG_ROWS or self.scaled or self.cluster != 1:
            raise ValueError(f"a head's tile has 64 or 128 rows and 128 columns, no scales and no cluster; got {self}")
        super().__post_init__()

    @property
    def name(self) -> str:
        return f"{super().name}_{'kn' if self.transposed else 'nk'}"

    @property
    def by_rows(self) -> bool:
        """The warpgroups share the rows; else the columns."""
        return self.tile_m > WG_ROWS

    @property
    def product_shape(self) -> tuple[int, int]:
        return WG_ROWS, self.tile_n if self.by_rows else self.tile_n // 2

    @property
    def weight_tile(self) -> tuple[int, int]:
        return (self.tile_k, self.tile_n) if self.transposed else super().weight_tile

    def x_block(self, refs: Refs, tile: Tile, k):
        return refs.x.at[pl.ds(tile.row, self.tile_m), tile.x_group, k]

    def w_block(self, refs: Refs, tile: Tile, k):
        if not self.transposed:
            return super().w_block(refs, tile, k)
        return refs.w.at[tile.w_group, k, pl.ds(self.column(tile), self.tile_n)]

    def operands(self, refs: Refs, stage, warpgroup) -> tuple:
        x_s, w_s = refs.x_s.at[stage], refs.w_s.at[stage]
        part = pl.ds(warpgroup * WG_ROWS, WG_ROWS)
        if self.by_rows:
            x_s = x_s.at[part]
        else:
            w_s = w_s.at[:, part] if self.transposed else w_s.at[part]
        return x_s, w_s if self.transposed else w_s.T

    def load_x_scale(self, refs: Refs, stage, warpgroup) -> tuple[jax.Array, int]:
        raise NotImplementedError("products of heads have no scales")

    def out_buffer(self):
        dtype, (rows, columns) = self.out_type.dtype, self.product_shape
        return plgpu.SMEM((2, rows, columns), dtype, transforms=self.out_transforms(columns))

    def store(self, refs: Refs, warpgroup, tile: Tile, sums: list[jax.Array]) -> None:
        (total,), out_s, (rows, columns) = sums, refs.o_s.at[warpgroup], self.product_shape
        out_s[...] = total.astype(self.out_type.dtype)
        plgpu.commit_smem()
        row, column = tile.row, self.column(tile)
        if self.by_rows:
            row += warpgroup * rows
        else:
            column += warpgroup * columns
        plgpu.copy_smem_to_gmem(out_s, refs.out.at[pl.ds(row, rows), tile.x_group, pl.ds(column, columns)])
