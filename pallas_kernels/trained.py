"""Products of training, with e4m3 operands in all three of them (DeepSeek-V3 report, section 3.3).

    y  = x w^T     x in tiles of 1 x 128, w in blocks of 128 x 128
    dx = dy w      dy in tiles of 1 x 128, the same blocks of w
    dw = dy^T x    both in tiles of 128 x 1: 128 tokens of one channel

The first two are `fp8_gemm`, or its grouped form, which have a kernel on every GPU. No kernel here supports a scale per
row of both operands, which the third has. There the e4m3 values are multiplied in bfloat16, at its rate: scales are
powers of two, so that is exact.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend, with_fallback
from pallas_kernels.float8 import BLOCK
from pallas_kernels.fp8 import fp8_gemm, quantize_1x128, quantize_128x128
from pallas_kernels.gemm.checks import check_tiles
from pallas_kernels.grouped import fp8_grouped_gemm_contiguous, weight_gradient

Quantized = tuple[jax.Array, jax.Array]
"""e4m3 values and their float32 scales."""


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
    _check_dtypes("trained_gemm", x, w)
    return _product(x, w, None, jnp.dtype(w.dtype), with_fallback("trained_gemm", backend))


def trained_gemm_contiguous(
    x: jax.Array, w: jax.Array, tile_group: jax.Array, *, backend: Backend | None = None
) -> jax.Array:
    """Returns `x[rows of tile] @ w[tile_group[tile]].T` of e4m3 values, with gradients of e4m3 values too.

    Each expert's rows are whole tiles of 128, so that the 128 tokens of a scale in the weight gradient belong to one.

    Args:
      x: [A, K] bfloat16 or float32, rows laid out by `align_groups` in tiles of 128; padding is zero.
      w: [G, N, K] bfloat16 or float32, of one layer, not quantized: the gradient is that of these values.
      tile_group: [A/128] int32, the group of each tile, -1 for none. Rows of such tiles are undefined in the result
        and in the gradient of x; they add nothing to the gradient of w.
      backend: implementation; None selects by device.

    Returns:
      [A, N] in x's dtype; all sums are float32. The gradients have the dtypes of x and w; a group without rows has
      zeros.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also N or K that is no multiple of 16.
    """
    name = "trained_gemm_contiguous"
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(f"{name}: needs x [A, K] and w [G, N, K] with one K, got {x.shape} and {w.shape}")
    _check_dtypes(name, x, w)
    check_tiles(name, x.shape[0], tile_group, BLOCK)
    return _product(x, w, tile_group, jnp.dtype(w.dtype), with_fallback(name, backend))


def activation_tiles(x: jax.Array, backend: Backend | None) -> Quantized:
    """Returns x `[T, C]` in tiles of one token by 128 channels: values `[T, C]`, scales `[ceil(C/128), T]`."""
    return quantize_1x128(x, ue8m0=True, backend=backend)


def along_tokens(x: jax.Array, backend: Backend | None) -> jax.Array:
    """Returns x `[T, C]` rounded to e4m3 in tiles of 128 tokens by one channel, exact in bfloat16.

    The last tile may have fewer tokens.
    """
    return dequantized(activation_tiles(x.T, backend)).T


def dequantized(tiles: Quantized) -> jax.Array:
    """Returns the values of tiles with power-of-two scales, bfloat16 `[M, K]`, exactly.

    `tiles` are values `[M, K]` and scales `[ceil(K/128), M]`.
    """
    values, scale = tiles
    columns = jnp.repeat(scale.T, BLOCK, axis=1, total_repeat_length=scale.shape[0] * BLOCK)
    return (values.astype(jnp.float32) * columns[:, : values.shape[1]]).astype(jnp.bfloat16)


def _check_dtypes(name: str, x: jax.Array, w: jax.Array) -> None:
    supported = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
    if x.dtype not in supported or w.dtype not in supported:
        raise ValueError(f"{name}: x and w must be bfloat16 or float32, got {x.dtype} and {w.dtype}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(x, w, tile_group, weight_dtype, backend):
    return _forward(x, w, tile_group, weight_dtype, backend)[0]


def _forward(x, w, tile_group, weight_dtype, backend):
    tiles, blocks = activation_tiles(x, backend), quantize_128x128(w, backend=backend)
    return _multiplied(tiles, blocks, tile_group, x.dtype, backend), (tiles, blocks, tile_group)


def _backward(weight_dtype, backend, saved, dy):
    tiles, blocks, tile_group = saved
    transposed = [jnp.swapaxes(part, -1, -2) for part in blocks]
    dx = _multiplied(activation_tiles(dy, backend), transposed, tile_group, dy.dtype, backend)
    by_token = along_tokens(dy, backend), along_tokens(dequantized(tiles), backend)
    if tile_group is None:
        dw = lax.dot_general(*by_token, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    else:
        dw = weight_gradient(*by_token, tile_group, 0, BLOCK, blocks[0].shape[0])
    return dx, dw.astype(weight_dtype), None


def _multiplied(tiles, blocks, tile_group, dtype, backend):
    if tile_group is None:
        return fp8_gemm(*tiles, *blocks, out_dtype=dtype, backend=backend)
    (x, x_scale), (w, w_scale) = tiles, blocks
    how = {"tile_m": BLOCK, "out_dtype": dtype, "backend": backend}
    return fp8_grouped_gemm_contiguous(x, x_scale, w, w_scale, tile_group, **how)


_product.defvjp(_forward, _backward)
