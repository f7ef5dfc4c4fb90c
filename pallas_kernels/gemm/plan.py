"""Selects the kernel and the tile of a product by an estimate of cycles, unless one was measured (`tuned`).

The estimate is `ceil(tiles / multiprocessors)` waves times the cycles of a tile: the longest of its tensor-core
products, their operands' shared-memory reads, and its loads from the L2 cache, where a cluster of two blocks fetches
activations or weights once. The lower bound of a product is reading its operands from memory once. A tile width such as
112 wins where it leaves fewer multiprocessors idle in the last wave. The constants are data-sheet and round figures for
an H200, not measurements; `benchmarks/gpu/machine_code.py` reads such bounds from the compiled kernels, and
`benchmarks/gpu/fp8_gemm.py` times the best plans beside the selected one.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

from pallas_kernels import invariance, tuned
from pallas_kernels.mosaic import NUM_SMS

DENSE, GROUPED = "dense product on Hopper", "grouped product on Hopper"
"""Kernels of measured plans."""

WIDE_TILE_M = 128
TALL_TILE_M = 256
TALL_TILE_N = 128
NARROW_TILES_M = (8, 16, 32, 64, 128)
NARROW_TILE_N = 128
FP8_TILES_N = (64, 80, 96, 112, 128, 144, 160, 192)
"""Widths that span at most two weight scales at any start: at most 128 + gcd(width, 128)."""
BF16_TILES_N = (64, 96, 128, 160, 192, 224, 256)

_STEP_BYTES = 128  # of K in a stage
_PRODUCT_ROWS, _PRODUCT_BYTES = 64, 32  # rows of a product in the tensor core, and bytes of K
_SHARED_BYTES_PER_CYCLE = 128
_L2_BYTES_PER_CYCLE = 40  # into one multiprocessor
_MEMORY_BYTES_PER_CYCLE = 2400  # of the device
_TILE_CYCLES, _TILE_VALUES = 1500, 128 * 192  # filling the ring and storing the result; a larger one takes longer
_SPLIT_CYCLES = 4000  # the kernel that adds the parts
_MAX_SPLITS = 32
_MAX_SPLIT_ROWS = 4096  # 32 tiles of rows; four tiles of columns fill the multiprocessors without splitting K
_MAX_FLOAT32_VALUES = 128 * 192  # staging a larger tile of float32 would leave no shared memory for the ring


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """A kernel and its tile.

    Attributes:
      wide: activations are the tensor core's rows; else the weights are.
      tile_m, tile_n: rows and columns of a tile; a wide one of 256 rows is a tall kernel's (dense, FP8).
      splits: parts of K (narrow dense products).
      cluster: neighboring blocks along N that share the activations by multicast (wide), 1 or 2. In a grouped product
        they are neighbors along M and share the weights if both have one group.
      shares_weights: the blocks of a cluster are neighbors along M and share the weights (wide, dense).
      stages: stages of the ring; None fills the shared memory.
    """

    wide: bool
    tile_m: int
    tile_n: int
    splits: int = 1
    cluster: int = 1
    stages: int | None = None
    shares_weights: bool = False

    @property
    def is_tall(self) -> bool:
        return self.wide and self.tile_m == TALL_TILE_M

    @property
    def values(self) -> int:
        """Values of the result in a tile."""
        return self.tile_m * self.tile_n

    @property
    def cluster_m(self) -> int:
        """Tiles of a cluster along M."""
        return self.cluster if self.shares_weights else 1

    @property
    def cluster_n(self) -> int:
        """Tiles of a cluster along N."""
        return self.cluster // self.cluster_m


def plan_dense(m: int, n: int, k: int, itemsize: int, *, float32: bool = False, num_sms: int = NUM_SMS) -> TilePlan:
    """Returns the plan of a product [m, k] x [n, k] of FP8 (itemsize 1) or 16-bit values (2).

    The result has 16 bits, or 32 with `float32`. `num_sms` are the kernel's multiprocessors.
    """
    shape = (m, n, k, itemsize, 4 if float32 else 2, num_sms)
    return tuned.choose(DENSE, shape, _likeliest_dense(*shape)[0], lambda: _likeliest_dense(*shape))


@functools.cache
def _likeliest_dense(m: int, n: int, k: int, itemsize: int, out_size: int, num_sms: int) -> list[TilePlan]:
    """Returns the legal plans, the least estimate first."""
    plans = (plan for plan in dense_plans(m, itemsize) if out_size < 4 or plan.values <= _MAX_FLOAT32_VALUES)
    return sorted(plans, key=lambda plan: estimated_cycles(plan, m, n, k, itemsize, num_sms))


def plan_invariant(n: int, k: int, itemsize: int, *, float32: bool = False) -> TilePlan:
    """Returns the plan of a product of any number of rows whose bits must not depend on that number.

    It is that of a tile's rows on all multiprocessors, without parts of K: their sums take memory for every row.
    """
    plans = _likeliest_dense(invariance.PLANNED_ROWS, n, k, itemsize, 4 if float32 else 2, NUM_SMS)
    return next(plan for plan in plans if plan.splits == 1)


def plan_contiguous(m: int, tile_m: int, n: int, k: int, itemsize: int, num_sms: int = NUM_SMS) -> TilePlan:
    """Returns the plan of a grouped product of m aligned rows in tiles of `tile_m`: the layout fixes the kernel.

    Raises:
      ValueError: the tile height is unsupported.
    """
    if tile_m not in NARROW_TILES_M:
        raise ValueError(f"grouped kernels have tiles of {NARROW_TILES_M} rows, got tile_m={tile_m}")
    if tile_m != WIDE_TILE_M:
        return TilePlan(False, tile_m, NARROW_TILE_N)
    shape = (m, n, k, itemsize, num_sms)
    return tuned.choose(GROUPED, shape, _likeliest_wide(*shape)[0], lambda: _likeliest_wide(*shape))


@functools.cache
def _likeliest_wide(m: int, n: int, k: int, itemsize: int, num_sms: int) -> list[TilePlan]:
    return sorted(wide_plans(itemsize), key=lambda plan: estimated_cycles(plan, m, n, k, itemsize, num_sms))


def dense_plans(m: int, itemsize: int) -> Iterator[TilePlan]:
    """Yields the candidate plans for m rows."""
    if m > WIDE_TILE_M:  # first: on a tie they load least
        yield from wide_plans(itemsize, shares_weights=True)
    if m > WIDE_TILE_M and itemsize == 1:
        yield TilePlan(True, TALL_TILE_M, TALL_TILE_N, cluster=2)
    if m > 64:
        yield from wide_plans(itemsize)
    for splits in range(1, _MAX_SPLITS + 1) if m <= _MAX_SPLIT_ROWS else ():
        yield TilePlan(False, narrow_tile_m(m), NARROW_TILE_N, splits)


def wide_plans(itemsize: int, *, shares_weights: bool = False) -> Iterator[TilePlan]:
    """Yields the candidate wide plans for operands of that size.

    Row tiles of a grouped product may have different weights, so only a dense one always shares them. For a grouped one
    the estimate assumes shared activations; sharing weights loads less.
    """
    for tile_n in FP8_TILES_N if itemsize == 1 else BF16_TILES_N:
        for cluster in (2,) if shares_weights else (1, 2):
            yield TilePlan(True, WIDE_TILE_M, tile_n, cluster=cluster, shares_weights=shares_weights)


def narrow_tile_m(rows: int) -> int:
    """Returns the smallest narrow tile that holds `rows` rows, else the largest."""
    return next((tile for tile in NARROW_TILES_M if tile >= rows), NARROW_TILES_M[-1])


def estimated_cycles(plan: TilePlan, m: int, n: int, k: int, itemsize: int, num_sms: int = NUM_SMS) -> float:
    """Estimates the cycles of a product under a plan on `num_sms` multiprocessors."""
    rows, columns = plan.tile_m * plan.cluster_m, plan.tile_n * plan.cluster_n
    clusters = math.ceil(m / rows) * math.ceil(n / columns) * plan.splits
    steps = math.ceil(k / 128 / plan.splits) * itemsize
    tile = steps * _step_cycles(plan) + _TILE_CYCLES * max(1, plan.values / _TILE_VALUES)
    waves = math.ceil(clusters / max(1, num_sms // plan.cluster)) * tile
    memory = (m + n) * k * itemsize / _MEMORY_BYTES_PER_CYCLE
    split = _SPLIT_CYCLES + 8 * plan.splits * m * n / _MEMORY_BYTES_PER_CYCLE if plan.splits > 1 else 0
    return max(waves, memory) + split


def _step_cycles(plan: TilePlan) -> float:
    """Estimates the cycles of a tile's step of 128 bytes of K: the longest of products, shared memory and loads."""
    # The products' rows are activations or weights.
    rows, columns = (plan.tile_m, plan.tile_n) if plan.wide else (plan.tile_n, plan.tile_m)
    count = rows // _PRODUCT_ROWS * _STEP_BYTES // _PRODUCT_BYTES
    products = count * columns / 2
    operands = count * (_PRODUCT_ROWS + columns) * _PRODUCT_BYTES
    arriving = (plan.tile_m + plan.tile_n) * _STEP_BYTES
    loads = (plan.tile_m / plan.cluster_n + plan.tile_n / plan.cluster_m) * _STEP_BYTES
    return max(products, (operands + arriving) / _SHARED_BYTES_PER_CYCLE, loads / _L2_BYTES_PER_CYCLE)
