"""`layer_gemm`: the product with one layer of a stack of weights."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import native
from pallas_kernels.backend import Backend, resolve_backend, with_fallback
from pallas_kernels.gemm.checks import PLAIN_DTYPES, check_plain, plain_backend
from pallas_kernels.gemm.choice import KERNELS


def layer_gemm(
    x: jax.Array,
    w: jax.Array,
    layer: jax.Array | int,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: Backend | None = None,
) -> jax.Array:
    """Returns `x @ w[layer].T` without a copy of `w[layer]`; differentiable in x and w.

    XLA copies a weight that a scan over layers slices by its counter, which doubles the traffic of a product of few
    rows. The kernels address the stack. The gradients are computed by the reference on every backend.

    Args:
      x: [M, K] bfloat16, float16 or float32.
      w: [L, N, K] of the same dtype.
      layer: Python or traced integer.
      out_dtype: bfloat16, float16 or float32; None means x's.
      backend: implementation; None chooses by device.

    Returns:
      [M, N] in `out_dtype`; sums are float32.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also N or K that is no multiple of 8.
    """
    check_plain("layer_gemm", x, w, 2)
    chosen = plain_backend("layer_gemm", x.dtype, x.shape[0], backend)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if out_dtype not in PLAIN_DTYPES:
        raise ValueError(f"layer_gemm: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    layer = jnp.asarray(layer, jnp.int32)
    if chosen is Backend.REFERENCE:
        return _reference(x, w, layer, out_dtype)
    return _kernel(x, w, layer, out_dtype, chosen)


def plain_gemm(
    x: jax.Array, w: jax.Array, *, out_dtype: jax.typing.DTypeLike | None = None, backend: Backend | None = None
) -> jax.Array:
    """Returns `x @ w.T` for a weight that is in no stack; differentiable in x and w.

    XLA's own product is the kernel of a GPU here: nothing copies such a weight.

    Args:
      x: [..., K] bfloat16, float16 or float32.
      w: [N, K] of the same dtype.
      out_dtype: float32, or None for x's.
      backend: implementation; None chooses by device.

    Returns:
      [..., N] in `out_dtype`.
    """
    rows, backend = math.prod(x.shape[:-1]), with_fallback("plain_gemm", backend)
    if x.dtype == w.dtype and resolve_backend(requested=backend) is Backend.NATIVE and native.takes(x.dtype, rows):
        out = layer_gemm(x.reshape(rows, -1), w[None], 0, out_dtype=out_dtype, backend=backend)
        return out.reshape(*x.shape[:-1], -1)
    out_dtype = jnp.result_type(x, w) if out_dtype is None else jnp.dtype(out_dtype)
    if x.dtype == w.dtype != jnp.float32:
        return _narrow_product(x, w, out_dtype)
    return jnp.einsum("...k,nk->...n", x, w, preferred_element_type=out_dtype)


def _reference(x, w, layer, out_dtype):
    w = lax.dynamic_index_in_dim(w, layer, 0, keepdims=False)
    if x.dtype != jnp.float32:
        return _narrow_product(x, w, out_dtype)
    return jnp.einsum("mk,nk->mn", x, w, preferred_element_type=jnp.float32).astype(out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow_product(x, w, out_dtype):
    """Returns `x @ w.T` of 16-bit operands; the products of its gradient take 16-bit operands too.

    JAX's own gradient widens them to float32, which a CPU with bfloat16 products multiplies at half the rate.
    """
    return jnp.einsum("...k,nk->...n", x, w, preferred_element_type=jnp.float32).astype(out_dtype)


def _narrow_forward(x, w, out_dtype):
    return _narrow_product(x, w, out_dtype), (x, w)


def _narrow_backward(out_dtype, saved, dy):
    del out_dtype
    x, w = saved
    dy = dy.astype(x.dtype)
    dx = jnp.einsum("...n,nk->...k", dy, w, preferred_element_type=jnp.float32)
    dw = jnp.einsum("...n,...k->nk", dy, x, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_narrow_product.defvjp(_narrow_forward, _narrow_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _kernel(x, w, layer, out_dtype, backend):
    if backend is Backend.NATIVE:
        return native.layer_product(x, w, layer, out_dtype)
    return KERNELS[backend].dense(x, None, w, None, layer, out_dtype)


def _forward(x, w, layer, out_dtype, backend):
    return _kernel(x, w, layer, out_dtype, backend), (x, w, layer)


def _backward(out_dtype, backend, saved, dy):
    del backend  # the gradients exist as references only
    x, w, layer = saved
    return *jax.vjp(lambda x, w: _reference(x, w, layer, out_dtype), x, w)[1](dy), None


_kernel.defvjp(_forward, _backward)
