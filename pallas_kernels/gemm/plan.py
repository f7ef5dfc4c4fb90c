"""The kernel and the tile that a product gets, by an estimate that compares the plans of one product.

The estimate counts waves: `ceil(tiles / multiprocessors)` times the cycles of a tile. A tile takes the longer of its
arithmetic and its loads, and a product never less than reading its operands from memory once. So a tile width such as
112 wins where it leaves fewer multiprocessors idle in the last wave. The constants are round figures for an H200, not
measurements; `benchmarks/gpu/fp8_gemm.py` measures the likeliest plans beside the chosen one.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

from pallas_kernels.mosaic import NUM_SMS

WIDE_TILE_M = 128
NARROW_TILES_M = (8, 16, 32, 64, 128)
NARROW_TILE_N = 128
FP8_TILES_N = (64, 80, 96, 112, 128, 144, 160, 192)
"""Widths that meet at most two weight scales wherever they begin: at most 128 + gcd(width, 128)."""
BF16_TILES_N = (64, 96, 128, 160, 192, 224, 256)

_FLOPS_PER_CYCLE = 8192 * 0.7  # of one multiprocessor in FP8; the factor is what kernels reach
_L2_BYTES_PER_CYCLE = 40  # into one multiprocessor
_MEMORY_BYTES_PER_CYCLE = 2400  # of the device
_TILE_CYCLES = 1500  # filling the ring and storing the result
_SPLIT_CYCLES = 4000  # the kernel that adds the parts
_MAX_SPLITS = 32
_MAX_SPLIT_ROWS = 4096  # 32 tiles of rows; four tiles of columns fill the multiprocessors without splitting K
_MAX_FLOAT32_TILE_N = 192  # a wider tile of float32 on its way out would leave no ring of stages


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """A kernel and its tile.

    Attributes:
      wide: activations are the tensor core's rows; else the weights are.
      tile_m, tile_n: rows and columns of a tile.
      splits: parts of K that are computed apart (narrow dense products).
      cluster: neighboring blocks that share the activations by multicast (wide). No plan chooses more than 1 until a
        GPU has shown that it gains; see docs/kernels_fp8.md.
      stages: stages of the ring; None fills the shared memory.
    """

    wide: bool
    tile_m: int
    tile_n: int
    splits: int = 1
    cluster: int = 1
    stages: int | None = None


@functools.cache
def plan_dense(m: int, n: int, k: int, itemsize: int, *, float32: bool = False) -> TilePlan:
    """Returns the plan of a product [m, k] x [n, k] of FP8 (itemsize 1) or 16-bit values (2).

    The result has 16 bits, or 32 with `float32`.
    """
    plans = (plan for plan in dense_plans(m, itemsize) if not float32 or plan.tile_n <= _MAX_FLOAT32_TILE_N)
    return min(plans, key=lambda plan: estimated_cycles(plan, m, n, k, itemsize))


@functools.cache
def plan_contiguous(m: int, tile_m: int, n: int, k: int, itemsize: int) -> TilePlan:
    """Returns the plan of a grouped product of m aligned rows in tiles of `tile_m`: the layout fixes the kernel.

    Raises:
      ValueError: no kernel has that tile height.
    """
    if tile_m not in NARROW_TILES_M:
        raise ValueError(f"grouped kernels have tiles of {NARROW_TILES_M} rows, got tile_m={tile_m}")
    if tile_m != WIDE_TILE_M:
        return TilePlan(False, tile_m, NARROW_TILE_N)
    return _best_wide(m, n, k, itemsize)


def dense_plans(m: int, itemsize: int) -> Iterator[TilePlan]:
    """Plans worth considering, and measuring, for m rows."""
    if m > 64:
        yield from wide_plans(itemsize)
    for splits in range(1, _MAX_SPLITS + 1) if m <= _MAX_SPLIT_ROWS else ():
        yield TilePlan(False, narrow_tile_m(m), NARROW_TILE_N, splits)


def wide_plans(itemsize: int) -> Iterator[TilePlan]:
    """Returns the wide plans worth considering, and measuring, for operands of that size."""
    for tile_n in FP8_TILES_N if itemsize == 1 else BF16_TILES_N:
        yield TilePlan(True, WIDE_TILE_M, tile_n)


def narrow_tile_m(rows: int) -> int:
    """Returns the least narrow tile that holds `rows` rows, or the largest."""
    return next((tile for tile in NARROW_TILES_M if tile >= rows), NARROW_TILES_M[-1])


def _best_wide(m: int, n: int, k: int, itemsize: int) -> TilePlan:
    return min(wide_plans(itemsize), key=lambda plan: estimated_cycles(plan, m, n, k, itemsize))


def estimated_cycles(plan: TilePlan, m: int, n: int, k: int, itemsize: int) -> float:
    """Estimates the cycles of a product under a plan."""
    tiles = math.ceil(m / plan.tile_m) * math.ceil(n / plan.tile_n) * plan.splits
    depth = math.ceil(k / 128 / plan.splits) * 128
    arithmetic = 2 * plan.tile_m * plan.tile_n * depth * itemsize / _FLOPS_PER_CYCLE
    loads = (plan.tile_m + plan.tile_n) * depth * itemsize / _L2_BYTES_PER_CYCLE
    waves = math.ceil(tiles / NUM_SMS) * (max(arithmetic, loads) + _TILE_CYCLES)
    memory = (m + n) * k * itemsize / _MEMORY_BYTES_PER_CYCLE
    split = _SPLIT_CYCLES + 8 * plan.splits * m * n / _MEMORY_BYTES_PER_CYCLE if plan.splits > 1 else 0
    return max(waves, memory) + split
