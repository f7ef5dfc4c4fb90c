"""The wide kernels: activations are the tensor core's rows. For many rows, where arithmetic is the limit.

The tall one, of FP8 only, has 256 rows by 128 columns: two products of 64 rows per warpgroup and step of K. Its tiles
divide the model's weights, whose rows are multiples of 128, and have one weight scale. It wins where that saves a wave
of multiprocessors.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.float8 import BLOCK
from pallas_kernels.gemm.kernel import WG_ROWS, GemmKernel, Refs
from pallas_kernels.gemm.schedule import Tile
from pallas_kernels.mosaic import plgpu, row_layout

_HALF = 2 * WG_ROWS
"""Rows that both warpgroups multiply at a time, 64 each; more sums and accumulators would not fit their registers."""


@dataclasses.dataclass(frozen=True)
class WideKernel(GemmKernel):
    """[Gx, M, K] x [Gw, N, K] -> [Gx, M, N]: 128 rows by tile_n columns per block, 64 rows per warpgroup."""

    rows: ClassVar[int] = _HALF
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


@dataclasses.dataclass(frozen=True)
class TallKernel(WideKernel):
    """[Gx, M, K] x [Gw, N, K] -> [Gx, M, N]: 256 rows by 128 columns per block, twice 64 rows per warpgroup.

    The halves of the activations arrive one after the other, each at its own barrier.
    """

    rows: ClassVar[int] = 2 * _HALF

    def __post_init__(self):
        super().__post_init__()
        if not self.scaled or self.tile_n != BLOCK:
            raise ValueError(f"a tall tile is of FP8 values and has {BLOCK} columns, got {self}")

    def scratch(self) -> dict:
        return super().scratch() | {"second": plgpu.Barrier(num_arrivals=1, num_barriers=self.depth)}

    def out_buffer(self):
        dtype, transforms = self.out_type.dtype, self.out_transforms(self.tile_n)
        return plgpu.SMEM((self.rows // WG_ROWS, WG_ROWS, self.tile_n), dtype, transforms=transforms)

    def load_x(self, refs: Refs, tile: Tile, k, stage, shared) -> None:
        for half, full in enumerate((refs.full, refs.second)):
            rows = pl.ds(half * _HALF, _HALF)
            to = refs.x_s.at[stage, rows]
            block = refs.x.at[tile.x_group, pl.ds(tile.row + half * _HALF, _HALF), k]
            plgpu.copy_gmem_to_smem(block, to, full.at[stage], collective_axes=shared)

    def multiply(self, refs: Refs, warpgroup, tile: Tile, done) -> list[jax.Array]:
        """Returns the sums over K of both halves."""
        block = jnp.minimum(lax.div(self.column(tile), jnp.int32(BLOCK)), refs.w_scale.shape[1] - 1)

        def scale_of(i):
            return refs.w_scale[tile.w_group, block, self.scale_block(jnp.minimum(tile.k_begin + i, self.k_steps - 1))]

        def step(i, carry):
            (upper, lower), w_scale, stage = carry

            def read_ahead():  # after the last product, as in `multiply_scaled`
                following = scale_of(i + 1)
                plgpu.commit_smem()
                return following

            plgpu.barrier_wait(refs.full.at[stage])
            product, scale, _ = self.multiply_half(refs, stage, warpgroup, w_scale)
            upper += product * scale
            # Not at the previous barrier: ptxas would then scale the upper half after the lower one's product,
            # whose accumulator does not fit too, and spill 112 bytes.
            plgpu.barrier_wait(refs.second.at[stage])
            product, scale, following = self.multiply_half(refs, stage, 2 + warpgroup, w_scale, read_ahead)
            plgpu.barrier_arrive(refs.empty.at[stage])
            lower += product * scale
            return (upper, lower), following, self.next_stage(stage)

        zero = plgpu.layout_cast(jnp.zeros(self.product_shape, jnp.float32), plgpu.Layout.WGMMA)
        sums, _, _ = lax.fori_loop(0, tile.k_steps, step, ((zero, zero), scale_of(0), self.stage(done)))
        return list(sums)

    def multiply_half(self, refs: Refs, stage, rows, w_scale, meanwhile=lambda: None) -> tuple:
        """Returns a product of 64 rows, its scales, and the result of `meanwhile`, which overlaps the tensor core."""
        x_scale, axis = self.load_x_scale(refs, stage, rows)

        def multiply(acc):
            plgpu.wgmma(acc, *self.operands(refs, stage, rows))
            beside = meanwhile()
            return acc[...], beside

        product, beside = pl.run_scoped(multiply, plgpu.ACC(self.product_shape, jnp.float32))
        return product, lax.broadcast_in_dim(x_scale * w_scale, product.shape, [axis]), beside

    def store(self, refs: Refs, warpgroup, tile: Tile, sums: list[jax.Array]) -> None:
        for half, total in enumerate(sums):
            super().store(refs, 2 * half + warpgroup, tile, [total])
