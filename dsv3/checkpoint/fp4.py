"""FP4 weights of DeepSeek-V4's routed experts: e2m1 codes, two in a byte, with an e8m0 scale per 32 columns."""

from typing import NamedTuple

import numpy as np

from dsv3.checkpoint.deepseek_v4 import FP4_GROUP
from pallas_kernels.float8 import BLOCK, E4M3

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The value of each code: bit 3 is the sign."""

HEADROOM = 6
"""A block's scale is the largest of its groups' over two to this power: 6 * 2**6 is 384, and e4m3 ends at 448."""

MAX_SPREAD = 14
"""How many binary places a group's scale may lie below the largest of its block: at 15, 0.5 would become 0."""

_NAN = 255  # of e8m0, which has neither infinity nor zero
_PAIRS = VALUES[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1)]  # [byte, 2]
_AS_E4M3 = np.stack([(_PAIRS * 2.0 ** (HEADROOM - spread)).astype(E4M3) for spread in range(MAX_SPREAD + 1)])


class Fp8Blocks(NamedTuple):
    """A weight as FP8 products take it: e4m3 `[N, K]`, and float32 `[ceil(N / 128), ceil(K / 128)]`, multiplied."""

    data: np.ndarray
    scale: np.ndarray


def decode(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns the values float32 `[N, K]` of FP4 codes.

    Args:
      packed: int8 `[N, K / 2]`; the low four bits of a byte are the even column.
      scale: e8m0 `[N, K / 32]`.
    """
    values = _PAIRS[packed.view(np.uint8)].reshape(len(packed), -1)
    return values * np.repeat(scale.astype(np.float32), FP4_GROUP, axis=1)


def to_fp8(packed: np.ndarray, scale: np.ndarray) -> Fp8Blocks:
    """Returns the same values in blocks of FP8, without loss; arguments are those of `decode`.

    Raises:
      ValueError: a scale is not a number, or lies more than `MAX_SPREAD` binary places below the largest of its block.
    """
    raw, exponents = packed.view(np.uint8), scale.view(np.uint8).astype(np.int32) - 127
    N, groups = exponents.shape
    # The scale of a group of zeros says nothing.
    used = (raw.reshape(N, groups, -1) & 0x77).any(-1)
    if (used & (exponents == _NAN - 127)).any():
        raise ValueError("a scale of FP4 weights is not a number (byte 255); the file is damaged")
    largest = _largest(np.where(used, exponents, HEADROOM - 126))  # float32 scales stay normal numbers
    spread = np.where(used, np.repeat(np.repeat(largest, BLOCK, 0)[:N], _GROUPS, 1)[:, :groups] - exponents, 0)
    if spread.max() > MAX_SPREAD:
        row, group = np.unravel_index(spread.argmax(), spread.shape)
        raise ValueError(
            f"row {row}, columns {group * FP4_GROUP} to {(group + 1) * FP4_GROUP - 1}: the scale is 2**-{spread.max()} "
            f"of the largest in its block of {BLOCK} x {BLOCK}, and FP8 has room for 2**-{MAX_SPREAD}; keep these "
            "experts FP4"
        )
    pairs = _AS_E4M3.view(np.uint16)[np.repeat(spread, FP4_GROUP // 2, axis=1), raw, 0]
    return Fp8Blocks(pairs.view(E4M3), np.exp2((largest - HEADROOM).astype(np.float32)))


_GROUPS = BLOCK // FP4_GROUP


def _largest(exponents: np.ndarray) -> np.ndarray:
    """Returns the largest of each block of 128 rows and four groups."""
    N, groups = exponents.shape
    padded = np.pad(exponents, ((0, -N % BLOCK), (0, -groups % _GROUPS)), mode="edge")
    return padded.reshape(-1, BLOCK, padded.shape[1] // _GROUPS, _GROUPS).max((1, 3))
