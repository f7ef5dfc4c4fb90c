"""`fp8_gemm`: the dense product of block-scaled e4m3 operands (DeepGEMM's `fp8_gemm_nt`)."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend, resolve_backend
from pallas_kernels.fp8 import reference
from pallas_kernels.fp8.quantize import BLOCK, E4M3
from pallas_kernels.gemm import launch


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
    """`(a * a_scale) @ (b * b_scale).T`, promoted to float32 accumulators every 128 of K.

    Args:
      a: [M, K] e4m3 activations, and a_scale: [ceil(K/128), M] float32, both from `quantize_1x128`.
      b: [N, K] e4m3 weights, or a stack [L, N, K] with `layer`.
      b_scale: [ceil(N/128), ceil(K/128)] float32, or [L, ceil(N/128), ceil(K/128)]: `weight_scale_inv`.
      layer: which weight of the stack, a Python or traced integer. XLA copies a weight that a scan slices by its
        counter, every iteration; the kernel addresses it in place.
      out_dtype: bfloat16 or float32.
      backend: implementation; None chooses by device.

    Returns:
      [M, N] in `out_dtype`.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also N that is no multiple of 8 or K that is
        no multiple of 16.
    """
    _validate(a, a_scale, b, b_scale, layer, out_dtype)
    if resolve_backend(requested=backend) is Backend.MOSAIC:
        stack = (b[None], b_scale[None], 0) if layer is None else (b, b_scale, layer)
        return launch.dense(a, a_scale, *stack, out_dtype)
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


def check_operands(name: str, a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array) -> None:
    """Raises ValueError unless a [..., M, K] and b [..., N, K] are e4m3 and the scales float32 of matching shapes."""
    (m, k), n = a.shape[-2:], b.shape[-2]
    k_blocks = -(-k // BLOCK)
    a_scale_shape = (*a.shape[:-2], k_blocks, m)
    b_scale_shape = (*b.shape[:-2], -(-n // BLOCK), k_blocks)
    if a_scale.shape != a_scale_shape or b_scale.shape != b_scale_shape:
        raise ValueError(
            f"{name}: operands {a.shape} and {b.shape} need scales {a_scale_shape} and {b_scale_shape}, "
            f"got {a_scale.shape} and {b_scale.shape}"
        )
    if a.dtype != E4M3 or b.dtype != E4M3 or a_scale.dtype != jnp.float32 or b_scale.dtype != jnp.float32:
        raise ValueError(
            f"{name}: needs float8_e4m3fn operands and float32 scales, "
            f"got {a.dtype}, {b.dtype} and {a_scale.dtype}, {b_scale.dtype}"
        )
