"""Hyper-connections in Triton: what a block reads of several residual streams, and the streams after it."""

import triton
import triton.language as tl

from pallas_kernels.triton.kernels.heads import normed
from pallas_kernels.triton.kernels.quantize import store_quantized


@triton.jit
def product(
    streams_ptr, weight_ptr, layer_ptr, rows, sums_ptr,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, PART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes sums [parts, rows, BLOCK_N], each over PART columns of rows [rows, WIDTH].

    The first OUTPUTS are products with layer `layer` of weight [layers, OUTPUTS, WIDTH], the next is that of squares.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    part, column = tl.program_id(1), tl.arange(0, BLOCK_N)
    x_rows = streams_ptr + row.to(tl.int64)[:, None] * WIDTH
    w_rows = weight_ptr + (tl.load(layer_ptr).to(tl.int64) * OUTPUTS + column)[None, :] * WIDTH
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for step in tl.range(0, PART, BLOCK_K):
        at = part * PART + step + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + at[None, :], mask=(row < rows)[:, None] & (at < WIDTH)[None, :], other=0.0)
        w = tl.load(w_rows + at[:, None], mask=(at < WIDTH)[:, None] & (column < OUTPUTS)[None, :], other=0.0)
        x = x.to(tl.float32)
        sums = tl.dot(x, w, sums, input_precision="ieee")
        squares += tl.sum(x * x, 1)
    sums = tl.where(column[None, :] == OUTPUTS, squares[:, None], sums)
    place = (part * rows + row).to(tl.int64)[:, None] * BLOCK_N + column[None, :]
    tl.store(sums_ptr + place, sums, mask=(row < rows)[:, None])


@triton.jit
def read(
    streams_ptr, sums_ptr, base_ptr, scale_ptr, norm_ptr, layer_ptr, rows, normed_ptr, post_ptr, between_ptr,
    values_ptr, value_scale_ptr,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, ITERATIONS: tl.constexpr, EPS: tl.constexpr, NORM_EPS: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, QUANTIZED: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    FLOOR: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds streams [rows, STREAMS, WIDTH] up and norms the sum by layer `layer` of its norm: normed [rows, WIDTH].

    A program does a row. The weights come from sums [PARTS, rows, COLUMNS] of `product`, and `base` and `scale` of the
    layer. It also makes post [rows, STREAMS] and between [rows, STREAMS, STREAMS], in registers. QUANTIZED: also e4m3
    values of what is normed, and scales [WIDTH / 128, rows].
    """
    row, outputs = tl.program_id(0).to(tl.int64), STREAMS * (STREAMS + 2)
    layer = tl.load(layer_ptr).to(tl.int64)
    base, scale = base_ptr + layer * outputs, scale_ptr + layer * 3
    part = sums_ptr + (tl.arange(0, PARTS).to(tl.int64) * rows + row) * COLUMNS
    mean_square = tl.sum(tl.load(part + outputs), 0) / (STREAMS * WIDTH)
    factor = 1.0 / tl.sqrt(mean_square + NORM_EPS)

    column = tl.arange(0, BLOCK)
    here = column < WIDTH
    collapsed = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(STREAMS):
        logit = tl.sum(tl.load(part + j), 0) * factor * tl.load(scale) + tl.load(base + j)
        x = tl.load(streams_ptr + (row * STREAMS + j) * WIDTH + column, mask=here, other=0.0).to(tl.float32)
        collapsed += (1.0 / (1.0 + tl.exp(-logit)) + EPS) * x
    kind: tl.constexpr = normed_ptr.dtype.element_ty
    collapsed = collapsed.to(kind).to(tl.float32)
    factor_of_sum = 1.0 / tl.sqrt(tl.sum(collapsed * collapsed, 0) / WIDTH + NORM_EPS)
    out = normed(collapsed, factor_of_sum, norm_ptr + layer * WIDTH, column, here, kind)
    tl.store(normed_ptr + row * WIDTH + column, out.to(kind), mask=here)
    if QUANTIZED:
        store_quantized(out, values_ptr, value_scale_ptr, row, rows, WIDTH, POWER_OF_TWO, FLOOR, MAX, BLOCK)

    stream = tl.arange(0, STREAMS)
    logits = tl.sum(tl.load(part[:, None] + STREAMS + stream[None, :]), 0) * factor
    logits = logits * tl.load(scale + 1) + tl.load(base + STREAMS + stream)
    tl.store(post_ptr + row * STREAMS + stream, 2.0 / (1.0 + tl.exp(-logits)))
    pair = stream[:, None] * STREAMS + stream[None, :]
    c = tl.sum(tl.load(part[:, None, None] + 2 * STREAMS + pair[None, :, :]), 0) * factor
    c = c * tl.load(scale + 2) + tl.load(base + 2 * STREAMS + pair)
    c = tl.exp(c - tl.max(c, 1)[:, None])
    c = c / tl.sum(c, 1)[:, None] + EPS
    c = c / (tl.sum(c, 0)[None, :] + EPS)
    for _ in range(1, ITERATIONS):
        c = c / (tl.sum(c, 1)[:, None] + EPS)
        c = c / (tl.sum(c, 0)[None, :] + EPS)
    tl.store(between_ptr + row * STREAMS * STREAMS + pair, c)


@triton.jit
def write(
    streams_ptr, post_ptr, between_ptr, first_ptr, second_ptr, out_ptr,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, TWO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes streams [rows, STREAMS, WIDTH] after a block, a row and BLOCK of its columns a program.

    The block's result is `first` [rows, WIDTH], plus `second` where there are TWO.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < WIDTH
    y = tl.load(first_ptr + row * WIDTH + column, mask=here, other=0.0).to(tl.float32)
    if TWO:
        y += tl.load(second_ptr + row * WIDTH + column, mask=here, other=0.0).to(tl.float32)
    between, streams = between_ptr + row * STREAMS * STREAMS, row * STREAMS * WIDTH + column
    for k in tl.static_range(STREAMS):
        moved = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(STREAMS):  # read again for each k, from the cache of the multiprocessor
            x = tl.load(streams_ptr + streams + j * WIDTH, mask=here, other=0.0).to(tl.float32)
            moved += tl.load(between + j * STREAMS + k) * x
        out = tl.load(post_ptr + row * STREAMS + k) * y + moved
        tl.store(out_ptr + streams + k * WIDTH, out.to(out_ptr.dtype.element_ty), mask=here)
