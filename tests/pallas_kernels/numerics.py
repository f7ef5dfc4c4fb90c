"""Shared by the kernel tests: DeepGEMM's measure of difference and block-scaled operands in float64."""

import jax
import numpy as np

from pallas_kernels import fp8

quantize_1x128, quantize_128x128 = jax.jit(fp8.quantize_1x128), jax.jit(fp8.quantize_128x128)
"""Jitted: otherwise each operation would be compiled by itself."""


def calc_diff(x, y) -> float:
    """`1 - 2<x,y> / (|x|^2 + |y|^2)` in float64: 0 for equal arrays."""
    x, y = (np.asarray(v, np.float64) for v in (x, y))
    norm = (x * x).sum() + (y * y).sum()
    return 1 - 2 * (x * y).sum() / norm if norm else 0.0


def normal(key, *shape):
    """Normal float32 values, by numpy: `jax.random` would compile a program for each shape."""
    return np.random.default_rng(key).standard_normal(shape, np.float32)


def activation(key, *shape):
    """Normal values of `shape` [..., M, K] quantized 1x128: (q, scale, dequantized float64)."""
    q, scale = quantize_1x128(normal(key, *shape))
    per_value = np.repeat(np.swapaxes(np.asarray(scale, np.float64), -1, -2), 128, axis=-1)[..., : shape[-1]]
    return q, scale, np.asarray(q, np.float64) * per_value


def weight(key, *shape):
    """Normal values of `shape` [..., N, K] quantized 128x128: (q, scale, dequantized float64)."""
    q, scale = quantize_128x128(normal(key, *shape))
    per_value = np.repeat(np.repeat(np.asarray(scale, np.float64), 128, axis=-2), 128, axis=-1)
    per_value = per_value[..., : shape[-2], : shape[-1]]
    return q, scale, np.asarray(q, np.float64) * per_value
