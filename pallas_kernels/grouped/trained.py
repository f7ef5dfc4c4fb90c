"""`trained_gemm_contiguous`: the experts of training, with e4m3 operands in all three products.

It is the grouped form of `fp8.trained_gemm`. Each expert's rows are padded to whole tiles of 128 rows, so that the 128
tokens of a scale in the weight gradient belong to one expert.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend, with_fallback
from pallas_kernels.float8 import BLOCK
from pallas_kernels.fp8.trained import (
    activation_tiles,
    along_tokens,
    check_trained,
    dequantized,
    transposed,
    weight_blocks,
)
from pallas_kernels.gemm.checks import check_tiles
from pallas_kernels.grouped import reference
from pallas_kernels.grouped.contiguous import fp8_grouped_gemm_contiguous


def trained_gemm_contiguous(
    x: jax.Array, w: jax.Array, tile_group: jax.Array, *, backend: Backend | None = None
) -> jax.Array:
    """Returns `x[rows of tile] @ w[tile_group[tile]].T` of e4m3 values, with gradients of e4m3 values too.

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
    check_trained(name, x, w)
    check_tiles(name, x.shape[0], tile_group, BLOCK)
    return _product(x, w, tile_group, jnp.dtype(w.dtype), with_fallback("trained_gemm_contiguous", backend))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(x, w, tile_group, weight_dtype, backend):
    return _forward(x, w, tile_group, weight_dtype, backend)[0]


def _forward(x, w, tile_group, weight_dtype, backend):
    tiles, blocks = activation_tiles(x, backend), weight_blocks(w, backend)
    return _multiplied(tiles, blocks, tile_group, x.dtype, backend), (tiles, blocks, tile_group)


def _backward(weight_dtype, backend, saved, dy):
    tiles, blocks, tile_group = saved
    dx = _multiplied(activation_tiles(dy, backend), transposed(blocks), tile_group, dy.dtype, backend)
    by_token = along_tokens(dy, backend), along_tokens(dequantized(tiles), backend)
    dw = reference.weight_gradient(*by_token, tile_group, 0, BLOCK, blocks[0].shape[0])
    return dx, dw.astype(weight_dtype), None


def _multiplied(tiles, blocks, tile_group, dtype, backend):
    (x, x_scale), (w, w_scale) = tiles, blocks
    return fp8_grouped_gemm_contiguous(
        x, x_scale, w, w_scale, tile_group, tile_m=BLOCK, out_dtype=dtype, backend=backend
    )


_product.defvjp(_forward, _backward)
