"""The order of rows by group in Triton: a counting sort of few rows, in one kernel."""

import triton
import triton.language as tl


@triton.jit
def align(
    ids_ptr, rows, source_ptr, place_ptr, tile_group_ptr, counts_ptr, needed_ptr, overflow_ptr,
    GROUPS: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the parts of `GroupAlignment` of one group of ids [rows]; the last program has what is in no group.

    Every program counts all groups, because its own begins where those before it end.
    """
    group, number, each = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in tl.range(0, rows, BLOCK):
        counts += tl.histogram(_group_of(ids_ptr, start + number, rows, GROUPS), BINS)
    counts = tl.where(each < GROUPS, counts, 0)
    padded = (counts + TILE - 1) // TILE * TILE
    first = tl.sum(tl.where(each < group, padded, 0), 0)
    count = tl.sum(tl.where(each == group, counts, 0), 0)
    none, before = group == GROUPS, tl.zeros((), tl.int32)
    room = tl.where(none, 0, ALIGNED)
    for start in tl.range(0, rows, BLOCK):
        row = start + number
        mine = (_group_of(ids_ptr, row, rows, GROUPS) == group) & (row < rows)
        place = first + before + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(place_ptr + row, tl.where(none, ALIGNED, place), mask=mine)
        tl.store(source_ptr + place, row, mask=mine & (place < room))
        before += tl.sum(mine.to(tl.int32), 0)
    end = tl.where(none, ALIGNED, tl.minimum(first + (count + TILE - 1) // TILE * TILE, ALIGNED))
    for start in tl.range(first + count, end, BLOCK):
        tl.store(source_ptr + start + number, rows, mask=start + number < end)
    for start in tl.range(first // TILE, end // TILE, BLOCK):
        tl.store(tile_group_ptr + start + number, tl.where(none, -1, group), mask=start + number < end // TILE)
    if none:
        tl.store(counts_ptr + each, counts, mask=each < GROUPS)
        tl.store(needed_ptr, first)
        tl.store(overflow_ptr, (first > ALIGNED).to(tl.int32))


@triton.jit
def _group_of(ids_ptr, row, rows, GROUPS: tl.constexpr):
    """Returns the groups of some rows, GROUPS for those without one and behind the last."""
    ids = tl.load(ids_ptr + row, mask=row < rows, other=GROUPS)
    return tl.where((ids >= 0) & (ids < GROUPS), ids, GROUPS)
