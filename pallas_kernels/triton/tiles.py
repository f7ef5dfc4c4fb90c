"""The tile of each Triton kernel, which fits the shared memory and the registers of a GPU.

Round figures, not measurements: `benchmarks/gpu/triton_kernels.py` compiles all of them for every GPU and reports their
resources. Nothing here has run on a GPU.
"""

import dataclasses
from collections.abc import Iterator

from pallas_kernels.gpus import GpuKind

_LARGE = 200 << 10
"""Shared memory of GPUs whose tensor cores read operands from it, which saves registers."""
_RESERVED = 4 << 10  # bytes of shared memory that a compiler takes for reductions and changes of layout


@dataclasses.dataclass(frozen=True)
class TritonTile:
    """Rows and columns of a tile; `depth` of the contracted dimension at once (products)."""

    rows: int
    columns: int
    warps: int
    stages: int
    depth: int = 0


def paged_tile(gpu: GpuKind, rows: int, width: int, itemsize: int, *, fp8_pages: bool) -> TritonTile:
    """Returns rows of queries by keys of a page for decode attention.

    Args:
      rows: of one group: queries times heads.
      width: R + P.
      itemsize: bytes of a value that is multiplied.
      fp8_pages: latents are widened in registers, so tiles are smaller.
    """
    block = min(power_of_two(rows), 32)  # a row's output takes 512 registers
    keys = 32 if gpu.shared_memory > 128 << 10 and not fp8_pages else 16
    stages = max(1, min(3, (gpu.shared_memory - _RESERVED - block * width * itemsize) // (keys * width * itemsize)))
    return TritonTile(block, keys, warps=8 if block > 16 else 4, stages=stages)


def listed_tile(gpu: GpuKind, heads: int, *, fp8_rows: bool) -> TritonTile:
    """Returns heads of a query by rows of its list for compressed attention; FP8 rows are decoded in registers."""
    block, rows = min(power_of_two(heads), 32), 32 if gpu.shared_memory > 128 << 10 else 16
    if fp8_rows:  # no registers are left for rows in flight; more warps would compute the same scores
        return TritonTile(block, rows, warps=rows // 4, stages=1)
    return TritonTile(block, rows, warps=8, stages=2)  # on Hopper and Blackwell two programs fit a multiprocessor


def segments_tile(gpu: GpuKind, key_width: int, value_width: int, itemsize: int) -> TritonTile:
    """Returns tokens by keys of a tile of prefill attention."""
    keys = 32 if gpu.shared_memory < _LARGE or key_width > 192 else 64
    per_stage = keys * (key_width + value_width) * itemsize
    stages = 2 if 2 * per_stage + _RESERVED <= gpu.shared_memory else 1
    if gpu.shared_memory >= _LARGE and key_width <= 192:
        return TritonTile(128, keys, warps=8, stages=stages)
    return TritonTile(64, keys, warps=4 if key_width <= 192 else 8, stages=stages)


def product_tile(gpu: GpuKind, rows: int, itemsize: int) -> TritonTile:
    """Returns the tile of a product of `rows` rows per weight, of operands of `itemsize` bytes."""
    block = min(power_of_two(rows), 128)
    widened = itemsize == 1 and not gpu.fp8 and block == 128  # takes registers
    columns = 128 if block >= 64 and not widened else 64
    # Scaled products have two sums in registers, that of 128 of K and the total.
    warps = 8 if block == 128 or (block == 64 and itemsize == 1) else 4
    return TritonTile(block, columns, warps, _product_stages(gpu, block, columns, itemsize), _depth(itemsize))


def int4_tile(rows: int) -> TritonTile:
    """Returns the tile of a product with INT4 weights, of 256 of K at once: more rows or columns take registers."""
    return TritonTile(min(power_of_two(rows), 64), 64, warps=4, stages=2, depth=256)


def fp4_tile(rows: int) -> TritonTile:
    """Returns the tile of a product with FP4 weights, of 128 of K at once."""
    return TritonTile(min(power_of_two(rows), 64), 64, warps=4, stages=2, depth=128)


def product_tiles(gpu: GpuKind, rows: int, itemsize: int) -> Iterator[TritonTile]:
    """Yields the tiles that are worth measuring for a product, that of `product_tile` first."""
    default = product_tile(gpu, rows, itemsize)
    yield default
    for columns in (64, 128):
        most = _product_stages(gpu, default.rows, columns, itemsize)
        for warps, stages in ((warps, stages) for warps in (4, 8) for stages in range(2, most + 1)):
            tile = dataclasses.replace(default, columns=columns, warps=warps, stages=stages)
            if tile != default:
                yield tile


def _product_stages(gpu: GpuKind, rows: int, columns: int, itemsize: int) -> int:
    per_stage = (rows + columns) * _depth(itemsize) * itemsize
    return max(2, min(4, (gpu.shared_memory - _RESERVED) // per_stage))


def _depth(itemsize: int) -> int:
    return 128 if itemsize == 1 else 64


def k_splits(gpu: GpuKind, tiles: int, k_blocks: int) -> int:
    """Returns the parts of K that fill the multiprocessors when there are few tiles, at least four blocks each."""
    return max(1, min(gpu.multiprocessors // tiles, k_blocks // 4, 16))


def page_splits(gpu: GpuKind, groups: int, table_width: int) -> int:
    """Returns the parts that a request's pages are cut into: two programs per multiprocessor, 32 parts at most."""
    return max(1, min(-(-2 * gpu.multiprocessors // groups), table_width, 32))


def power_of_two(rows: float, least: int = 16) -> int:
    """Returns the smallest power of two that holds `rows`, at least `least`: a tensor core's product has 16."""
    power = least
    while power < rows:
        power *= 2
    return power
