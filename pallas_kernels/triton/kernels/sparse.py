"""Sparse attention in Triton: index scores, the top-k tokens of a row, and copies of their cached rows."""

import triton
import triton.language as tl

from pallas_kernels.triton.kernels.e4m3 import widen


@triton.jit
def select(
    scores_ptr, visible_ptr, indices_ptr,
    N: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the positions of the TOPK highest of a row's first `visible` scores [rows, N] to indices [rows, TOPK].

    Positions are in rising order, padded with N. Float32 scores are compared as unsigned integers of the same order.
    The TOPK-th highest is found by radix selection, 8 bits at a time: a histogram of the scores with the same higher
    digits gives its bin. Selected are all scores above it, and the first of those equal to it.
    """
    row = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.load(visible_ptr + row), N)
    scores, indices, place = scores_ptr + row * N, indices_ptr + row * TOPK, tl.arange(0, BLOCK)
    for first in tl.range(0, TOPK, BLOCK):
        slot = first + place
        tl.store(indices + slot, tl.full([BLOCK], N, tl.int32), mask=(slot >= seen) & (slot < TOPK))

    searched = tl.where(seen > TOPK, seen, 0)  # a short row is selected whole: its bound stays 0
    bound, fixed = tl.full((), 0, tl.uint32), tl.full((), 0, tl.uint32)
    missing = tl.full((), TOPK, tl.int32)
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
        tl.store(indices + slot, start + place, mask=take)
        taken += tl.sum(take.to(tl.int32), 0)
        equal += tl.sum(same.to(tl.int32), 0)


@triton.jit
def _keys(scores, places, seen):
    """Returns scores as uint32 of the same order, with one zero, and which of them are visible."""
    here = places < seen
    score = tl.load(scores + places, mask=here, other=0.0)
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True), here


@triton.jit
def copy_rows(
    pages_ptr, table_ptr, position_ptr, count_ptr, first_page_ptr, out_ptr,
    TABLE_WIDTH: tl.constexpr, TOPK: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, STRIDE: tl.constexpr, NEXT: tl.constexpr,
    TILES: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Copies the rows at the first `count` positions [queries, TOPK] of each query to pages, PAGE of them a program.

    A page has PAGE * WIDTH elements. CHUNKS parts of CHUNK columns begin NEXT elements apart, with STRIDE between rows.
    In FP8 pages (TILES above 0) four bytes per row and tile follow, then ROPE bytes per row.
    """
    query, page = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.arange(0, PAGE)
    place = page * PAGE + rows
    here = place < tl.load(count_ptr + query)
    position = tl.load(position_ptr + query * TOPK + place, mask=here, other=0)
    column = tl.minimum(position // PAGE, TABLE_WIDTH - 1)
    ids = tl.load(first_page_ptr) + tl.load(table_ptr + query * TABLE_WIDTH + column, mask=here, other=0)
    source = pages_ptr + ids.to(tl.int64) * (PAGE * WIDTH)
    target = out_ptr + (query * (TOPK // PAGE) + page) * (PAGE * WIDTH)
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


@triton.jit
def scores(
    q_ptr, weights_ptr, keys_ptr, table_ptr, visible_ptr, first_page_ptr, out_ptr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr, PAGE_ITEMS: tl.constexpr,
    TABLE_WIDTH: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr, BLOCK_H: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Scores PAGES pages of a query's tokens: the sum over heads of weights [queries, HEADS] * relu(q . k).

    q [queries, HEADS * WIDTH] and the keys of a page are cut into chunks of CHUNK columns: chunk by chunk for all
    heads, or all tokens. A page has PAGE_ITEMS elements. FP8 pages are bytes, with a float32 scale per token after the
    keys; NATIVE: tensor cores multiply e4m3. Scores past a query's visible tokens are undefined.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads, columns, tokens = tl.arange(0, BLOCK_H), tl.arange(0, WIDTH), tl.arange(0, PAGE)
    real = heads < HEADS
    chunk, column = columns // CHUNK, columns % CHUNK
    q_places = (chunk * HEADS)[:, None] * CHUNK + heads[None, :] * CHUNK + column[:, None]
    q = tl.load(q_ptr + row * (HEADS * WIDTH) + q_places, mask=real[None, :], other=0)
    factors = tl.load(weights_ptr + row * HEADS + heads, mask=real, other=0.0)
    if FP8:
        q = _e4m3(q, NATIVE)
    places = (chunk * PAGE)[None, :] * CHUNK + tokens[:, None] * CHUNK + column[None, :]
    table, first_page = table_ptr + row * TABLE_WIDTH, tl.load(first_page_ptr)
    pages = (tl.load(visible_ptr + row) + PAGE - 1) // PAGE
    for index in tl.range(part * PAGES, tl.minimum((part + 1) * PAGES, pages)):
        page_ptr = keys_ptr + (first_page + tl.load(table + index)).to(tl.int64) * PAGE_ITEMS
        keys = tl.load(page_ptr + places)
        if FP8:
            keys = _e4m3(keys, NATIVE)
        products = tl.dot(keys, q)
        sums = tl.sum(tl.maximum(products, 0.0) * factors[None, :], 1)
        if FP8:
            scales = (page_ptr + PAGE * WIDTH).to(tl.pointer_type(tl.float32), bitcast=True)
            sums *= tl.load(scales + tokens)
        tl.store(out_ptr + (row * TABLE_WIDTH + index) * PAGE + tokens, sums)


@triton.jit
def _e4m3(raw, NATIVE: tl.constexpr):
    """Returns the values of e4m3 bytes in the type in which a tensor core multiplies them."""
    return raw.to(tl.float8e4nv, bitcast=True) if NATIVE else widen(raw)
