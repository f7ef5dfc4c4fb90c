"""Which kernel and tile a product gets: a measured entry where there is one, an estimate elsewhere.

The estimate counts waves: `ceil(tiles / multiprocessors)` times the cycles of a tile, where a tile takes the longer of
its arithmetic and its loads, never less than reading the operands from memory once. So a tile width such as 112 wins
where it leaves fewer multiprocessors idle in the last wave. Its constants are round figures for an H200, not
measurements; `benchmarks/gpu/fp8_gemm.py` replaces estimates by measurements in `tuned.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

from pallas_kernels.gemm.tuned import TUNED
from pallas_kernels.mosaic import NUM_SMS

WIDE_TILE_M = 128
NARROW_TILES_M = (8, 16, 32, 64, 128)
NARROW_TILE_N = 128
FP8_TILES_N = (64, 80, 96, 112, 128, 144, 160, 192)
"""Widths that meet at most two weight scales wherever they begin: at most 128 + gcd(width, 128)."""
BF16_TILES_N = (64, 96, 128, 160, 192, 224, 256)
EXACT_TILES_N = (64, 128, 192)
"""Widths whose rows can be stored one by one: TMA wants multiples of 128 bytes, Mosaic no more than 192 columns."""

_FLOPS_PER_CYCLE = 8192 * 0.7  # of one multiprocessor in FP8; the factor is what kernels reach
_L2_BYTES_PER_CYCLE = 40  # into one multiprocessor
_MEMORY_BYTES_PER_CYCLE = 2400  # of the device
_TILE_CYCLES = 1500  # filling the ring and storing the result
_SPLIT_CYCLES = 4000  # the kernel that adds the parts
_MAX_SPLITS = 32
_MAX_SPLIT_ROWS = 4096  # 32 tiles of rows; four tiles of columns fill the multiprocessors without splitting K
_MAX_FLOAT32_TILE_N = 192  # a wider tile of float32 on its way out would leave no ring of stages


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel and its tile.

    Attributes:
      wide: activations are the tensor core's rows; else the weights are.
      tile_m, tile_n: rows and columns of a tile.
      splits: parts of K that are computed apart (narrow dense products).
      cluster: neighbouring blocks that share the activations by multicast (wide).
      stages: depth of the ring of stages; None fills the shared memory.
    """

    wide: bool
    tile_m: int
    tile_n: int
    splits: int = 1
    cluster: int = 1
    stages: int | None = None


@functools.cache
def plan_dense(m: int, n: int, k: int, itemsize: int, *, float32: bool = False) -> Plan:
    """The plan of a product [m, k] x [n, k] of FP8 (itemsize 1) or bfloat16 (2), with a bfloat16 or float32 result."""
    measured = None if float32 else TUNED.get(dense_key(m, n, k, itemsize))
    if measured:
        return Plan(*measured)
    plans = (plan for plan in dense_plans(m, itemsize) if not float32 or plan.tile_n <= _MAX_FLOAT32_TILE_N)
    return min(plans, key=lambda plan: estimated_cycles(plan, m, n, k, itemsize))


@functools.cache
def plan_contiguous(m: int, tile_m: int, n: int, k: int, itemsize: int) -> Plan:
    """The plan of a grouped product of m aligned rows in tiles of `tile_m`: the caller's layout fixes the kernel.

    Raises:
      ValueError: no kernel has that tile height.
    """
    if tile_m not in NARROW_TILES_M:
        raise ValueError(f"grouped kernels have tiles of {NARROW_TILES_M} rows, got tile_m={tile_m}")
    measured = TUNED.get(("contiguous", tile_m, n, k, itemsize))
    if measured:
        return Plan(*measured)
    if tile_m != WIDE_TILE_M:
        return Plan(False, tile_m, NARROW_TILE_N)
    return _best_wide(m, n, k, itemsize)


@functools.cache
def plan_masked(groups: int, expected_rows: int, n: int, k: int, itemsize: int) -> Plan:
    """The plan of a masked product whose groups are expected to hold `expected_rows` rows each."""
    tile_m = narrow_tile_m(expected_rows)
    measured = TUNED.get(("masked", groups, tile_m, n, k, itemsize))
    if measured:
        return Plan(*measured)
    if expected_rows <= 64:
        return Plan(False, tile_m, NARROW_TILE_N)
    return _best_wide(groups * expected_rows, n, k, itemsize, EXACT_TILES_N)


def dense_plans(m: int, itemsize: int) -> Iterator[Plan]:
    """Plans worth considering, and measuring, for m rows."""
    if m > 64:
        yield from wide_plans(itemsize)
    for splits in range(1, _MAX_SPLITS + 1) if m <= _MAX_SPLIT_ROWS else ():
        yield Plan(False, narrow_tile_m(m), NARROW_TILE_N, splits)


def wide_plans(itemsize: int) -> Iterator[Plan]:
    """Wide plans worth considering, and measuring, for operands of that size."""
    for tile_n in FP8_TILES_N if itemsize == 1 else BF16_TILES_N:
        yield Plan(True, WIDE_TILE_M, tile_n)


def narrow_tile_m(rows: int) -> int:
    """The least narrow tile that holds `rows` rows, or the largest."""
    return next((tile for tile in NARROW_TILES_M if tile >= rows), NARROW_TILES_M[-1])


def dense_key(m: int, n: int, k: int, itemsize: int) -> tuple:
    """Where `tuned.py` keeps the plan of a dense product."""
    return "dense", _bucket(m), n, k, itemsize


def _best_wide(m: int, n: int, k: int, itemsize: int, widths: tuple[int, ...] | None = None) -> Plan:
    plans = (plan for plan in wide_plans(itemsize) if widths is None or plan.tile_n in widths)
    return min(plans, key=lambda plan: estimated_cycles(plan, m, n, k, itemsize))


def _bucket(m: int) -> int:
    """Row counts that share a measured plan: powers of two up to 128, multiples of 128 beyond."""
    return 1 << (m - 1).bit_length() if m <= WIDE_TILE_M else math.ceil(m / WIDE_TILE_M) * WIDE_TILE_M


def estimated_cycles(plan: Plan, m: int, n: int, k: int, itemsize: int) -> float:
    """Estimated cycles of a product, comparable between plans of one product."""
    tiles = math.ceil(m / plan.tile_m) * math.ceil(n / plan.tile_n) * plan.splits
    depth = math.ceil(k / 128 / plan.splits) * 128
    arithmetic = 2 * plan.tile_m * plan.tile_n * depth * itemsize / _FLOPS_PER_CYCLE
    loads = (plan.tile_m + plan.tile_n) * depth * itemsize / _L2_BYTES_PER_CYCLE
    waves = math.ceil(tiles / NUM_SMS) * (max(arithmetic, loads) + _TILE_CYCLES)
    memory = (m + n) * k * itemsize / _MEMORY_BYTES_PER_CYCLE
    split = _SPLIT_CYCLES + 8 * plan.splits * m * n / _MEMORY_BYTES_PER_CYCLE if plan.splits > 1 else 0
    return max(waves, memory) + split
