"""The order of rows by group, and queues of rows for peers, in Triton: few rows are counted in one kernel."""

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


@triton.jit
def queue(
    ids_ptr, rows, line_ptr, row_ptr, lost_ptr,
    IDS: tl.constexpr, PEERS: tl.constexpr, EACH: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes the parts of `RowQueues` of one peer from ids [rows, IDS]; the last program has the ids without a peer."""
    peer, number, k = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    before = tl.zeros((), tl.int32)
    room = tl.where(peer == PEERS, 0, CAPACITY)
    for start in tl.range(0, rows, BLOCK):
        row = start + number
        here = (row < rows)[:, None] & (k < IDS)[None, :]
        place = row[:, None] * IDS + k[None, :]
        ids = tl.load(ids_ptr + place, mask=here, other=-1)
        mine = (tl.where(ids >= 0, ids // EACH, PEERS) == peer) & here
        first = mine & (tl.cumsum(mine.to(tl.int32), 1) == 1)
        needs = tl.sum(first.to(tl.int32), 1)
        position = before + tl.cumsum(needs, 0) - 1
        line = tl.where(first & (position < room)[:, None], peer * CAPACITY + position[:, None], PEERS * CAPACITY)
        tl.store(line_ptr + place, line, mask=mine)
        tl.store(row_ptr + peer * CAPACITY + position, row, mask=(needs > 0) & (position < room))
        before += tl.sum(needs, 0)
    for start in tl.range(tl.minimum(before, room), room, BLOCK):
        tl.store(row_ptr + peer * CAPACITY + start + number, rows, mask=start + number < room)
    if peer < PEERS:
        tl.store(lost_ptr + peer, tl.maximum(before - CAPACITY, 0))
