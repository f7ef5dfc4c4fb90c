"""Operations on rows between products: norm, SwiGLU, rotation. Gradients are the reference's.

GPUs use the reference: XLA compiles each to one kernel. On a CPU it makes four programs of a norm, and as many of a
rotation, each compiled and started by itself in every layer.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import native
from pallas_kernels.backend import Backend, resolve_backend, with_fallback


def rms_norm(
    x: jax.Array, w: jax.Array, layer: jax.Array | int, eps: float, *, backend: Backend | None = None
) -> jax.Array:
    """Returns `x / rms(x) * w[layer]` over the last axis.

    Args:
      x: [..., D or more] bfloat16, float16 or float32; values past the first D are ignored.
      w: [L, D], rounded to x's dtype.
      layer: Python or traced integer.
      eps: added to the mean square, which is float32.
      backend: implementation; None selects by device.

    Returns:
      [..., D] in x's dtype; x over its root mean square is rounded to it before the product with w.
    """
    arrays = x, w, jnp.asarray(layer, jnp.int32)
    return _either(native.rms_norm, _norm, {"eps": eps}, with_fallback("rms_norm", backend), *arrays, weight=w)


def swiglu(gate_up: jax.Array, *, backend: Backend | None = None) -> jax.Array:
    """Returns `silu(gate) * up` of `[..., 2 * F]`, gate columns first: `[..., F]`."""
    return _either(native.swiglu, _swiglu, {}, with_fallback("swiglu", backend), gate_up)


def rotate_heads(x: jax.Array, cos: jax.Array, sin: jax.Array, *, backend: Backend | None = None) -> jax.Array:
    """Returns `x` `[T, H, W]` with the last P values of each head rotated as `rotate` does it.

    `cos` and `sin` are `[T, P / 2]` float32.
    """
    return _either(native.rotate_heads, _rotate_heads, {}, with_fallback("rotate_heads", backend), x, cos, sin)


def latent_rows(
    down: jax.Array,
    w: jax.Array,
    layer: jax.Array | int,
    cos: jax.Array,
    sin: jax.Array,
    eps: float,
    *,
    backend: Backend | None = None,
) -> jax.Array:
    """Returns rows of the cache `[T, R + P]`: normed latent and rotated key.

    Args:
      down: [T, R + P or more]; the last R + P values are latent and key.
      w: [L, R], the norm's weights; layer: Python or traced integer; eps: as in `rms_norm`.
      cos, sin: [T, P / 2] float32.
      backend: implementation; None selects by device.
    """
    arrays = down, w, jnp.asarray(layer, jnp.int32), cos, sin
    backend = with_fallback("latent_rows", backend)
    return _either(native.latent_rows, _latent_rows, {"eps": eps}, backend, *arrays, weight=w)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x0, x1), (x2, x3), ... of `x` `[T, P]` or `[T, H, P]`; computed in float32, dtype of x.

    Pairs are swapped, not split: XLA:CPU makes one program of this, and four of splitting and stacking. The sign goes
    with the pairs: XLA:GPU writes its product with the sines of many tokens to memory, in a kernel of its own.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    heads = (slice(None), *(None,) * (x.ndim - 2), ..., None)
    sign = np.array([-1, 1], np.float32)
    return (pairs * cos[heads] + (pairs[..., ::-1] * sign) * sin[heads]).reshape(x.shape).astype(x.dtype)


def _either(
    kernel: Callable[..., jax.Array],
    reference: Callable[..., jax.Array],
    how: dict[str, float],
    backend: Backend | None,
    x: jax.Array,
    *rest: jax.Array,
    weight: jax.Array | None = None,
) -> jax.Array:
    """Calls the C++ kernel on a CPU if it supports x, and a `weight`, if any, has its dtype; else the reference."""
    reference = functools.partial(reference, **how)
    is_taken = native.takes_rows(x) and (weight is None or weight.dtype == x.dtype)
    if is_taken and resolve_backend(requested=backend) is Backend.NATIVE:
        return differentiable(functools.partial(kernel, **how), reference)(x, *rest)
    return reference(x, *rest)


def differentiable[T](kernel: Callable[..., T], reference: Callable[..., T]) -> Callable[..., T]:
    """Returns the kernel with the gradient of the reference."""
    called = jax.custom_vjp(kernel)
    called.defvjp(
        lambda *arrays: (kernel(*arrays), arrays),
        lambda arrays, dy: jax.vjp(reference, *arrays)[1](dy),
    )
    return called


def _norm(x: jax.Array, w: jax.Array, layer: jax.Array, eps: float) -> jax.Array:
    x32 = x[..., : w.shape[-1]].astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return lax.dynamic_index_in_dim(w, layer, keepdims=False).astype(x.dtype) * normed.astype(x.dtype)


def _swiglu(gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _rotate_heads(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    plain = x.shape[-1] - 2 * cos.shape[-1]
    return jnp.concatenate([x[..., :plain], rotate(x[..., plain:], cos, sin)], axis=-1)


def _latent_rows(
    down: jax.Array, w: jax.Array, layer: jax.Array, cos: jax.Array, sin: jax.Array, eps: float
) -> jax.Array:
    R, P = w.shape[-1], 2 * cos.shape[-1]
    latent, key = jnp.split(down[:, down.shape[1] - R - P :], [R], axis=1)
    return jnp.concatenate([_norm(latent, w, layer, eps), rotate(key, cos, sin)], axis=1)
