"""Compressed entries of a cache in Triton (DeepSeek-V4): those that a step completes, and what it keeps for later ones.

A program has one token. Most complete no entry, and most of a long chunk are not among its last: their programs end at
once.
"""

import triton
import triton.language as tl

from pallas_kernels.triton.kernels.e4m3 import narrow

FLOAT, FP8_ENTRY, FP8_KEY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def complete(
    entries_ptr, own_ptr, parts_ptr, tails_ptr, position_ptr, norm_ptr, layer_ptr, requests_ptr, positions_ptr,
    firsts_ptr, contexts_ptr, slots_ptr, page_table_ptr, window_table_ptr, cos_ptr, sin_ptr,
    RATIO: tl.constexpr, OVERLAPS: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr, SLOTS: tl.constexpr,
    RING: tl.constexpr, WINDOW_PAGES: tl.constexpr, TAILS: tl.constexpr, TABLE: tl.constexpr, PAGES: tl.constexpr,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr, PAGE_TOKENS: tl.constexpr, ROTATED: tl.constexpr, EPS: tl.constexpr,
    FORM: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the entry that a token completes: its window's pooled rows, normed, rotated, in the FORM of the cache.

    A token's row has CHANNELS values and as many scores. Those of the step are in own [tokens, 2 * CHANNELS], whose
    scores lack what their place in the window adds; earlier ones are in the request's ring of RING rows, and the first
    series of those before its last page in the TAILS rows of their page, if the request has a window page there.
    """
    token = tl.program_id(0)
    position = tl.load(positions_ptr + token)
    if (position < 0) | ((position + 1) % RATIO != 0):
        return
    layer, request = tl.load(layer_ptr).to(tl.int64), tl.load(requests_ptr + token)
    entry, column = position // RATIO, tl.arange(0, D)
    page_at = request.to(tl.int64) * TABLE
    page = tl.load(page_table_ptr + page_at + tl.minimum(entry // ENTRIES, TABLE - 1))
    if page < 0:
        return
    context = tl.load(contexts_ptr + request)
    own_row = tl.load(firsts_ptr + request) - context
    ring = (layer * SLOTS + tl.load(slots_ptr + request)) * RING
    place_scores = position_ptr + layer * (RATIO * CHANNELS)

    top = tl.full([D], -1e30, tl.float32)
    total = tl.zeros([D], tl.float32)
    made = tl.zeros([D], tl.float32)
    rows: tl.constexpr = 2 * RATIO if OVERLAPS else RATIO
    for start in tl.range(0, rows, BLOCK):
        place = start + tl.arange(0, BLOCK)
        at = (entry + 1) * RATIO - rows + place
        exists, is_own = (at >= 0) & (place < rows), at >= context
        row = tl.where(is_own, own_ptr + (own_row + at).to(tl.int64) * (2 * CHANNELS), parts_ptr)
        row += tl.where(is_own, 0, (ring + at % RING) * (2 * CHANNELS))
        series = tl.zeros([BLOCK], tl.int64)
        scores_at = tl.full([BLOCK], CHANNELS, tl.int64)
        if OVERLAPS:
            series += tl.where(place >= RATIO, D, 0)
            before = exists & (at < context // PAGE_TOKENS * PAGE_TOKENS)
            tail = tl.load(window_table_ptr + page_at + at // PAGE_TOKENS, mask=before, other=-1)
            before = before & (tail >= 0)  # else the earlier micro-batch has filled the page, and the ring has it
            tail = (layer * WINDOW_PAGES + tail) * TAILS + at % TAILS
            row = tl.where(before, tails_ptr + tail * (2 * D), row)
            scores_at = tl.where(before, D, scores_at)
        cell = row[:, None] + series[:, None] + column[None, :]
        values = tl.load(cell, mask=exists[:, None], other=0.0)
        scores = tl.load(cell + scores_at[:, None], mask=exists[:, None], other=0.0)
        added = place_scores + (at % RATIO)[:, None] * CHANNELS + series[:, None] + column[None, :]
        scores += tl.load(added, mask=(exists & is_own)[:, None], other=0.0)
        scores = tl.where(exists[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        weights, shrink = tl.exp(scores - new_top[None, :]), tl.exp(top - new_top)
        total, made = total * shrink + tl.sum(weights, 0), made * shrink + tl.sum(weights * values, 0)
        top = new_top

    kind = norm_ptr.dtype.element_ty
    x = (made / total).to(kind).to(tl.float32)
    x = (x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / D + EPS))).to(kind).to(tl.float32)
    x = (x * tl.load(norm_ptr + layer * D + column).to(tl.float32)).to(kind).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (D // 2, 2)))
    pair = tl.arange(0, D // 2) - (D - ROTATED) // 2
    angle = token.to(tl.int64) * (ROTATED // 2) + pair
    cos = tl.load(cos_ptr + angle, mask=pair >= 0, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=pair >= 0, other=0.0)
    x = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (D,)).to(kind)

    page_row = entries_ptr + (layer * PAGES + page) * (ENTRIES * WIDTH)
    if FORM == FLOAT:
        tl.store(page_row + (entry % ENTRIES) * WIDTH + column, x.to(entries_ptr.dtype.element_ty))
    elif FORM == FP8_ENTRY:
        store_entry(page_row + (entry % ENTRIES) * WIDTH, x, D, D - ROTATED, FLOOR)
    else:
        store_key(page_row, entry % ENTRIES, x, D, ENTRIES)


@triton.jit
def encode(x_ptr, rows_ptr, D: tl.constexpr, PLAIN: tl.constexpr, WIDTH: tl.constexpr, FLOOR: tl.constexpr):
    """Writes a row of x [rows, D] as an FP8 row of WIDTH bytes, see `store_entry`."""
    row = tl.program_id(0).to(tl.int64)
    store_entry(rows_ptr + row * WIDTH, tl.load(x_ptr + row * D + tl.arange(0, D)), D, PLAIN, FLOOR)


@triton.jit
def store_entry(row, x, D: tl.constexpr, PLAIN: tl.constexpr, FLOOR: tl.constexpr):
    """Stores x [D] as an FP8 row (`pallas_kernels/entries.py`): PLAIN of e4m3, the rest bfloat16, then e8m0 scales."""
    grouped = tl.reshape(x.to(tl.float32), (D // 64, 64))
    code = power_at_least(tl.div_rn(tl.maximum(tl.max(tl.abs(grouped), 1), FLOOR), 448.0))
    scaled = clipped(grouped * (1.0 / (code << 23).to(tl.float32, bitcast=True))[:, None])
    group, column = tl.arange(0, D // 64), tl.arange(0, D)
    tl.store(row + column, tl.reshape(narrow(scaled), (D,)), mask=column < PLAIN)
    turned = (row + PLAIN).to(tl.pointer_type(tl.bfloat16), bitcast=True) + (column - PLAIN)
    tl.store(turned, x.to(tl.bfloat16), mask=column >= PLAIN)
    scales: tl.constexpr = 8 * ((PLAIN + 511) // 512)
    code = tl.where(group < PLAIN // 64, code, 0).to(tl.uint8)
    end = row + PLAIN + 2 * (D - PLAIN)
    tl.store(end + group, code, mask=group < scales)
    if scales > D // 64:
        padding = tl.arange(0, scales)
        tl.store(end + padding, tl.zeros([scales], tl.uint8), mask=padding >= D // 64)


@triton.jit
def store_key(page, row, x, D: tl.constexpr, TOKENS: tl.constexpr):
    """Stores x [D], times the Hadamard matrix, as row `row` of an FP8 page of index keys (`dsa/keys.py`)."""
    x = hadamard(x.to(tl.float32), D).to(x.dtype).to(tl.float32)
    code = tl.minimum(power_at_least(tl.maximum(tl.div_rn(tl.max(tl.abs(x), 0), 448.0), 1e-4 / 448.0)), 127 + 7)
    scale = (code << 23).to(tl.float32, bitcast=True)
    chunk: tl.constexpr = 32 if D % 32 == 0 else D
    column = tl.arange(0, D)
    tl.store(page + column // chunk * (TOKENS * chunk) + row * chunk + column % chunk, narrow(clipped(x / scale)))
    tl.store((page + TOKENS * D).to(tl.pointer_type(tl.float32), bitcast=True) + row, scale)


@triton.jit
def hadamard(x, D: tl.constexpr):
    """Returns x [D] times the orthonormal Hadamard matrix; D is a power of two up to 256."""
    i = tl.arange(0, D)
    bits = i[:, None] & i[None, :]
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    sign = tl.where(bits & 1 == 1, -1.0, 1.0)
    return tl.sum(x[:, None] * sign, 0) * (1.0 / tl.sqrt(tl.full((), D, tl.float32)))


@triton.jit
def power_at_least(x):
    """Returns the exponent, plus 127, of the power of two at or above positive normal float32 values."""
    return (x.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23


@triton.jit
def clipped(x):
    """Returns values bounded to what e4m3 has; NaN stays."""
    return tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))


@triton.jit
def rings_plain(
    window_ptr, new_ptr, cache_layer_ptr, requests_ptr, positions_ptr, ends_ptr, window_table_ptr,
    TABLE: tl.constexpr, PAGE_TOKENS: tl.constexpr, WINDOW_PAGES: tl.constexpr, RING: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a token's row of new [tokens, WIDTH] to the ring of RING rows of its window page, if it stays there."""
    token, position, request, end = _token(requests_ptr, positions_ptr, ends_ptr)
    if position < 0:
        return
    _keep_window_row(
        window_ptr, new_ptr, cache_layer_ptr, window_table_ptr, token, position, request, end, TABLE, PAGE_TOKENS,
        WINDOW_PAGES, RING, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def rings_heavy(
    window_ptr, parts_ptr, new_ptr, own_ptr, position_ptr, cache_layer_ptr, layer_ptr, requests_ptr, positions_ptr,
    ends_ptr, slots_ptr, window_table_ptr,
    TABLE: tl.constexpr, PAGE_TOKENS: tl.constexpr, WINDOW_PAGES: tl.constexpr, RING: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, RATIO: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Does what `rings_plain` does, and keeps what the token gives to the entry of its window in the request's ring."""
    token, position, request, end = _token(requests_ptr, positions_ptr, ends_ptr)
    if position < 0:
        return
    layer, slot = tl.load(layer_ptr).to(tl.int64), tl.load(slots_ptr + request)
    _keep_window_row(
        window_ptr, new_ptr, cache_layer_ptr, window_table_ptr, token, position, request, end, TABLE, PAGE_TOKENS,
        WINDOW_PAGES, RING, WIDTH, BLOCK,
    )  # fmt: skip
    _keep_part(parts_ptr, own_ptr, position_ptr, token, layer, SLOTS, slot, position, end, RATIO, PARTS, D)


@triton.jit
def rings_sparse(
    window_ptr, parts_ptr, tails_ptr, key_parts_ptr, key_tails_ptr, new_ptr, own_ptr, position_ptr, key_own_ptr,
    key_position_ptr, cache_layer_ptr, layer_ptr, requests_ptr, positions_ptr, ends_ptr, slots_ptr, window_table_ptr,
    TABLE: tl.constexpr, PAGE_TOKENS: tl.constexpr, WINDOW_PAGES: tl.constexpr, RING: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, RATIO: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, TAILS: tl.constexpr, KEY_D: tl.constexpr,
):  # fmt: skip
    """Does what `rings_heavy` does for two compressors of two series, the first of which the token's page keeps too."""
    token, position, request, end = _token(requests_ptr, positions_ptr, ends_ptr)
    if position < 0:
        return
    layer, slot = tl.load(layer_ptr).to(tl.int64), tl.load(slots_ptr + request)
    page = _keep_window_row(
        window_ptr, new_ptr, cache_layer_ptr, window_table_ptr, token, position, request, end, TABLE, PAGE_TOKENS,
        WINDOW_PAGES, RING, WIDTH, BLOCK,
    )  # fmt: skip
    _keep_part(parts_ptr, own_ptr, position_ptr, token, layer, SLOTS, slot, position, end, RATIO, PARTS, 2 * D)
    _keep_part(
        key_parts_ptr, key_own_ptr, key_position_ptr, token, layer, SLOTS, slot, position, end, RATIO, PARTS, 2 * KEY_D
    )
    if (page >= 0) & _is_last(position, end, PAGE_TOKENS, TAILS):
        row = (layer * WINDOW_PAGES + page) * TAILS + position % TAILS
        _keep_given(tails_ptr + row * (2 * D), own_ptr, position_ptr, token, layer, position, RATIO, 2 * D, D)
        _keep_given(
            key_tails_ptr + row * (2 * KEY_D), key_own_ptr, key_position_ptr, token, layer, position, RATIO,
            2 * KEY_D, KEY_D,
        )  # fmt: skip


@triton.jit
def _token(requests_ptr, positions_ptr, ends_ptr):
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(requests_ptr + token).to(tl.int64)
    return token, tl.load(positions_ptr + token), request, tl.load(ends_ptr + request)


@triton.jit
def _is_last(position, end, PAGE_TOKENS: tl.constexpr, RING: tl.constexpr):
    """Returns whether no later token of the step replaces the row of this one in its page's ring."""
    again = position + RING
    return (again // PAGE_TOKENS > position // PAGE_TOKENS) | (again >= end)


@triton.jit
def _keep_window_row(
    window_ptr, new_ptr, cache_layer_ptr, window_table_ptr, token, position, request, end,
    TABLE: tl.constexpr, PAGE_TOKENS: tl.constexpr, WINDOW_PAGES: tl.constexpr, RING: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a token's row to the ring of its window page, if it stays there, and returns the page."""
    page = tl.load(window_table_ptr + request * TABLE + tl.minimum(position // PAGE_TOKENS, TABLE - 1))
    new, page_in_pool = new_ptr + token * WIDTH, tl.load(cache_layer_ptr).to(tl.int64) * WINDOW_PAGES + page
    if (page >= 0) & _is_last(position, end, PAGE_TOKENS, RING):
        column = tl.arange(0, BLOCK)
        row = window_ptr + (page_in_pool * RING + position % PAGE_TOKENS % RING) * WIDTH
        tl.store(row + column, tl.load(new + column, mask=column < WIDTH), mask=column < WIDTH)
    return page


@triton.jit
def _keep_part(
    parts_ptr, own_ptr, position_ptr, token, layer, SLOTS: tl.constexpr, slot, position, end,
    RATIO: tl.constexpr, RING: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    if (slot >= 0) & (position + RING >= end):
        row = parts_ptr + ((layer * SLOTS + slot) * RING + position % RING) * (2 * CHANNELS)
        _keep_given(row, own_ptr, position_ptr, token, layer, position, RATIO, CHANNELS, CHANNELS)


@triton.jit
def _keep_given(
    target, own_ptr, position_ptr, token, layer, position,
    RATIO: tl.constexpr, CHANNELS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Writes the first KEPT values and scores of a token to target, with what its place adds to the scores."""
    column = tl.arange(0, KEPT)
    values = own_ptr + token * (2 * CHANNELS) + column
    added = tl.load(position_ptr + (layer * RATIO + position % RATIO) * CHANNELS + column)
    tl.store(target + column, tl.load(values))
    tl.store(target + KEPT + column, tl.load(values + CHANNELS) + added)
