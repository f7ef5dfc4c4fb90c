"""The narrow kernels: weights are the tensor core's rows. For few rows, where reading the weights is the limit.

The tensor core takes 64 rows or nothing, so a product of few tokens is computed as its transpose: 128 rows of the
weight times 8 to 128 tokens. All of the shared memory is a ring of weight stages in flight. Where there are fewer
tiles than multiprocessors K is split, and XLA adds the parts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.kernel import WG_ROWS, GemmKernel, Refs, store_rows
from pallas_kernels.gemm.schedule import Tile
from pallas_kernels.mosaic import swizzle_transforms

_CHUNK = 8
"""Rows of a swizzled tile, the least that TMA stores from it."""


@dataclasses.dataclass(frozen=True)
class NarrowKernel(GemmKernel):
    """[Gx, M, K] x [Gw, N, K] -> [Gx, M, N] bfloat16: tile_m tokens by 128 weight rows a block."""

    def __post_init__(self):
        if self.tile_n != 2 * WG_ROWS or self.cluster != 1:
            raise ValueError(f"a narrow tile has {2 * WG_ROWS} columns and no cluster, got {self}")
        super().__post_init__()

    @property
    def product_shape(self) -> tuple[int, int]:
        return WG_ROWS, self.tile_m

    def operands(self, refs: Refs, slot, warpgroup) -> tuple:
        return refs.w_s.at[slot, pl.ds(warpgroup * WG_ROWS, WG_ROWS)], refs.x_s.at[slot].T

    def load_x_scale(self, refs: Refs, slot, warpgroup) -> tuple[jax.Array, int]:
        scales = refs.x_scale_s.at[slot, pl.ds(0, self.tile_m)]
        return plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(0)), 1

    def out_buffer(self):
        return plgpu.SMEM((2, self.tile_m, WG_ROWS), jnp.bfloat16, transforms=swizzle_transforms(jnp.bfloat16, WG_ROWS))

    def scratch(self) -> dict:
        # Rows of an unswizzled tile can be stored one by one, which exact rows need.
        tail = {"tail_s": plgpu.SMEM((2, _CHUNK, WG_ROWS), jnp.bfloat16)} if self.schedule.exact_rows else {}
        return super().scratch() | tail

    def store(self, refs: Refs, warpgroup, tile: Tile, sums: list[jax.Array]) -> None:
        (total,) = sums
        out_s = refs.o_s.at[warpgroup]
        out_s.T[...] = plgpu.layout_cast(total.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        columns = pl.ds(self.column(tile) + warpgroup * WG_ROWS, WG_ROWS)
        target = refs.out.at[tile.x_group, :, columns]
        if not self.schedule.exact_rows:
            plgpu.copy_smem_to_gmem(out_s, target.at[pl.ds(tile.row, self.tile_m)])
            return

        @pl.when(tile.rows >= self.tile_m)
        def _whole():
            plgpu.copy_smem_to_gmem(out_s, target.at[pl.ds(tile.row, self.tile_m)])

        @pl.when(tile.rows < self.tile_m)
        def _part():
            self.store_part(out_s, refs.tail_s.at[warpgroup], target, tile, total)

    def store_part(self, out_s, tail_s, target, tile: Tile, total) -> None:
        """Stores tile.rows of the tile's rows: whole chunks of a swizzle's eight rows, then the rest row by row.

        The rest cannot leave through the swizzled buffer, nor be transposed into another. A row of the output is a
        column of `total`: it is singled out by a sum over a mask, and lands as a vector in an unswizzled buffer.
        """
        for start in range(0, self.tile_m - _CHUNK, _CHUNK):

            @pl.when(tile.rows >= start + _CHUNK)
            def _store_chunk(start=start):
                chunk = pl.ds(start, _CHUNK)
                plgpu.copy_smem_to_gmem(out_s.at[chunk], target.at[pl.ds(tile.row + start, _CHUNK)])

        rest = lax.rem(tile.rows, jnp.int32(_CHUNK))
        first = tile.rows - rest
        column = plgpu.broadcasted_iota(jnp.int32, self.product_shape, 1, layout=plgpu.Layout.WGMMA)

        def single_out(i, _):
            row = jnp.sum(jnp.where(column == first + i, total, 0.0), axis=1)
            tail_s[i] = row.astype(jnp.bfloat16)

        lax.fori_loop(0, rest, single_out, None)
        plgpu.commit_smem()
        store_rows(tail_s, target, tile.row + first, rest)


@dataclasses.dataclass(frozen=True)
class SplitKernel(NarrowKernel):
    """The narrow kernel with K in parts: -> [splits, N, M] float32, to be summed and transposed by XLA."""

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
