"""Shared by the kernel tests: DeepGEMM's measure of difference and block-scaled operands in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp8 import quantize_1x128, quantize_128x128


def calc_diff(x, y) -> float:
    """`1 - 2<x,y> / (|x|^2 + |y|^2)` in float64: 0 for equal arrays."""
    x, y = (np.asarray(v.astype(jnp.float32) if hasattr(v, "astype") else v, np.float64) for v in (x, y))
    norm = (x * x).sum() + (y * y).sum()
    return 1 - 2 * (x * y).sum() / norm if norm else 0.0


def activation(key, *shape):
    """Normal values of `shape` [..., M, K] quantized 1x128: (q, scale, what they stand for in float64)."""
    q, scale = quantize_1x128(jax.random.normal(jax.random.key(key), shape))
    per_value = np.repeat(np.swapaxes(np.asarray(scale, np.float64), -1, -2), 128, axis=-1)[..., : shape[-1]]
    return q, scale, np.asarray(q.astype(jnp.float32), np.float64) * per_value


def weight(key, *shape):
    """Normal values of `shape` [..., N, K] quantized 128x128: (q, scale, what they stand for in float64)."""
    q, scale = quantize_128x128(jax.random.normal(jax.random.key(key), shape))
    per_value = np.repeat(np.repeat(np.asarray(scale, np.float64), 128, axis=-2), 128, axis=-1)
    per_value = per_value[..., : shape[-2], : shape[-1]]
    return q, scale, np.asarray(q.astype(jnp.float32), np.float64) * per_value
