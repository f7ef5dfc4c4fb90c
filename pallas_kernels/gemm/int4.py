"""The kernel of INT4 weights, which become bfloat16 in registers, as the left operand of the tensor core.

It is the narrow kernel with other weights: 128 rows of them times 8 to 128 tokens. A stage holds 256 of K. The same
four bits of its 32 words per row are 32 columns of one scale group (`pallas_kernels.int4`), so a warpgroup extracts
them from the registers with the words, scales them per row, and multiplies: eight times per stage. The next group is
extracted while the tensor core multiplies.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import multiprocessors
from pallas_kernels.gemm.kernel import MISC_BYTES, WG_ROWS, Refs
from pallas_kernels.gemm.narrow import NarrowKernel
from pallas_kernels.gemm.plan import NARROW_TILE_N, NARROW_TILES_M
from pallas_kernels.gemm.schedule import Contiguous, Tile
from pallas_kernels.int4 import GROUP, RUN, VALUES_PER_WORD
from pallas_kernels.mosaic import SMEM_BYTES, plgpu, row_layout, swizzle_transforms

_WEIGHT_BYTES = NARROW_TILE_N * (RUN // 2 + 2 * VALUES_PER_WORD)
"""Words and scales of a stage."""

# Shift of a word, and the nibble of group j after it: 2, 3 or 4 (see `int4_values`).
_PLACES = ((8, 2), (8, 3), (0, 2), (0, 3), (0, 4), (-12, 2), (-12, 3), (-12, 4))


def int4_values(words: jax.Array, group: int) -> jax.Array:
    """Returns the values of a scale group, -8 to 7, as float32, from the words of its run: int32 of any shape.

    No integer is converted. Nibble p of a float32's mantissa, with the exponent of 2 ** (23 - 4 p), gives
    2 ** (23 - 4 p) plus its number. Nibbles 2 to 4 are whole numbers below the exponent, so that two shifts serve five
    of the eight groups, and three groups need none.
    """
    shift, place = _PLACES[group]
    if shift:
        words = words << shift if shift > 0 else lax.shift_right_logical(words, jnp.int32(-shift))
    exponent = 23 - 4 * place
    bits = (words & (15 << 4 * place)) | ((127 + exponent) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32) - (2.0**exponent + 8)


@dataclasses.dataclass(frozen=True)
class Int4Kernel(NarrowKernel):
    """[1, M, K] bfloat16 x words [Gw, N, K / 8] with [Gw, K / 32, N] bfloat16 -> [1, M, N] bfloat16."""

    @property
    def name(self) -> str:
        return f"int4_contiguous_{self.tile_m}x{self.tile_n}"

    @property
    def scale_names(self) -> tuple[str, ...]:
        return ("w_scale",)

    @property
    def tile_k(self) -> int:
        return RUN

    @property
    def weight_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.int32)

    @property
    def weight_k(self) -> int:
        return RUN // VALUES_PER_WORD

    def max_depth(self) -> int:
        stage_bytes = self.tile_m * RUN * 2 + _WEIGHT_BYTES
        return (SMEM_BYTES - MISC_BYTES - self.tile_m * self.tile_n * 2) // stage_bytes

    def scratch(self) -> dict:
        # A group is one product, so a swizzled row of activations is as long as a group.
        x_swizzled = swizzle_transforms(self.dtype, GROUP)
        return super().scratch() | {
            "x_s": plgpu.SMEM((self.depth, self.tile_m, RUN), self.dtype, transforms=x_swizzled),
            "w_scale_s": plgpu.SMEM((self.depth, VALUES_PER_WORD, self.tile_n), jnp.bfloat16),
        }

    def scale_blocks(self, refs: Refs, tile: Tile, step, stage) -> tuple:
        groups = pl.ds(step * VALUES_PER_WORD, VALUES_PER_WORD)
        scale = refs.w_scale.at[tile.w_group, groups, pl.ds(self.column(tile), self.tile_n)]
        return scale, refs.w_scale_s.at[stage]

    def multiply(self, refs: Refs, warpgroup, tile: Tile, done) -> list[jax.Array]:
        """Sums over K in the tensor core's accumulator; a stage is released after the next one has begun."""
        rows = pl.ds(warpgroup * WG_ROWS, WG_ROWS)

        def accumulate(acc):
            def step(i, _):
                stage = self.stage(done + i)
                plgpu.barrier_wait(refs.full.at[stage])
                words = plgpu.load(refs.w_s.at[stage, rows], layout=plgpu.Layout.WGMMA)
                scales = [self.load_scale(refs, stage, rows, group) for group in range(VALUES_PER_WORD)]
                plgpu.commit_smem()  # all threads have read their words: after the activations the stage is free
                for group, scale in enumerate(scales):
                    weights = int4_values(words, group).astype(self.dtype)
                    weights = weights * lax.broadcast_in_dim(scale, weights.shape, [0])
                    plgpu.wgmma(acc, weights, refs.x_s.at[stage, :, pl.ds(group * GROUP, GROUP)].T)
                    plgpu.wgmma_wait(1)
                    if group == 0:
                        pl.when(i > 0)(lambda: plgpu.barrier_arrive(refs.empty.at[self.stage(done + i - 1)]))

            lax.fori_loop(0, tile.k_steps, step, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(refs.empty.at[self.stage(done + tile.k_steps - 1)])
            return acc[...]

        return [pl.run_scoped(accumulate, plgpu.ACC(self.product_shape, jnp.float32))]

    def load_scale(self, refs: Refs, stage, rows, group: int) -> jax.Array:
        """Returns the scales of a warpgroup's rows in one scale group, [64]."""
        return plgpu.load(refs.w_scale_s.at[stage, group, rows], layout=row_layout())


def int4_contiguous(
    x: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    tile_group: jax.Array,
    group_offset: jax.Array | int,
    tile_m: int,
    *,
    stages: int | None = None,
    num_sms: int | None = None,
) -> jax.Array:
    """Multiplies aligned rows x [A, K] with their tiles' INT4 words on Hopper.

    Operands are checked by the caller.

    Raises ValueError for an unsupported tile height, or N that is no multiple of 8.
    """
    (m, k), n = x.shape, w.shape[1]
    if tile_m not in NARROW_TILES_M or n % 8:
        raise ValueError(f"grouped gemm, INT4: kernels have tiles of {NARROW_TILES_M} rows and N in multiples of "
                         f"8, got tile_m={tile_m} and N={n}")  # fmt: skip
    kernel = Int4Kernel(
        tile_m=tile_m,
        tile_n=NARROW_TILE_N,
        stages=stages,
        cluster=1,
        schedule=Contiguous(m, tile_m),
        dtype=jnp.dtype(x.dtype),
        out_type=jax.ShapeDtypeStruct((1, m, n), x.dtype),
        shape_n=n,
        shape_k=k,
    )
    offset = jnp.asarray(group_offset, jnp.int32).reshape(1)
    blocks = num_sms or multiprocessors.traced().taken
    return kernel(x[None], w, (w_scale,), (tile_group.astype(jnp.int32), offset), blocks)[0]
