"""The kernel of FP4 weights, which become e4m3 in registers, as the left operand of the tensor core.

It is the narrow FP8 kernel with weights of half the bytes: sums and scales are those of FP8. A word becomes two
registers of four values with two byte selections from a table of the eight magnitudes; the table of a row's scale
group is its power of two, times and plus constants.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels import fp4, multiprocessors
from pallas_kernels.float8 import BLOCK, E4M3
from pallas_kernels.gemm.dispatch import row_scales
from pallas_kernels.gemm.kernel import MISC_BYTES, TMA_ALIGNMENT, WG_ROWS, Refs
from pallas_kernels.gemm.narrow import NarrowKernel
from pallas_kernels.gemm.plan import NARROW_TILE_N, NARROW_TILES_M
from pallas_kernels.gemm.schedule import Contiguous, Tile
from pallas_kernels.mosaic import SMEM_BYTES, inline_mgpu, plgpu, row_layout

_WEIGHT_BYTES = NARROW_TILE_N * (BLOCK // 2 + 4)
"""Words and powers of a stage."""

# Bytes of e4m3 magnitudes, codes 0 to 3 and 4 to 7 from the lowest on, of a group that lies MAX_SPREAD places below its
# block; and the bytes to which the group's step is added. Zero stays zero.
_LOW, _LOW_STEPS = 0x14100800, 0x01010100
_HIGH, _HIGH_STEPS = 0x24201C18, 0x01010101


@functools.cache
def to_registers() -> Any:
    """Returns the function of words `[64, 16]` in wgmma's layout and powers `[64]` that gives values e4m3 `[64, 128]`.

    Values have the layout of wgmma's left operand in registers.
    """
    arg_types = plgpu.Layout.WGMMA, row_layout()
    result = plgpu.ShapeDtypeStruct((WG_ROWS, BLOCK), E4M3, layout=plgpu.Layout.WGMMA_8BIT)

    def model(words: jax.Array, powers: jax.Array) -> jax.Array:
        return fp4.to_e4m3(words, powers[None])

    return inline_mgpu(_convert, arg_types, result, model)


def _convert(_: Any, words: Any, powers: Any) -> Any:
    """Emits the conversion; arrays are Mosaic's fragments.

    A thread has two rows, 8 apart: of each row two neighboring words and two that are 8 words further on.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    i32, i8, e4m3 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8), ir.Float8E4M3FNType.get()

    def constant(value: int) -> Any:
        return mgpu.c(int(np.uint32(value).view(np.int32)), i32)

    def elements(fragment: Any) -> list[Any]:
        found: list[Any] = []
        for register in fragment.registers.flat:
            if isinstance(register.type, ir.VectorType):
                places = range(register.type.shape[0])
                found += [vector.extract(register, dynamic_position=[], static_position=[i]) for i in places]
            else:
                found.append(register)
        return found

    def select(table: tuple[Any, Any], selector: Any) -> Any:
        return llvm.inline_asm(i32, [*table, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")

    steps = elements(powers)

    @functools.cache
    def table(row: int, group: int) -> tuple[Any, Any]:
        step = arith.andi(arith.shrui(steps[row], constant(8 * group)), constant(255))
        low = arith.addi(arith.muli(step, constant(_LOW_STEPS)), constant(_LOW))
        return low, arith.addi(arith.muli(step, constant(_HIGH_STEPS)), constant(_HIGH))

    values = {}
    for i, word in enumerate(elements(words)):  # pairs of words, of rows, of pairs
        row, group = i // 2 % 2, i // 4 * 2 + i % 2
        magnitudes = arith.andi(word, constant(0x77777777))
        for half, (selector, signs) in enumerate(
            ((magnitudes, word), (arith.shrui(magnitudes, constant(16)), arith.shli(word, constant(4))))
        ):
            signs = arith.andi(signs, constant(0x80808080))
            values[group, half, row] = arith.ori(select(table(row, group), selector), signs)

    registers = np.empty(mgpu.WGMMA_LAYOUT_8BIT.registers_shape((WG_ROWS, BLOCK)), dtype=object)
    for index, key in zip(np.ndindex(registers.shape), sorted(values), strict=True):
        four = vector.bitcast(ir.VectorType.get((4,), i8), vector.broadcast(ir.VectorType.get((1,), i32), values[key]))
        registers[index] = vector.bitcast(ir.VectorType.get((4,), e4m3), four)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT_8BIT, _is_signed=None)


@dataclasses.dataclass(frozen=True)
class Fp4Kernel(NarrowKernel):
    """[1, M, K] e4m3 x words [Gw, N, K / 8] with powers [Gw, K / 128, N] -> [1, M, N] of 16 bits."""

    @property
    def name(self) -> str:
        return f"fp4_contiguous_{self.tile_m}x{self.tile_n}"

    @property
    def scale_names(self) -> tuple[str, ...]:
        return (*super().scale_names, "w_powers")

    @property
    def weight_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.uint32)

    @property
    def weight_k(self) -> int:
        return fp4.WORDS

    def max_depth(self) -> int:
        stage_bytes = self.tile_m * BLOCK + _WEIGHT_BYTES + max(TMA_ALIGNMENT, self.tile_m * 4)
        return (SMEM_BYTES - MISC_BYTES - self.tile_m * self.tile_n * 2) // stage_bytes

    def scratch(self) -> dict:
        return super().scratch() | {
            "w_powers_s": plgpu.SMEM((self.depth, self.tile_n), jnp.uint32),
            "full": plgpu.Barrier(num_arrivals=4, num_barriers=self.depth),
        }

    def load_stage(self, refs: Refs, tile: Tile, i, stage, *, shares_weights: bool) -> None:
        super().load_stage(refs, tile, i, stage, shares_weights=shares_weights)
        powers = refs.w_powers.at[tile.w_group, tile.k_begin + i, pl.ds(self.column(tile), self.tile_n)]
        plgpu.copy_gmem_to_smem(powers, refs.w_powers_s.at[stage], refs.full.at[stage])

    def operands(self, refs: Refs, stage, warpgroup) -> tuple:
        rows = pl.ds(warpgroup * WG_ROWS, WG_ROWS)
        words = plgpu.load(refs.w_s.at[stage, rows], layout=plgpu.Layout.WGMMA)
        powers = plgpu.load(refs.w_powers_s.at[stage, rows], layout=row_layout())
        return to_registers()(words, powers), refs.x_s.at[stage].T


