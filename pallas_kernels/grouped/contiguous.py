"""Grouped products of rows sorted by expert, each expert's rows padded to whole tiles."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.backend import Backend, resolve_backend, with_fallback
from pallas_kernels.gemm import KERNELS, triton_dispatch
from pallas_kernels.gemm.checks import check_fp8, check_plain, check_tiles, plain_backend
from pallas_kernels.gemm.fp4 import Fp4Kernel
from pallas_kernels.gemm.int4 import Int4Kernel, four_bit_contiguous
from pallas_kernels.grouped import reference
from pallas_kernels.int4 import VALUES_PER_WORD

_FOUR_BIT_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def grouped_gemm_contiguous(
    x: jax.Array,
    w: jax.Array,
    tile_group: jax.Array,
    *,
    tile_m: int,
    group_offset: jax.Array | int = 0,
    backend: Backend | None = None,
) -> jax.Array:
    """Returns `x[rows of tile] @ w[group_offset + tile_group[tile]].T` for every tile; differentiable in x and w.

    The gradients are computed by the reference on every backend.

    Args:
      x: [A, K] bfloat16, float16 or float32, rows laid out by `align_groups`.
      w: [G, N, K] of the same dtype; a stack of layers is [layers * experts, N, K].
      tile_group: [A/tile_m] int32, the group of each tile. -1 skips a tile: its weight is not read, and its output
        rows are not written on Hopper (zero in the reference).
      tile_m: rows of a tile; on Hopper 8, 16, 32, 64 or 128 (see `choose_tile_m`).
      group_offset: Python or traced integer that is added to every group: `layer * experts` for a stack.
      backend: implementation; None selects by device.

    Returns:
      [A, N] in x's dtype; sums are float32.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also a `tile_m` that no kernel has.
    """
    check_plain("grouped_gemm_contiguous", x, w, 2)
    check_tiles("grouped_gemm_contiguous", x.shape[0], tile_group, tile_m)
    chosen = plain_backend("grouped_gemm_contiguous", x.dtype, tile_m, backend)
    return _contiguous(x, w, tile_group, jnp.asarray(group_offset, jnp.int32), tile_m, chosen)


def fp8_grouped_gemm_contiguous(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    tile_group: jax.Array,
    *,
    tile_m: int,
    group_offset: jax.Array | int = 0,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: Backend | None = None,
) -> jax.Array:
    """Computes `grouped_gemm_contiguous` of block-scaled e4m3 (DeepGEMM's `m_grouped_fp8_gemm_nt_contiguous`).

    Args:
      x: [A, K] e4m3, and x_scale: [ceil(K/128), A] float32, both from `quantize_1x128`.
      w: [G, N, K] e4m3, and w_scale: [G, ceil(N/128), ceil(K/128)] float32.
      tile_group, tile_m, group_offset, backend: as `grouped_gemm_contiguous`.
      out_dtype: bfloat16 or float32; on Hopper float32 needs tiles of 128 rows.

    Returns:
      [A, N] in `out_dtype`.

    Raises:
      ValueError: shapes or dtypes that do not belong together.
    """
    name = "fp8_grouped_gemm_contiguous"
    check_fp8(name, x, x_scale, w, w_scale, 2)
    check_tiles(name, x.shape[0], tile_group, tile_m)
    chosen = resolve_backend(requested=with_fallback(name, backend))
    if chosen is Backend.NATIVE and native.takes(x.dtype, tile_m):
        return native.fp8_grouped_product(x, x_scale, w, w_scale, tile_group, group_offset, out_dtype)
    if chosen in KERNELS:
        return KERNELS[chosen].contiguous(x, x_scale, w, w_scale, tile_group, group_offset, tile_m, out_dtype)
    return reference.fp8_contiguous(x, x_scale, w, w_scale, tile_group, group_offset, tile_m, out_dtype)


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
    """Computes `grouped_gemm_contiguous` with INT4 weights, multiplied in the type of x.

    A weight is its four bits minus 8, times its scale, rounded once to x's type: the weights of the dequantized model.

    Args:
      x: [A, K] bfloat16 or float32, rows laid out by `align_groups`; K in multiples of 256.
      w: [G, N, K / 8] int32, in the order of `int4.interleave`, and w_scale: [G, K / 32, N] bfloat16.
      tile_group, tile_m, group_offset: as `grouped_gemm_contiguous`.
      backend: implementation; None selects by device. MOSAIC and TRITON have kernels for bfloat16.

    Returns:
      [A, N] in x's dtype; sums are float32.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also a `tile_m` that no kernel has.
    """
    operands = x, w, w_scale, tile_group, group_offset, tile_m
    return _four_bit("int4_grouped_gemm_contiguous", jnp.int32, Int4Kernel, operands, backend)


def fp4_grouped_gemm_contiguous(
    x: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    tile_group: jax.Array,
    *,
    tile_m: int,
    group_offset: jax.Array | int = 0,
    backend: Backend | None = None,
) -> jax.Array:
    """Computes `int4_grouped_gemm_contiguous` with FP4 weights: e2m1 codes in words uint32, and scales powers of two.

    Products of code and scale are exact in x's type, and x is not rounded.
    """
    operands = x, w, w_scale, tile_group, group_offset, tile_m
    return _four_bit("fp4_grouped_gemm_contiguous", jnp.uint32, Fp4Kernel, operands, backend)


def _four_bit(
    name: str,
    word: jax.typing.DTypeLike,
    kernel: type[Int4Kernel],
    operands: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | int, int],
    backend: Backend | None,
) -> jax.Array:
    """Computes product `name` with weights in words of type `word`; `operands` are those of `four_bit_contiguous`."""
    x, w, w_scale, tile_group, _, tile_m = operands
    reference.check_four_bit(name, w, w_scale, word)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2] * VALUES_PER_WORD:
        raise ValueError(f"{name}: needs x [A, K] and w [G, N, K/8] with one K, got {x.shape} and {w.shape}")
    if x.dtype not in _FOUR_BIT_DTYPES:
        raise ValueError(f"{name}: x must be bfloat16 or float32, got {x.dtype}")
    check_tiles(name, x.shape[0], tile_group, tile_m)
    chosen = plain_backend(name, x.dtype, tile_m, backend)
    if chosen is Backend.MOSAIC:
        return four_bit_contiguous(*operands, kernel_class=kernel)
    if chosen is Backend.TRITON:
        return triton_dispatch.four_bit_contiguous(*operands)
    return reference.four_bit_contiguous(*operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _contiguous(x, w, tile_group, group_offset, tile_m, backend):
    if backend is Backend.NATIVE:
        return native.grouped_product(x, w, tile_group, group_offset)
    if backend in KERNELS:
        return KERNELS[backend].contiguous(x, None, w, None, tile_group, group_offset, tile_m, x.dtype)
    return reference.contiguous(x, w, tile_group, group_offset, tile_m)


def _contiguous_forward(x, w, tile_group, group_offset, tile_m, backend):
    return _contiguous(x, w, tile_group, group_offset, tile_m, backend), (x, w, tile_group, group_offset)


def _contiguous_backward(tile_m, backend, saved, dy):
    del backend  # gradients are the reference's
    x, w, tile_group, group_offset = saved
    dx = reference.contiguous(dy, w, tile_group, group_offset, tile_m, transposed=True)
    dw = reference.weight_gradient(dy, x, tile_group, group_offset, tile_m, w.shape[0])
    return dx, dw.astype(w.dtype), None, None


_contiguous.defvjp(_contiguous_forward, _contiguous_backward)
