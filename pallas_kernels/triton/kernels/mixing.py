"""Weights of hyper-connections in Triton: all of Sinkhorn's iterations of a token in registers."""

import triton
import triton.language as tl


@triton.jit
def weights(
    logits_ptr, base_ptr, scale_ptr, rows, pre_ptr, post_ptr, between_ptr,
    STREAMS: tl.constexpr, ITERATIONS: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes pre and post [rows, STREAMS], and between [rows, STREAMS, STREAMS].

    They are made of logits [rows, STREAMS * (STREAMS + 2)]. `base` has a value per logit, `scale` one for each part.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, STREAMS)
    width: tl.constexpr = STREAMS * (STREAMS + 2)
    each = (row < rows)[:, None]
    at = row[:, None] * width + stream[None, :]
    place = row[:, None] * STREAMS + stream[None, :]
    first = tl.load(logits_ptr + at, mask=each, other=0.0) * tl.load(scale_ptr)
    first += tl.load(base_ptr + stream)[None, :]
    tl.store(pre_ptr + place, 1.0 / (1.0 + tl.exp(-first)) + EPS, mask=each)
    second = tl.load(logits_ptr + STREAMS + at, mask=each, other=0.0) * tl.load(scale_ptr + 1)
    second += tl.load(base_ptr + STREAMS + stream)[None, :]
    tl.store(post_ptr + place, 2.0 / (1.0 + tl.exp(-second)), mask=each)

    pair = stream[:, None] * STREAMS + stream[None, :]
    all_pairs = (row < rows)[:, None, None]
    third = logits_ptr + 2 * STREAMS + row[:, None, None] * width + pair[None, :, :]
    c = tl.load(third, mask=all_pairs, other=0.0) * tl.load(scale_ptr + 2)
    c += tl.load(base_ptr + 2 * STREAMS + pair)[None, :, :]
    c = tl.exp(c - tl.max(c, 2)[:, :, None])
    c = c / tl.sum(c, 2)[:, :, None] + EPS
    c = c / (tl.sum(c, 1)[:, None, :] + EPS)
    for _ in range(1, ITERATIONS):
        c = c / (tl.sum(c, 2)[:, :, None] + EPS)
        c = c / (tl.sum(c, 1)[:, None, :] + EPS)
    square: tl.constexpr = STREAMS * STREAMS
    tl.store(between_ptr + row[:, None, None] * square + pair[None, :, :], c, mask=all_pairs)
