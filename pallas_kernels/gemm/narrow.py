"""The narrow kernels: weights are the tensor core's rows. For few tokens, bound by reading the weights.

The tensor core multiplies at least 64 rows, so a product of few tokens is computed transposed: 128 rows of the weight
times 8 to 128 tokens. All of the shared memory is a ring of weight stages. If there are fewer tiles than
multiprocessors, K is split and XLA adds the parts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gemm.kernel import WG_ROWS, GemmKernel, Refs
from pallas_kernels.gemm.schedule import Tile
from pallas_kernels.mosaic import plgpu, swizzle_transforms


@dataclasses.dataclass(frozen=True)
class NarrowKernel(GemmKernel):
    """[Gx, M, K] x [Gw, N, K] -> [Gx, M, N] of 16 bits: tile_m tokens by 128 weight rows per block."""

    def __post_init__(self):
        if self.tile_n != 2 * WG_ROWS or self.cluster != 1:
            raise ValueError(f"a narrow tile has {2 * WG_ROWS} columns and no cluster, got {self}")
        super().__post_init__()

    @property
    def product_shape(self) -> tuple[int, int]:
        return WG_ROWS, self.tile_m

    def operands(self, refs: Refs, stage, warpgroup) -> tuple:
        return refs.w_s.at[stage, pl.ds(warpgroup * WG_ROWS, WG_ROWS)], refs.x_s.at[stage].T

    def load_x_scale(self, refs: Refs, stage, warpgroup) -> tuple[jax.Array, int]:
        scales = refs.x_scale_s.at[stage, pl.ds(0, self.tile_m)]
        return plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(0)), 1

    def out_buffer(self):
        dtype = self.out_type.dtype
        return plgpu.SMEM((2, self.tile_m, WG_ROWS), dtype, transforms=self.out_transforms(WG_ROWS))

    def store(self, refs: Refs, warpgroup, tile: Tile, sums: list[jax.Array]) -> None:
        (total,) = sums
        out_s = refs.o_s.at[warpgroup]
        out_s.T[...] = plgpu.layout_cast(total.astype(self.out_type.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        columns = pl.ds(self.column(tile) + warpgroup * WG_ROWS, WG_ROWS)
        plgpu.copy_smem_to_gmem(out_s, refs.out.at[tile.x_group, pl.ds(tile.row, self.tile_m), columns])


@dataclasses.dataclass(frozen=True)
class SplitKernel(NarrowKernel):
    """The narrow kernel with split K: -> [splits, N, M] float32, which XLA sums and transposes."""

    def out_buffer(self):
        transforms = swizzle_transforms(jnp.float32, self.tile_m)
        return plgpu.SMEM((2, WG_ROWS, self.tile_m), jnp.float32, transforms=transforms)

    def store(self, refs: Refs, warpgroup, tile: Tile, sums: list[jax.Array]) -> None:
        (total,) = sums
        out_s = refs.o_s.at[warpgroup]
        out_s[...] = total
        plgpu.commit_smem()
        n = pl.ds(self.column(tile) + warpgroup * WG_ROWS, WG_ROWS)
        plgpu.copy_smem_to_gmem(out_s, refs.out.at[tile.split, n, pl.ds(tile.row, self.tile_m)])
