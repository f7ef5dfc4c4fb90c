"""`fp8_gemm`: the dense FP8 GEMM with blockwise scales (DeepGEMM's `fp8_gemm_nt`)."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import native
from pallas_kernels.backend import Backend, resolve_backend, with_fallback
from pallas_kernels.fp8 import reference
from pallas_kernels.gemm import KERNELS
from pallas_kernels.gemm.checks import check_operands


def fp8_gemm(
    a: jax.Array,
    a_scale: jax.Array,
    b: jax.Array,
    b_scale: jax.Array,
    *,
    layer: jax.Array | int | None = None,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: Backend | None = None,
) -> jax.Array:
    """Returns `(a * a_scale) @ (b * b_scale).T`, promoted to float32 accumulators every 128 of K.

    Args:
      a: [M, K] e4m3 activations, and a_scale: [ceil(K/128), M] float32, both from `quantize_1x128`.
      b: [N, K] e4m3 weights, or a stack [L, N, K] with `layer`.
      b_scale: [ceil(N/128), ceil(K/128)] float32, or [L, ceil(N/128), ceil(K/128)]: `weight_scale_inv`.
      layer: which weight of the stack, a Python or traced integer. XLA would copy the weight
        that a scan slices, every iteration; the kernel addresses it in place.
      out_dtype: bfloat16 or float32.
      backend: implementation; None selects by device.

    Returns:
      [M, N] in `out_dtype`.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also N that is no multiple of 8 or K that is
        no multiple of 16.
    """
    _validate(a, a_scale, b, b_scale, layer, out_dtype)
    chosen = resolve_backend(requested=with_fallback("fp8_gemm", backend))
    stack = (b[None], b_scale[None], 0) if layer is None else (b, b_scale, layer)
    if chosen in KERNELS:
        return KERNELS[chosen].dense(a, a_scale, *stack, out_dtype)
    if chosen is Backend.NATIVE and native.takes(a.dtype, a.shape[0]):
        b, b_scale, layer = stack
        return native.fp8_grouped_product(a, a_scale, b, b_scale, jnp.zeros(1, jnp.int32), layer, out_dtype)
    if layer is not None:
        b = lax.dynamic_index_in_dim(b, layer, 0, keepdims=False)
        b_scale = lax.dynamic_index_in_dim(b_scale, layer, 0, keepdims=False)
    return reference.scaled_matmul(a, a_scale, b, b_scale).astype(out_dtype)


def _validate(a, a_scale, b, b_scale, layer, out_dtype) -> None:
    given = f"a {a.shape} {a.dtype}, a_scale {a_scale.shape}, b {b.shape} {b.dtype}, b_scale {b_scale.shape}"
    if a.ndim != 2 or b.ndim not in (2, 3) or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"fp8_gemm: needs a [M, K] and b [N, K] or [L, N, K] with one K; got {given}")
    if (b.ndim == 3) != (layer is not None):
        raise ValueError(f"fp8_gemm: `layer` is for a stack b [L, N, K] and only for it; got layer={layer}, {given}")
    check_operands("fp8_gemm", a, a_scale, b, b_scale)
    if jnp.dtype(out_dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"fp8_gemm: out_dtype must be bfloat16 or float32, got {jnp.dtype(out_dtype)}")
