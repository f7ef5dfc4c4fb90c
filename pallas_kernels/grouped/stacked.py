"""The dense product with one layer of a stack of weights: a grouped product whose rows are all of one group."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend
from pallas_kernels.gemm import launch
from pallas_kernels.grouped.contiguous import check_plain, plain_backend


def stacked_gemm(x: jax.Array, w: jax.Array, layer: jax.Array | int, *, backend: Backend | None = None) -> jax.Array:
    """`x @ w[layer].T` without a copy of `w[layer]`; differentiable in x and w.

    XLA copies a weight that a scan over layers slices by its counter, which doubles the traffic of a product of few
    rows. The kernel addresses the stack. The gradients are computed by the reference on every backend.

    Args:
      x: [M, K] bfloat16 or float32.
      w: [L, N, K] of the same dtype.
      layer: Python or traced integer.
      backend: implementation; None chooses by device.

    Returns:
      [M, N] in x's dtype; sums are float32.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also N or K that is no multiple of 8.
    """
    check_plain("stacked_gemm", x, w, 2)
    chosen = plain_backend("stacked_gemm", x.dtype, backend)
    return _mosaic(x, w, jnp.asarray(layer, jnp.int32)) if chosen is Backend.MOSAIC else _reference(x, w, layer)


def _reference(x, w, layer):
    w = lax.dynamic_index_in_dim(w, layer, 0, keepdims=False)
    return jnp.einsum("mk,nk->mn", x, w, preferred_element_type=jnp.float32).astype(x.dtype)


@jax.custom_vjp
def _mosaic(x, w, layer):
    return launch.dense(x, None, w, None, layer, x.dtype)


def _forward(x, w, layer):
    return _mosaic(x, w, layer), (x, w, layer)


def _backward(saved, dy):
    x, w, layer = saved
    return *jax.vjp(lambda x, w: _reference(x, w, layer), x, w)[1](dy), None


_mosaic.defvjp(_forward, _backward)
