"""Compressed attention in Triton: each query to rows of two arrays, by their numbers, in one softmax with a sink.

Scores are in log base 2. A query's list is cut into shares of a fixed number of slots, so that the bits of its result
do not depend on the other queries.
"""

import triton
import triton.language as tl

from pallas_kernels.triton.kernels.e4m3 import widen


@triton.jit
def attend(
    q_ptr, sink_ptr, sink_layer_ptr, own_ptr, window_ptr, window_numbers_ptr, window_counts_ptr, window_layer_ptr,
    entries_ptr, entry_numbers_ptr, entry_counts_ptr, entry_layer_ptr, out_ptr, lse_ptr,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PLAIN: tl.constexpr,
    WINDOW: tl.constexpr, ENTRIES: tl.constexpr, WINDOW_ROWS: tl.constexpr, ENTRY_ROWS: tl.constexpr,
    SHARE: tl.constexpr, SHARES: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attends q [queries, HEADS, D] to a share of their rows: out [queries, SHARES, HEADS, D], lse likewise.

    Without rows lse is -1e30. Slots of a list are WINDOW numbers of the window, rounded up to whole blocks, then
    ENTRIES of the entries. A share without slots writes nothing. The first share has the sink. With one share, out is
    the result. Rows are loaded and multiplied in two halves, for which a thread needs fewer registers at a time.
    """
    query, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads, columns = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, D // 2)
    in_heads = heads < HEADS
    first_entry: tl.constexpr = (WINDOW + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    window_count, entry_count = tl.load(window_counts_ptr + query), tl.load(entry_counts_ptr + query)
    slots = slot_count(window_count, entry_count, first_entry)
    if (share > 0) & (share * SHARE >= slots):
        return
    q_rows = q_ptr + (query * HEADS + heads)[:, None] * D + columns[None, :]
    q = tl.load(q_rows, mask=in_heads[:, None], other=0.0)
    q_right = tl.load(q_rows + D // 2, mask=in_heads[:, None], other=0.0)
    sink = tl.load(sink_ptr + tl.load(sink_layer_ptr) * HEADS + heads, mask=in_heads, other=0.0) * 1.4426950408889634
    sink = tl.where(share == 0, sink, float("-inf"))
    top = tl.maximum(sink, -1e30)
    total = tl.exp2(sink - top)
    out = tl.zeros([BLOCK_H, D // 2], tl.float32)
    out_right = tl.zeros([BLOCK_H, D // 2], tl.float32)
    first_in_window, first_in_entries = tl.load(window_layer_ptr) * WINDOW_ROWS, tl.load(entry_layer_ptr) * ENTRY_ROWS
    for start in tl.range(share * SHARE, tl.minimum((share + 1) * SHARE, slots), BLOCK_N):
        in_window = start < first_entry
        count = tl.where(in_window, window_count, entry_count)
        place = tl.where(in_window, start, start - first_entry) + tl.arange(0, BLOCK_N)
        window_numbers, entry_numbers = window_numbers_ptr + query * WINDOW, entry_numbers_ptr + query * ENTRIES
        real = place < count
        number = tl.load(tl.where(in_window, window_numbers, entry_numbers) + place, mask=real, other=0)
        first = tl.where(in_window, first_in_window, first_in_entries)
        is_own, number = number < 0, tl.where(number < 0, -1 - number, first + number).to(tl.int64)
        rows = tl.where(is_own, own_ptr, tl.where(in_window, window_ptr, entries_ptr)) + number * WIDTH
        rows = tl.multiple_of(rows, 8 if FP8 else 16)
        if FP8:
            left = _fp8_half(rows, real, q.dtype, 0, D, PLAIN, NATIVE)
            right = _fp8_half(rows, real, q.dtype, D // 2, D, PLAIN, NATIVE)
        else:
            left = tl.load(rows[:, None] + columns[None, :], mask=real[:, None], other=0.0)
            right = tl.load(rows[:, None] + D // 2 + columns[None, :], mask=real[:, None], other=0.0)
        scores = tl.dot(q_right, tl.trans(right), tl.dot(q, tl.trans(left))) * SCALE
        scores = tl.where(real[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
        added, weights = tl.sum(weights, 1), weights.to(left.dtype)
        out = tl.dot(weights, left, out * shrink[:, None])
        out_right = tl.dot(weights, right, out_right * shrink[:, None])
        top, total = new_top, total * shrink + added

    seen = total > 0
    total = tl.where(seen, total, 1.0)
    place = (query * SHARES + share) * HEADS + heads
    out_rows = out_ptr + place[:, None] * D + columns[None, :]
    tl.store(out_rows, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=in_heads[:, None])
    tl.store(out_rows + D // 2, (out_right / total[:, None]).to(out_ptr.dtype.element_ty), mask=in_heads[:, None])
    tl.store(lse_ptr + place, tl.where(seen, top + tl.log2(total), -1e30), mask=in_heads)


@triton.jit
def slot_count(window_count, entry_count, FIRST_ENTRY: tl.constexpr):
    """Returns how many slots of its list a query needs."""
    return tl.where(entry_count > 0, FIRST_ENTRY + entry_count, window_count)


@triton.jit
def _fp8_half(
    rows, real, dtype: tl.constexpr, FIRST: tl.constexpr, D: tl.constexpr, PLAIN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Returns D // 2 columns of FP8 rows [rows, D] from FIRST on (`pallas_kernels/entries.py`).

    A row has PLAIN values of e4m3, the rest in bfloat16, then e8m0 scales. NATIVE: the GPU converts e4m3.
    """
    WIDTH: tl.constexpr = min(D // 2, 64)
    place = FIRST + tl.arange(0, D // 2 // WIDTH)[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    at, mask = rows[:, None, None], real[:, None, None]
    group = FIRST // 64 + tl.arange(0, D // 2 // WIDTH)[None, :, None]
    is_plain = group < PLAIN // 64
    raw = tl.load(at + place, mask=mask & is_plain, other=0)
    exponent = tl.load(at + (PLAIN + 2 * (D - PLAIN)) + group, mask=mask & is_plain, other=0)
    scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    turned = at.to(tl.pointer_type(tl.bfloat16), bitcast=True) + (place - PLAIN // 2)
    rotated = tl.load(turned, mask=mask & (place >= PLAIN), other=0.0)
    plain = raw.to(tl.float8e4nv, bitcast=True) if NATIVE else widen(raw)
    values = tl.where(is_plain, (plain.to(tl.float32) * scale).to(dtype), rotated.to(dtype))
    return tl.reshape(values, (rows.shape[0], D // 2))


@triton.jit
def join(
    parts_ptr, lse_ptr, window_counts_ptr, entry_counts_ptr, out_ptr, joined_lse_ptr,
    HEADS: tl.constexpr, D: tl.constexpr, FIRST_ENTRY: tl.constexpr, SHARE: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Combines the shares of a query's head, parts [queries, SHARES, HEADS, D]: out [queries, HEADS, D], and lse."""
    query, head, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, D)
    window_count, entry_count = tl.load(window_counts_ptr + query), tl.load(entry_counts_ptr + query)
    shares = (slot_count(window_count, entry_count, FIRST_ENTRY) + SHARE - 1) // SHARE
    first = query * (SHARES * HEADS) + head
    top = tl.load(lse_ptr + first)
    total = tl.full((), 1.0, tl.float32)
    out = tl.load(parts_ptr + first * D + columns)
    for share in tl.range(1, shares):
        place = first + share * HEADS
        lse, part = tl.load(lse_ptr + place), tl.load(parts_ptr + place * D + columns)
        new_top = tl.maximum(top, lse)
        shrink, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
        out, total, top = out * shrink + part * weight, total * shrink + weight, new_top
    tl.store(out_ptr + (query * HEADS + head) * D + columns, (out / total).to(out_ptr.dtype.element_ty))
    tl.store(joined_lse_ptr + query * HEADS + head, top + tl.log2(total))
