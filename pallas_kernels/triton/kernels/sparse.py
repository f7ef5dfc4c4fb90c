"""Sparse attention in Triton: the choice of the best tokens of a row, and the copy of their rows side by side."""

import triton
import triton.language as tl


@triton.jit
def select(
    scores_ptr, visible_ptr, chosen_ptr,
    N: tl.constexpr, BEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the positions of the BEST highest of a row's first `visible` scores [rows, N] to chosen [rows, BEST].

    Positions rise, and the places of a short row end in N. Float32 scores are compared as unsigned integers of the
    same order. The BEST-th highest is found digit by digit, 8 bits at a time: a histogram of those that agree in the
    digits before says in which bin it lies. What is above it is chosen, and of what equals it the first.
    """
    row = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.load(visible_ptr + row), N)
    scores, chosen, place = scores_ptr + row * N, chosen_ptr + row * BEST, tl.arange(0, BLOCK)
    for first in tl.range(0, BEST, BLOCK):
        slot = first + place
        tl.store(chosen + slot, tl.full([BLOCK], N, tl.int32), mask=(slot >= seen) & (slot < BEST))

    searched = tl.where(seen > BEST, seen, 0)  # a short row is taken whole: its bound stays 0
    bound, fixed = tl.full((), 0, tl.uint32), tl.full((), 0, tl.uint32)
    missing = tl.full((), BEST, tl.int32)
    bins = tl.arange(0, 256)
    for digit in range(4):
        shift = 24 - 8 * digit
        counts = tl.zeros([256], tl.int32)
        for start in tl.range(0, searched, BLOCK):
            keys, here = _keys(scores, start + place, seen)
            agrees = here & (((keys ^ bound) & fixed) == 0)
            counts += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=agrees)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # scores in higher bins
        found = tl.minimum(tl.sum((above >= missing).to(tl.int32), 0), 255)
        missing -= tl.sum(tl.where(bins == found, above, 0), 0)
        bound |= found.to(tl.uint32) << shift
        fixed |= tl.full((), 255, tl.uint32) << shift

    taken, equal = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in tl.range(0, seen, BLOCK):
        keys, here = _keys(scores, start + place, seen)
        same = here & (keys == bound)
        number = equal + tl.cumsum(same.to(tl.int32), 0)
        take = here & ((keys > bound) | (same & (number <= missing)))
        slot = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(chosen + slot, start + place, mask=take)
        taken += tl.sum(take.to(tl.int32), 0)
        equal += tl.sum(same.to(tl.int32), 0)


@triton.jit
def _keys(scores, places, seen):
    """Returns scores as uint32 of the same order, zeros of both signs as one, and which of them count."""
    here = places < seen
    score = tl.load(scores + places, mask=here, other=0.0)
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True), here


@triton.jit
def copy_rows(
    pages_ptr, table_ptr, position_ptr, count_ptr, first_page_ptr, out_ptr,
    TABLE_WIDTH: tl.constexpr, CHOSEN: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, STRIDE: tl.constexpr, NEXT: tl.constexpr,
    TILES: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Copies the rows at the first `count` positions [queries, CHOSEN] of each query to pages, PAGE of them a program.

    A page has PAGE * WIDTH elements. CHUNKS parts of CHUNK columns begin NEXT elements apart, and STRIDE from row to
    row. FP8 pages (TILES above 0) have four bytes per row and tile behind them, and then ROPE bytes per row.
    """
    query, page = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.arange(0, PAGE)
    place = page * PAGE + rows
    here = place < tl.load(count_ptr + query)
    position = tl.load(position_ptr + query * CHOSEN + place, mask=here, other=0)
    column = tl.minimum(position // PAGE, TABLE_WIDTH - 1)
    ids = tl.load(first_page_ptr) + tl.load(table_ptr + query * TABLE_WIDTH + column, mask=here, other=0)
    source = pages_ptr + ids.to(tl.int64) * (PAGE * WIDTH)
    target = out_ptr + (query * (CHOSEN // PAGE) + page) * (PAGE * WIDTH)
    offset = position % PAGE
    for chunk in tl.static_range(CHUNKS):
        _copy(source + chunk * NEXT, target + chunk * NEXT, offset, rows, here, STRIDE, CHUNK)
    if TILES > 0:
        scales: tl.constexpr = CHUNKS * NEXT
        for tile in tl.static_range(TILES):
            first = scales + tile * PAGE * 4
            _copy(source + first, target + first, offset, rows, here, 4, 4)
        rope: tl.constexpr = scales + TILES * PAGE * 4
        _copy(source + rope, target + rope, offset, rows, here, ROPE, ROPE)


@triton.jit
def _copy(source, target, offset, rows, here, STRIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Copies COLUMNS elements of each row that is `here`, from row `offset` of its page."""
    column = tl.arange(0, COLUMNS)[None, :]
    values = tl.load(source[:, None] + offset[:, None] * STRIDE + column, mask=here[:, None])
    tl.store(target + rows[:, None] * STRIDE + column, values, mask=here[:, None])
