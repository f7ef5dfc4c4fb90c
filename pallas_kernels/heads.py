"""Heads over their root mean square, rotated: the queries of DeepSeek-V4.

XLA compiles this to three kernels on a GPU, each of which reads the heads. The Triton kernel reads them once, on Hopper
too.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend, has_jax_triton, resolve_backend, with_fallback
from pallas_kernels.dsa.triton_ops import traced_for
from pallas_kernels.rows import differentiable, rotate_heads
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import power_of_two


def unit_rotated_heads(
    x: jax.Array, cos: jax.Array, sin: jax.Array, eps: float, *, backend: Backend | None = None
) -> jax.Array:
    """Returns `x / rms(x)` over the last axis of `x` `[T, H, W]`, rounded to its dtype, then rotated.

    Args:
      x: [T, H, W] of a float type.
      cos, sin: [T, P / 2] float32, for the last P values of each head, as in `rotate_heads`.
      eps: added to the mean square, which is float32.
      backend: implementation; None selects by device.
    """
    backend = resolve_backend(requested=with_fallback("unit_rotated_heads", backend))
    reference = functools.partial(_reference, eps, backend)
    if backend not in (Backend.MOSAIC, Backend.TRITON) or not has_jax_triton() or not x.size:
        return reference(x, cos, sin)
    return differentiable(functools.partial(_kernel, eps, backend), reference)(x, cos, sin)


def _reference(eps: float, backend: Backend, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    unit = (x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)
    return rotate_heads(unit, cos, sin, backend=backend)


def _kernel(eps: float, backend: Backend, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    T, heads, width = x.shape
    with traced_for(backend):
        (out,) = call.start(
            "heads.unit_rotated",
            (x, cos, sin),
            [jax.ShapeDtypeStruct(x.shape, x.dtype)],
            grid=(T, heads),
            warps=1,
            HEADS=heads,
            WIDTH=width,
            ROTATED=2 * cos.shape[1],
            EPS=eps,
            BLOCK=power_of_two(width),
        )
    return out
