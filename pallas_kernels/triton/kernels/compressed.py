"""Compressed attention in Triton: each query to rows of two arrays, by their numbers, in one softmax with a sink.

Scores are in log base 2. A query's list is cut into shares of a fixed number of slots, so that the bits of its result
do not depend on the other queries.
"""

import triton
import triton.language as tl

from pallas_kernels.triton.kernels.attention import add_block
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
    the result.
    """
    query, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads, columns = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, D)
    in_heads = heads < HEADS
    first_entry: tl.constexpr = (WINDOW + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    window_count, entry_count = tl.load(window_counts_ptr + query), tl.load(entry_counts_ptr + query)
    slots = slot_count(window_count, entry_count, first_entry)
    if (share > 0) & (share * SHARE >= slots):
        return
    q_rows = q_ptr + (query * HEADS + heads)[:, None] * D
    q = tl.load(q_rows + columns[None, :], mask=in_heads[:, None], other=0.0)
    sink = tl.load(sink_ptr + tl.load(sink_layer_ptr) * HEADS + heads, mask=in_heads, other=0.0) * 1.4426950408889634
    sink = tl.where(share == 0, sink, float("-inf"))
    top = tl.maximum(sink, -1e30)
    total = tl.exp2(sink - top)
    out = tl.zeros([BLOCK_H, D], tl.float32)
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
            values = _fp8_rows(rows, real, q.dtype, D, PLAIN, NATIVE)
        else:
            values = tl.load(rows[:, None] + columns[None, :], mask=real[:, None], other=0.0)
        scores = tl.where(real[None, :], tl.dot(q, tl.trans(values)) * SCALE, float("-inf"))
        top, total, out = add_block(scores, values, top, total, out)

    seen = total > 0
    total = tl.where(seen, total, 1.0)
    place = (query * SHARES + share) * HEADS + heads
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place[:, None] * D + columns[None, :], out, mask=in_heads[:, None])
    tl.store(lse_ptr + place, tl.where(seen, top + tl.log2(total), -1e30), mask=in_heads)


@triton.jit
def slot_count(window_count, entry_count, FIRST_ENTRY: tl.constexpr):
    """Returns how many slots of its list a query needs."""
    return tl.where(entry_count > 0, FIRST_ENTRY + entry_count, window_count)


@triton.jit
def _fp8_rows(rows, real, dtype: tl.constexpr, D: tl.constexpr, PLAIN: tl.constexpr, NATIVE: tl.constexpr):
    """Returns FP8 rows [rows, D] (`pallas_kernels/entries.py`): PLAIN of e4m3, the rest bfloat16, then e8m0 scales.

    NATIVE: the GPU converts e4m3.
    """
    group, column = tl.arange(0, D // 64)[None, :, None], tl.arange(0, 64)[None, None, :]
    at, mask = rows[:, None, None], real[:, None, None]
    is_plain, place = group < PLAIN // 64, group * 64 + column
    raw = tl.load(at + place, mask=mask & is_plain, other=0)
    exponent = tl.load(at + (PLAIN + 2 * (D - PLAIN)) + group, mask=mask & is_plain, other=0)
    scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    turned = at.to(tl.pointer_type(tl.bfloat16), bitcast=True) + (place - PLAIN // 2)
    rotated = tl.load(turned, mask=mask & (place >= PLAIN), other=0.0)
    plain = raw.to(tl.float8e4nv, bitcast=True) if NATIVE else widen(raw)
    values = tl.where(is_plain, plain.to(tl.float32) * scale, rotated.to(tl.float32))
    return tl.reshape(values.to(dtype), (rows.shape[0], D))


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
