"""Quantization to e4m3 per row and 128 channels in Triton, after SwiGLU or not: values read once, written once."""

import triton
import triton.language as tl

from pallas_kernels.triton.kernels.e4m3 import narrow


@triton.jit
def quantize(
    x_ptr, used_ptr, rows, values_ptr, scale_ptr,
    CHANNELS: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr, FLOOR: tl.constexpr,
    MAX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantizes x [groups, rows, CHANNELS (twice if GATED)] to e4m3 and scales [groups, CHANNELS / BLOCK, rows]."""
    group, block = tl.program_id(2).to(tl.int64), tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(0) * BLOCK_M >= tl.load(used_ptr):
        return
    channel = block * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (channel < CHANNELS)[None, :]
    width: tl.constexpr = CHANNELS * 2 if GATED else CHANNELS
    source = x_ptr + (group * rows + row)[:, None] * width + channel[None, :]
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(source + CHANNELS, mask=mask, other=0.0).to(tl.float32)
        if LIMIT > 0:
            x, up = tl.where(x > LIMIT, LIMIT, x), tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        x = x / (1.0 + tl.exp(-x)) * up
    x, scale = quantized(x, POWER_OF_TWO, FLOOR, MAX)
    place = (group * rows + row)[:, None] * CHANNELS + channel[None, :]
    if values_ptr.dtype.element_ty == tl.uint8:
        tl.store(values_ptr + place, narrow(x), mask=mask)
    else:
        tl.store(values_ptr + place, x.to(values_ptr.dtype.element_ty), mask=mask)
    blocks: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    tl.store(scale_ptr + (group * blocks + block) * rows + row, scale, mask=row < rows)


@triton.jit
def quantized(x, POWER_OF_TWO: tl.constexpr, FLOOR: tl.constexpr, MAX: tl.constexpr):
    """Returns rows of x over their scales, within e4m3's range, and the scales."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), FLOOR), MAX)
    if POWER_OF_TWO:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & ~0x7FFFFF).to(tl.float32, bitcast=True)
    x = x * tl.div_rn(1.0, scale)[:, None]
    return tl.where(x > MAX, MAX, tl.where(x < -MAX, -MAX, x)), scale  # NaN stays


@triton.jit
def store_quantized(
    x, values_ptr, scale_ptr, row, rows,
    WIDTH: tl.constexpr, POWER_OF_TWO: tl.constexpr, FLOOR: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantizes a row x [BLOCK] of WIDTH channels to e4m3 [rows, WIDTH] and scales [WIDTH / 128, rows]."""
    x, scale = quantized(tl.reshape(x, (BLOCK // 128, 128)), POWER_OF_TWO, FLOOR, MAX)
    block = tl.arange(0, BLOCK // 128)
    channel = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(values_ptr + row * WIDTH + channel, x.to(values_ptr.dtype.element_ty), mask=channel < WIDTH)
    tl.store(scale_ptr + block.to(tl.int64) * rows + row, scale, mask=block < WIDTH // 128)
