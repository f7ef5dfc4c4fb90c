"""The oracle of FP4 weights: e2m1 codes as ml_dtypes defines them, with scales that are powers of two."""

import ml_dtypes
import numpy as np

from pallas_kernels.int4 import interleave
from tests.pallas_kernels import int4_weights

VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def words(codes: np.ndarray) -> np.ndarray:
    """Codes 0 to 15, [..., K], in words uint32 [..., K / 8] in the order of kernels."""
    return interleave(int4_weights.pack(codes.astype(np.int8) - 8)).view(np.uint32)


def real(codes: np.ndarray, scale: np.ndarray, dtype=np.float64) -> np.ndarray:
    """The dequantized values."""
    return VALUES.astype(dtype)[codes] * np.repeat(scale.astype(dtype), 32, axis=-1)


def random_weight(seed: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Any codes, and scales [..., K / 32] of either size."""
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.integers(-8, 3, (*shape[:-1], shape[-1] // 32))).astype(int4_weights.BF16)
    return rng.integers(0, 16, shape), scale
