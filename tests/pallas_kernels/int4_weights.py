"""The oracle of INT4 weights: compressed-tensors' packing, written from its definition."""

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)


def quantize(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values -8 to 7, int8 [..., N, K], and bfloat16 scales [..., N, K / 32]: the largest of 32 becomes 7.5 or less."""
    groups = w.reshape(*w.shape[:-1], -1, 32)
    scale = (np.abs(groups).max(-1) / 7.5).astype(BF16)
    steps = np.round(groups / np.maximum(scale.astype(np.float32), 1e-30)[..., None])
    return np.clip(steps, -8, 7).astype(np.int8).reshape(w.shape), scale


def pack(values: np.ndarray) -> np.ndarray:
    """Words, int32 [..., K / 8]: eight neighbors, the first in the lowest four bits, each plus 8."""
    words = np.zeros((*values.shape[:-1], values.shape[-1] // 8), np.uint32)
    for i in range(8):
        words |= (values[..., i::8].astype(np.int64) + 8).astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def real(values: np.ndarray, scale: np.ndarray, dtype=np.float64) -> np.ndarray:
    """The dequantized values."""
    return values.astype(dtype) * np.repeat(scale.astype(dtype), 32, axis=-1)


def random_weight(seed: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Any four bits, and scales of either size."""
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.uniform(-8, 2, (*shape[:-1], shape[-1] // 32))).astype(BF16)
    return rng.integers(-8, 8, shape, np.int8), scale
