"""`trained_gemm`: a linear layer of training, with three products of e4m3 operands (DeepSeek-V3 report, section 3.3).

    y  = x w^T     x in tiles of 1 x 128, w in blocks of 128 x 128
    dx = dy w      dy in tiles of 1 x 128, the same blocks of w
    dw = dy^T x    both in tiles of 128 x 1: 128 tokens of one channel

The first two are `fp8_gemm`, which has a kernel on every GPU. No kernel here supports a scale per row of both operands,
which the third has. There the e4m3 values are multiplied in bfloat16, at its rate: scales are powers of two, so that is
exact.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend, with_fallback
from pallas_kernels.float8 import BLOCK
from pallas_kernels.fp8.gemm import fp8_gemm
from pallas_kernels.fp8.quantize import quantize_1x128, quantize_128x128

Quantized = tuple[jax.Array, jax.Array]
"""e4m3 values and their float32 scales."""


def activation_tiles(x: jax.Array, backend: Backend | None) -> Quantized:
    """Returns x `[T, C]` in tiles of one token by 128 channels: values `[T, C]`, scales `[ceil(C/128), T]`."""
    return quantize_1x128(x, ue8m0=True, backend=backend)


def weight_blocks(w: jax.Array, backend: Backend | None) -> Quantized:
    """Returns w `[..., N, K]` in blocks of 128 by 128: values, and scales `[..., ceil(N/128), ceil(K/128)]`."""
    return quantize_128x128(w, backend=backend)


def transposed(blocks: Quantized) -> Quantized:
    """Transposes blocks `[..., N, K]` to `[..., K, N]`: values and scales stay."""
    values, scale = blocks
    return jnp.swapaxes(values, -1, -2), jnp.swapaxes(scale, -1, -2)


def along_tokens(x: jax.Array, backend: Backend | None) -> jax.Array:
    """Returns x `[T, C]` rounded to e4m3 in tiles of 128 tokens by one channel, exact in bfloat16.

    The last tile may have fewer tokens.
    """
    return dequantized(quantize_1x128(x.T, ue8m0=True, backend=backend)).T


def dequantized(tiles: Quantized) -> jax.Array:
    """Returns the values of tiles with power-of-two scales, bfloat16 `[M, K]`, exactly.

    `tiles` are values `[M, K]` and scales `[ceil(K/128), M]`.
    """
    values, scale = tiles
    columns = jnp.repeat(scale.T, BLOCK, axis=1, total_repeat_length=scale.shape[0] * BLOCK)
    return (values.astype(jnp.float32) * columns[:, : values.shape[1]]).astype(jnp.bfloat16)


def trained_gemm(x: jax.Array, w: jax.Array, *, backend: Backend | None = None) -> jax.Array:
    """Returns `x @ w.T` of e4m3 values, with gradients of e4m3 values too; all sums are float32.

    The gradient saves x as e4m3 tiles, one byte per value. They are requantized along the tokens there.

    Args:
      x: [T, K] bfloat16 or float32.
      w: [N, K] bfloat16 or float32, not quantized: the gradient is that of these values.
      backend: implementation; None selects by device.

    Returns:
      [T, N] in x's dtype. The gradients have the dtypes of x and w.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also N or K that is no multiple of 16.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"trained_gemm: needs x [T, K] and w [N, K] with one K, got {x.shape} and {w.shape}")
    check_trained("trained_gemm", x, w)
    return _product(x, w, jnp.dtype(w.dtype), with_fallback("trained_gemm", backend))


def check_trained(name: str, x: jax.Array, w: jax.Array) -> None:
    """Raises ValueError unless x and w are bfloat16 or float32."""
    supported = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
    if x.dtype not in supported or w.dtype not in supported:
        raise ValueError(f"{name}: x and w must be bfloat16 or float32, got {x.dtype} and {w.dtype}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x, w, weight_dtype, backend):
    return _forward(x, w, weight_dtype, backend)[0]


def _forward(x, w, weight_dtype, backend):
    tiles, blocks = activation_tiles(x, backend), weight_blocks(w, backend)
    return fp8_gemm(*tiles, *blocks, out_dtype=x.dtype, backend=backend), (tiles, blocks)


def _backward(weight_dtype, backend, saved, dy):
    tiles, blocks = saved
    dx = fp8_gemm(*activation_tiles(dy, backend), *transposed(blocks), out_dtype=dy.dtype, backend=backend)
    by_token = along_tokens(dy, backend), along_tokens(dequantized(tiles), backend)
    dw = lax.dot_general(*by_token, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return dx, dw.astype(weight_dtype)


_product.defvjp(_forward, _backward)
