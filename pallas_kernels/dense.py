"""Plain products with one layer of a stack of weights: linear layers, the router, one weight per attention head."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import invariance, native
from pallas_kernels.backend import Backend, resolve_backend, with_fallback
from pallas_kernels.gemm import KERNELS, dispatch
from pallas_kernels.gemm.checks import KERNEL_DTYPES, PLAIN_DTYPES, check_plain, check_plain_dtypes, plain_backend


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
      backend: implementation; None selects by device.

    Returns:
      [M, N] in `out_dtype`; sums are float32.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also N or K that is no multiple of 8.
    """
    check_plain("layer_gemm", x, w, 2)
    chosen = plain_backend("layer_gemm", x.dtype, x.shape[0], backend, w.shape)
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
    """Returns `x @ w.T` for a weight outside of a stack; differentiable in x and w.

    GPUs use XLA's product, which does not copy such a weight, unless it must be batch-invariant.

    Args:
      x: [..., K] bfloat16, float16 or float32.
      w: [N, K] of the same dtype.
      out_dtype: float32, or None for x's.
      backend: implementation; None selects by device.

    Returns:
      [..., N] in `out_dtype`.
    """
    rows, backend = math.prod(x.shape[:-1]), with_fallback("plain_gemm", backend)
    if x.dtype == w.dtype and _has_plain_kernel(x.dtype, rows, w.shape, resolve_backend(requested=backend)):
        out = layer_gemm(x.reshape(rows, -1), w[None], 0, out_dtype=out_dtype, backend=backend)
        return out.reshape(*x.shape[:-1], -1)
    out_dtype = jnp.result_type(x, w) if out_dtype is None else jnp.dtype(out_dtype)
    if x.dtype == w.dtype != jnp.float32:
        return _narrow_product(x, w, out_dtype)
    return jnp.einsum("...k,nk->...n", x, w, preferred_element_type=out_dtype)


def _has_plain_kernel(dtype: jnp.dtype, rows: int, weight: tuple[int, ...], backend: Backend) -> bool:
    if backend is Backend.NATIVE:
        return native.takes(dtype, rows, (1, *weight))
    return backend in KERNELS and dtype in KERNEL_DTYPES and invariance.required()


def head_gemm(
    x: jax.Array,
    w: jax.Array,
    layer: jax.Array | int,
    *,
    transposed: bool = False,
    carried: int = 0,
    backend: Backend | None = None,
) -> jax.Array:
    """Multiplies every head with its weight, `x[:, h] @ w[layer, h].T`, without a copy of `w[layer]`.

    The reference is differentiable. With `carried` the last columns of x are appended to the product, as in absorbed
    queries. On Hopper the kernel then reads x and writes the wider result in place, and only the carried columns are
    copied.

    Args:
      x: [M, H, K + carried] bfloat16, float16 or float32.
      w: [L, H, N, K] of the same dtype, or [L, H, K, N] if `transposed`, which leaves out the `.T`.
      layer: Python or traced integer.
      transposed: the order of the weight.
      carried: columns of x that are copied unmultiplied.
      backend: implementation; None selects by device.

    Returns:
      [M, H, N + carried] in x's dtype; sums are float32.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also N or K that is no multiple of 8.
    """
    _check_heads(x, w, transposed, carried)
    chosen = plain_backend("head_gemm", x.dtype, x.shape[0], backend)
    if carried and chosen is Backend.MOSAIC:
        return dispatch.heads(x, w.reshape(-1, *w.shape[2:]), layer, transposed, carried=carried)
    if carried:
        product = head_gemm(x[..., :-carried], w, layer, transposed=transposed, backend=backend)
        return jnp.concatenate([product, x[..., -carried:]], axis=-1)
    if chosen is Backend.NATIVE:
        return native.head_product(x, w, layer, transposed)
    if chosen in KERNELS:
        return KERNELS[chosen].heads(x, w.reshape(-1, *w.shape[2:]), layer, transposed)
    # XLA:CPU sums some batched products of bfloat16 in bfloat16, and supports no float32 result outside of jit.
    x32, w32 = (v.astype(jnp.float32) for v in (x, lax.dynamic_index_in_dim(w, layer, keepdims=False)))
    return jnp.einsum("mhk,hkn->mhn" if transposed else "mhk,hnk->mhn", x32, w32).astype(x.dtype)


def _reference(x, w, layer, out_dtype):
    w = lax.dynamic_index_in_dim(w, layer, 0, keepdims=False)
    if x.dtype != jnp.float32:
        return _narrow_product(x, w, out_dtype)
    return jnp.einsum("mk,nk->mn", x, w, preferred_element_type=jnp.float32).astype(out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow_product(x, w, out_dtype):
    """Returns `x @ w.T` of 16-bit operands; the products of its gradient have 16-bit operands too.

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
    del backend  # gradients are the reference's
    x, w, layer = saved
    return *jax.vjp(lambda x, w: _reference(x, w, layer, out_dtype), x, w)[1](dy), None


_kernel.defvjp(_forward, _backward)


def _check_heads(x: jax.Array, w: jax.Array, transposed: bool, carried: int) -> None:
    order, suffix = "[L, H, K, N]" if transposed else "[L, H, N, K]", f" + {carried}" if carried else ""
    if x.ndim != 3 or w.ndim != 4 or x.shape[1:] != (w.shape[1], w.shape[2 if transposed else 3] + carried):
        raise ValueError(
            f"head_gemm: needs x [M, H, K{suffix}] and w {order} with one H and K, got {x.shape} and {w.shape}"
        )
    check_plain_dtypes("head_gemm", x, w)
