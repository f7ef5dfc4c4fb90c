"""Grouped products with INT4 weights, whose activations stay as they are: W4A16."""

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend
from pallas_kernels.gemm.checks import check_tiles, plain_backend
from pallas_kernels.gemm.int4 import int4_contiguous
from pallas_kernels.grouped import reference
from pallas_kernels.grouped.dequantize import check_int4
from pallas_kernels.int4 import VALUES_PER_WORD

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def int4_grouped_gemm_contiguous(
    x: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    tile_group: jax.Array,
    *,
    tile_m: int,
    group_offset: jax.Array | int = 0,
    backend: Backend | None = None,
) -> jax.Array:
    """Does `grouped_gemm_contiguous` with weights of four bits, which are multiplied in the type of x.

    A weight is four bits less 8, times its scale, rounded once to x's type: the weights of the dequantized model.

    Args:
      x: [A, K] bfloat16 or float32, rows laid out by `align_groups`; K in multiples of 256.
      w: [G, N, K / 8] int32, in the order of `int4.interleave`, and w_scale: [G, K / 32, N] bfloat16.
      tile_group, tile_m, group_offset: as `grouped_gemm_contiguous`.
      backend: implementation; None chooses by device. MOSAIC has a kernel for bfloat16; all else is the reference.

    Returns:
      [A, N] in x's dtype; sums are float32.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also a `tile_m` that no kernel has.
    """
    name = "int4_grouped_gemm_contiguous"
    check_int4(name, w, w_scale)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2] * VALUES_PER_WORD:
        raise ValueError(f"{name}: needs x [A, K] and w [G, N, K/8] with one K, got {x.shape} and {w.shape}")
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name}: x must be bfloat16 or float32, got {x.dtype}")
    check_tiles(name, x.shape[0], tile_group, tile_m)
    if plain_backend(name, x.dtype, tile_m, backend) is Backend.MOSAIC:
        return int4_contiguous(x, w, w_scale, tile_group, group_offset, tile_m)
    return reference.int4_contiguous(x, w, w_scale, tile_group, group_offset, tile_m)