def fp4_kernel(
    shape: tuple[int, int, int], out_dtype: jax.typing.DTypeLike, tile_m: int, k: int, stages: int | None = None
) -> Fp4Kernel:
    """Returns the kernel of a result `shape` [1, M, N] in tiles of `tile_m` rows, for weights with K columns."""
    _, m, n = shape
    return Fp4Kernel(
        tile_m=tile_m,
        tile_n=NARROW_TILE_N,
        stages=stages,
        cluster=1,
        schedule=Contiguous(m, tile_m),
        dtype=E4M3,
        out_type=jax.ShapeDtypeStruct(shape, out_dtype),
        shape_n=n,
        shape_k=k,
    )


def fp4_contiguous(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_powers: jax.Array,
    w_scale: jax.Array,
    tile_group: jax.Array,
    group_offset: jax.Array | int,
    tile_m: int,
    out_dtype: jax.typing.DTypeLike,
    *,
    stages: int | None = None,
    num_sms: int | None = None,
) -> jax.Array:
    """Multiplies aligned rows x [A, K] with their tiles' FP4 words on Hopper.

    Operands are checked by the caller.

    Raises ValueError for an unsupported tile height, a result that has not 16 bits, or N that is no multiple of 8.
    """
    (m, k), n = x.shape, w.shape[1]
    if tile_m not in NARROW_TILES_M or n % 8 or jnp.dtype(out_dtype).itemsize != 2:
        raise ValueError(
            f"grouped gemm, FP4: kernels have tiles of {NARROW_TILES_M} rows, N in multiples of 8 and results of 16 "
            f"bits, got tile_m={tile_m}, N={n} and out_dtype {jnp.dtype(out_dtype)}"
        )
    kernel = fp4_kernel((1, m, n), out_dtype, tile_m, k, stages)
    offset = jnp.asarray(group_offset, jnp.int32).reshape(1)
    blocks = num_sms or multiprocessors.traced().taken
    scales = row_scales(x_scale)[None], w_scale, w_powers
    return kernel(x[None], w, scales, (tile_group.astype(jnp.int32), offset), blocks)[0]
