"""`rms_norm`: rows over the root of their mean square."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import native
from pallas_kernels.backend import Backend, resolve_backend


def rms_norm(
    x: jax.Array, w: jax.Array, layer: jax.Array | int, eps: float, *, backend: Backend | None = None
) -> jax.Array:
    """Returns `x / rms(x) * w[layer]` over the last axis; differentiable in x and w.

    GPUs take the reference: XLA makes one kernel of it, and four programs on a CPU.

    Args:
      x: [..., D] bfloat16, float16 or float32; at least one row.
      w: [L, D], rounded to x's dtype.
      layer: Python or traced integer.
      eps: is added to the mean square, which is taken in float32.
      backend: implementation; None chooses by device.

    Returns:
      [..., D] in x's dtype; x over its root mean square is rounded to it before the product with w.
    """
    layer = jnp.asarray(layer, jnp.int32)
    if resolve_backend(requested=backend) is Backend.NATIVE and x.dtype == w.dtype and native.norms(x):
        return _native(x, w, layer, eps)
    return _reference(x, w, layer, eps)


def _reference(x: jax.Array, w: jax.Array, layer: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return lax.dynamic_index_in_dim(w, layer, keepdims=False).astype(x.dtype) * normed.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _native(x, w, layer, eps):
    return native.rms_norm(x, w, layer, eps)


def _forward(x, w, layer, eps):
    return _native(x, w, layer, eps), (x, w, layer)


def _backward(eps, saved, dy):
    x, w, layer = saved
    return *jax.vjp(lambda x, w: _reference(x, w, layer, eps), x, w)[1](dy), None


_native.defvjp(_forward, _backward)
