"""e4m3 as bytes: for GPUs that cannot convert it, and for pages, which are bytes anyway."""

import triton
import triton.language as tl


@triton.jit
def widen(raw):
    """Returns the float16 values of e4m3 bytes (uint8), exactly; the code of NaN becomes 480.

    Exponent and mantissa are shifted to their positions in float16, whose bias is larger by 8, hence the factor.
    """
    raw = raw.to(tl.uint16)
    bits = ((raw & 0x80) << 8) | ((raw & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def narrow(x):
    """Returns the e4m3 bytes (uint8) of float32 values of at most 448 in magnitude, rounded to nearest even.

    Below 2^-6 the spacing is 2^-9, as of float32 values from 2^14 on: adding 2^14 rounds.
    """
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 960: the difference of the biases, 120, times 8
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | tl.where(x < 0, 0x80, 0)).to(tl.uint8)
