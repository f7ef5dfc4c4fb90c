"""The oracle of FP4 weights: e2m1 codes as ml_dtypes defines them, with powers of groups and scales of blocks."""

import ml_dtypes
import numpy as np

from pallas_kernels.fp4 import HEADROOM, MAX_SPREAD, SIGN_BITS

VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def words(codes: np.ndarray) -> np.ndarray:
    """Codes 0 to 15, [..., K], in words uint32 [..., K / 8]: value by value, as `pallas_kernels.fp4` says."""
    blocks = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 128)
    made = np.zeros((*blocks.shape[:-1], 16), np.uint32)
    for word in range(16):
        group, lane = 2 * (word // 8) + word % 2, word % 8 // 2
        for value in range(8):
            code = blocks[..., 32 * group + 16 * (value // 4) + 4 * lane + value % 4]
            made[..., word] |= (code & 7) << np.uint32(4 * value) | code >> 3 << np.uint32(SIGN_BITS[value])
    return made.reshape(*codes.shape[:-1], -1)


def powers(places: np.ndarray) -> np.ndarray:
    """Places [..., N, K / 32] below the largest power, as kernels read them: uint32 [..., K / 128, N]."""
    steps = (8 * (MAX_SPREAD - places)).astype(np.uint8)
    return np.ascontiguousarray(steps).view("<u4").swapaxes(-1, -2).copy()


def real(codes: np.ndarray, places: np.ndarray, scale: np.ndarray, dtype=np.float64) -> np.ndarray:
    """The dequantized values."""
    *_, n, k = codes.shape
    of_groups = np.repeat(np.exp2(HEADROOM - places.astype(dtype)), 32, axis=-1)
    of_blocks = np.repeat(np.repeat(scale.astype(dtype), 128, axis=-2)[..., :n, :], 128, axis=-1)[..., :k]
    return VALUES.astype(dtype)[codes] * of_groups * of_blocks


def random_weight(seed: int, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Any codes and places, and scales [..., ceil(N/128), K / 128] of either size."""
    rng = np.random.default_rng(seed)
    *lead, n, k = shape
    scale = np.exp2(rng.integers(-12, -3, (*lead, -(-n // 128), k // 128))).astype(np.float32)
    return rng.integers(0, 16, shape), rng.integers(0, MAX_SPREAD + 1, (*lead, n, k // 32)), scale
