"""`layer_gemm`: the product with one layer of a stack of weights."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend
from pallas_kernels.gemm import dispatch
from pallas_kernels.gemm.checks import PLAIN_DTYPES, check_plain, plain_backend


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
    rows. The kernel addresses the stack. The gradients are computed by the reference on every backend.

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
    chosen = plain_backend("layer_gemm", x.dtype, backend)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if out_dtype not in PLAIN_DTYPES:
        raise ValueError(f"layer_gemm: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    product = _mosaic if chosen is Backend.MOSAIC else _reference
    return product(x, w, jnp.asarray(layer, jnp.int32), out_dtype)


def _reference(x, w, layer, out_dtype):
    w = lax.dynamic_index_in_dim(w, layer, 0, keepdims=False)
    return jnp.einsum("mk,nk->mn", x, w, preferred_element_type=jnp.float32).astype(out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _mosaic(x, w, layer, out_dtype):
    return dispatch.dense(x, None, w, None, layer, out_dtype)


def _forward(x, w, layer, out_dtype):
    return _mosaic(x, w, layer, out_dtype), (x, w, layer)


def _backward(out_dtype, saved, dy):
    x, w, layer = saved
    return *jax.vjp(lambda x, w: _reference(x, w, layer, out_dtype), x, w)[1](dy), None


_mosaic.defvjp(_forward, _backward)
