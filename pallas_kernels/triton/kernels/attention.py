"""Attention in Triton: absorbed over pages (decode, context), and materialized over a flat batch (prefill).

Scores are in log base 2. The running maximum starts at a finite number below every score, so a row without keys has sum
0, and infinities are never subtracted.
"""

import triton
import triton.language as tl

from pallas_kernels.triton.kernels.e4m3 import widen


@triton.jit
def paged(
    q_ptr, pages_ptr, table_ptr, table_row_ptr, length_ptr, first_page_ptr, out_ptr, lse_ptr,
    SCALE: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, PAGE: tl.constexpr, TABLE_WIDTH: tl.constexpr, SPLITS: tl.constexpr, FP8: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attends the rows of a group to its share of the pages: q [groups, ROWS, R + P] -> [groups, SPLITS, ROWS, R]."""
    group, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    length = tl.load(length_ptr + group)
    table = table_ptr + tl.load(table_row_ptr + group).to(tl.int64) * TABLE_WIDTH
    first_page = tl.load(first_page_ptr)
    visible = length - (QUERIES - 1 - rows // HEADS)
    in_rows = rows < ROWS
    columns, rope_columns = tl.arange(0, R), tl.arange(0, P)
    q_rows = q_ptr + (group * ROWS + rows)[:, None] * (R + P)
    q = tl.load(q_rows + columns[None, :], mask=in_rows[:, None], other=0.0)
    q_rope = tl.load(q_rows + R + rope_columns[None, :], mask=in_rows[:, None], other=0.0)

    share = ((length + PAGE - 1) // PAGE + SPLITS - 1) // SPLITS * PAGE
    top = tl.full([BLOCK_H], -1e30, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    out = tl.zeros([BLOCK_H, R], tl.float32)
    for start in tl.range(split * share, tl.minimum((split + 1) * share, length), BLOCK_N):
        page = (first_page + tl.load(table + start // PAGE)).to(tl.int64)
        tokens = start + tl.arange(0, BLOCK_N)
        written = tokens < length  # the rest of the page may hold NaN
        if FP8:
            page_ptr = pages_ptr + page * (PAGE * (R + R // 32 + 2 * P))
            latent = _fp8_latents(page_ptr, tokens % PAGE, written, q.dtype, R, PAGE)
            rope = _fp8_rope(page_ptr + PAGE * (R + R // 32), tokens % PAGE, written, q.dtype, P)
        else:
            row = pages_ptr + (page * PAGE + tokens % PAGE)[:, None] * (R + P)
            latent = tl.load(row + columns[None, :], mask=written[:, None], other=0.0)
            rope = tl.load(row + R + rope_columns[None, :], mask=written[:, None], other=0.0)
        scores = tl.dot(q_rope, tl.trans(rope), tl.dot(q, tl.trans(latent)))
        scores = tl.where(tokens[None, :] < visible[:, None], scores * SCALE, float("-inf"))
        top, total, out = add_block(scores, latent, top, total, out)

    seen = total > 0
    total = tl.where(seen, total, 1.0)
    place = (group * SPLITS + split) * ROWS + rows
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place[:, None] * R + columns[None, :], out, mask=in_rows[:, None])
    lse = tl.where(seen, (top + tl.log2(total)) * 0.6931471805599453, float("inf"))
    tl.store(lse_ptr + place, lse, mask=in_rows)


@triton.jit
def add_block(scores, values, top, total, out):
    """Returns the running maximum, sum and output of a softmax with one more block of scores and values."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights, shrink = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
    out = tl.dot(weights.to(values.dtype), values, out * shrink[:, None])
    return new_top, total * shrink + tl.sum(weights, 1), out


@triton.jit
def _fp8_latents(page_ptr, tokens, written, dtype: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr):
    """Returns rows [tokens, R] of an FP8 page (`mla/layout.py`): tiles of 128 values, then a scale for each row."""
    tile, column = tl.arange(0, R // 128)[None, :, None], tl.arange(0, 128)[None, None, :]
    row, mask = tile * PAGE + tokens[:, None, None], written[:, None, None]
    raw = tl.load(page_ptr + row * 128 + column, mask=mask, other=0)
    scales = (page_ptr + PAGE * R).to(tl.pointer_type(tl.float32), bitcast=True)
    latents = widen(raw).to(tl.float32) * tl.load(scales + row, mask=mask, other=0.0)
    return tl.reshape(latents.to(dtype), (tokens.shape[0], R))


@triton.jit
def _fp8_rope(rope_ptr, tokens, written, dtype: tl.constexpr, P: tl.constexpr):
    """Returns the rotated keys [tokens, P] of an FP8 page, which are bfloat16, after the scales."""
    rope_ptr = rope_ptr.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    places = tokens[:, None] * P + tl.arange(0, P)[None, :]
    return tl.load(rope_ptr + places, mask=written[:, None], other=0.0).to(dtype)


@triton.jit
def spans(
    q_ptr, k_ptr, v_ptr, start_ptr, end_ptr, live_ptr, tokens, out_ptr, lse_ptr,
    SCALE: tl.constexpr, HEADS: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attends tokens q [tokens, HEADS, K1 + K2] to spans of keys k [keys, HEADS, K1 + K2], v [keys, HEADS, V].

    A token's keys lie from `start` on and before `end` [tokens], which are a huge number and 0 for one without keys.
    The first `live` [1] keys are finite, and no span ends after them. Key widths are split into powers of two, K1 and
    K2 (192 = 128 + 64).
    """
    tile, head = (
        tl.num_programs(0) - 1 - tl.program_id(0),
        tl.program_id(1),
    )  # late tiles, which see most keys, start first
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.load(start_ptr + row, mask=row < tokens, other=1 << 30)
    end = tl.load(end_ptr + row, mask=row < tokens, other=0)
    live = tl.load(live_ptr)
    in_rows = row < tokens
    row64 = row.to(tl.int64) * HEADS + head
    q_rows = q_ptr + row64[:, None] * (K1 + K2)
    q = tl.load(q_rows + tl.arange(0, K1)[None, :], mask=in_rows[:, None], other=0.0)
    if K2 > 0:
        q2 = tl.load(q_rows + K1 + tl.arange(0, K2)[None, :], mask=in_rows[:, None], other=0.0)
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, V], tl.float32)
    first = tl.min(start, 0) // BLOCK_N * BLOCK_N
    for base in tl.range(first, tl.max(end, 0), BLOCK_N):
        key = base + tl.arange(0, BLOCK_N)
        real = (key < live)[:, None]  # padding may hold NaN
        key64 = key.to(tl.int64) * HEADS + head
        k_rows = k_ptr + key64[:, None] * (K1 + K2)
        k = tl.load(k_rows + tl.arange(0, K1)[None, :], mask=real, other=0.0)
        scores = tl.dot(q, tl.trans(k))
        if K2 > 0:
            k2 = tl.load(k_rows + K1 + tl.arange(0, K2)[None, :], mask=real, other=0.0)
            scores = tl.dot(q2, tl.trans(k2), scores)
        seen = (key[None, :] < end[:, None]) & (key[None, :] >= start[:, None])
        scores = tl.where(seen, scores * SCALE, float("-inf"))
        v = tl.load(v_ptr + key64[:, None] * V + tl.arange(0, V)[None, :], mask=real, other=0.0)
        top, total, out = add_block(scores, v, top, total, out)
    any_seen = total > 0
    total = tl.where(any_seen, total, 1.0)
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row64[:, None] * V + tl.arange(0, V)[None, :], out, mask=in_rows[:, None])
    lse = tl.where(any_seen, (top + tl.log2(total)) * 0.6931471805599453, float("inf"))
    tl.store(lse_ptr + row64, lse, mask=in_rows)


@triton.jit
def masked(
    q_ptr, k_ptr, v_ptr, bits_ptr, start_ptr, end_ptr, tokens, out_ptr,
    SCALE: tl.constexpr, HEADS: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attends tokens q [tokens, HEADS, K1 + K2] to top-k keys of k [keys, HEADS, K1 + K2], values v [keys, HEADS, V].

    Bit b of word w of bits [keys / 32, tokens] selects key 32 w + b. A token's keys lie from `start` on and before
    `end` [tokens], which is 0 for one without keys. All values are finite, and `keys` is a multiple of BLOCK_N.
    """
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = row < tokens
    stop = tl.load(end_ptr + row, mask=in_rows, other=0)
    start = tl.load(start_ptr + row, mask=stop > 0, other=1 << 30)
    row64 = row.to(tl.int64) * HEADS + head
    q_rows = q_ptr + row64[:, None] * (K1 + K2)
    q = tl.load(q_rows + tl.arange(0, K1)[None, :], mask=in_rows[:, None], other=0.0)
    if K2 > 0:
        q2 = tl.load(q_rows + K1 + tl.arange(0, K2)[None, :], mask=in_rows[:, None], other=0.0)
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, V], tl.float32)
    for base in tl.range(tl.min(start, 0) // BLOCK_N * BLOCK_N, tl.max(stop, 0), BLOCK_N):
        key = base + tl.arange(0, BLOCK_N)
        key64 = key.to(tl.int64) * HEADS + head
        k_rows = k_ptr + key64[:, None] * (K1 + K2)
        scores = tl.dot(q, tl.trans(tl.load(k_rows + tl.arange(0, K1)[None, :])))
        if K2 > 0:
            scores = tl.dot(q2, tl.trans(tl.load(k_rows + K1 + tl.arange(0, K2)[None, :])), scores)
        words = bits_ptr + (key // 32).to(tl.int64)[None, :] * tokens + row[:, None]
        named = (tl.load(words, mask=in_rows[:, None], other=0) >> (key % 32)[None, :]) & 1
        scores = tl.where(named != 0, scores * SCALE, float("-inf"))
        v = tl.load(v_ptr + key64[:, None] * V + tl.arange(0, V)[None, :])
        top, total, out = add_block(scores, v, top, total, out)
    total = tl.where(total > 0, total, 1.0)
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row64[:, None] * V + tl.arange(0, V)[None, :], out, mask=in_rows[:, None])


@triton.jit
def write(
    pages_ptr, rows_ptr, target_ptr, offset_ptr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, DROPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores row t of rows [T, WIDTH] to `pages[target[t], offset[t]]`, unless the target is DROPPED."""
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + token).to(tl.int64)
    if target == DROPPED:
        return
    column = tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + token * WIDTH + column, mask=column < WIDTH)
    place = target * PAGE + tl.load(offset_ptr + token)
    tl.store(pages_ptr + place * WIDTH + column, row, mask=column < WIDTH)
