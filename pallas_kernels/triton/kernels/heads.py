"""Queries of DeepSeek-V4 in Triton: heads over their root mean square, rotated."""

import triton
import triton.language as tl


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
