"""Queries and latents of DeepSeek-V4 in Triton: over their root mean square, and rotated."""

import triton
import triton.language as tl

from pallas_kernels.triton.kernels.quantize import store_quantized


@triton.jit
def unit_rotated(
    x_ptr, cos_ptr, sin_ptr, out_ptr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes one head of x [rows, HEADS, WIDTH], its last ROTATED values turned in pairs by cos, sin [rows, ROTATED/2].

    The head over its root mean square is rounded to x's type before it is turned.
    """
    row = tl.program_id(0).to(tl.int64)
    head, column = (row * HEADS + tl.program_id(1)) * WIDTH, tl.arange(0, BLOCK)
    here, plain = column < WIDTH, WIDTH - ROTATED
    x = tl.load(x_ptr + head + column, mask=here, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + EPS)
    x = (x * factor).to(x_ptr.dtype.element_ty).to(tl.float32)
    turned = here & (column >= plain)
    angle = row * (ROTATED // 2) + (column - plain) // 2
    second = (column - plain) % 2 == 1
    partner = tl.load(x_ptr + head + tl.where(second, column - 1, column + 1), mask=turned, other=0.0).to(tl.float32)
    partner = (partner * factor).to(x_ptr.dtype.element_ty).to(tl.float32)
    cos, sin = tl.load(cos_ptr + angle, mask=turned, other=1.0), tl.load(sin_ptr + angle, mask=turned, other=0.0)
    x = tl.where(turned, x * cos + partner * tl.where(second, sin, -sin), x)
    tl.store(out_ptr + head + column, x.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def normed_latents(
    down_ptr, query_norm_ptr, norm_ptr, layer_ptr, cos_ptr, sin_ptr, query_ptr, latent_ptr, values_ptr, scale_ptr,
    QUERY: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr, EPS: tl.constexpr,
    QUANTIZED: tl.constexpr, POWER_OF_TWO: tl.constexpr, FLOOR: tl.constexpr, MAX: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norms one of two parts of a row of down [rows, QUERY + WIDTH] by layer `layer` of its norm, and turns the second.

    Its last ROTATED values are turned in pairs by cos, sin [rows, ROTATED / 2]. QUANTIZED: the first is quantized too.
    """
    row, layer = tl.program_id(0).to(tl.int64), tl.load(layer_ptr).to(tl.int64)
    start = down_ptr + row * (QUERY + WIDTH)
    if tl.program_id(1) == 0:
        x = _norm_row(start, query_norm_ptr + layer * QUERY, query_ptr + row * QUERY, QUERY, EPS, BLOCK_Q)
        if QUANTIZED:
            rows = tl.num_programs(0)
            store_quantized(x, values_ptr, scale_ptr, row, rows, QUERY, POWER_OF_TWO, FLOOR, MAX, BLOCK_Q)
    else:
        _norm_latent(
            start + QUERY, norm_ptr + layer * WIDTH, cos_ptr + row * (ROTATED // 2), sin_ptr + row * (ROTATED // 2),
            latent_ptr + row * WIDTH, WIDTH, ROTATED, EPS, BLOCK,
        )  # fmt: skip


@triton.jit
def _norm_row(x_ptr, norm_ptr, out_ptr, WIDTH: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    here = column < WIDTH
    x = tl.load(x_ptr + column, mask=here, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + EPS)
    x = normed(x, factor, norm_ptr, column, here, out_ptr.dtype.element_ty)
    tl.store(out_ptr + column, x.to(out_ptr.dtype.element_ty), mask=here)
    return x


@triton.jit
def _norm_latent(
    x_ptr, norm_ptr, cos_ptr, sin_ptr, out_ptr,
    WIDTH: tl.constexpr, ROTATED: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column, plain = tl.arange(0, BLOCK), WIDTH - ROTATED
    here = column < WIDTH
    x = tl.load(x_ptr + column, mask=here, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + EPS)
    x = normed(x, factor, norm_ptr, column, here, out_ptr.dtype.element_ty)
    turned, second = here & (column >= plain), (column - plain) % 2 == 1
    other = tl.where(second, column - 1, column + 1)
    partner = tl.load(x_ptr + other, mask=turned, other=0.0).to(tl.float32)
    partner = normed(partner, factor, norm_ptr, other, turned, out_ptr.dtype.element_ty)
    angle = (column - plain) // 2
    cos, sin = tl.load(cos_ptr + angle, mask=turned, other=1.0), tl.load(sin_ptr + angle, mask=turned, other=0.0)
    x = tl.where(turned, x * cos + partner * tl.where(second, sin, -sin), x)
    tl.store(out_ptr + column, x.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def normed(x, factor, norm_ptr, column, mask, kind: tl.constexpr):
    """Returns float32 values that are rounded to `kind` over their root mean square, and times the norm's weights."""
    weight = tl.load(norm_ptr + column, mask=mask, other=0.0).to(kind).to(tl.float32)
    return ((x * factor).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
