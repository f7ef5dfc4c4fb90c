"""Grouped products of rows sorted by expert, each expert's rows padded to whole tiles (`align_groups`)."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import fp4, invariance, native
from pallas_kernels.align import GroupAlignment as GroupAlignment
from pallas_kernels.align import align_groups as align_groups
from pallas_kernels.align import aligned_rows as aligned_rows
from pallas_kernels.align import choose_tile_m as choose_tile_m
from pallas_kernels.backend import Backend, resolve_operation, with_fallback
from pallas_kernels.dense import plain_gemm
from pallas_kernels.float8 import BLOCK, E4M3
from pallas_kernels.fp8 import scaled_matmul, trained_product
from pallas_kernels.gemm import KERNELS, triton_dispatch
from pallas_kernels.gemm.checks import check_fp8, check_plain, check_tiles, plain_backend
from pallas_kernels.gemm.fp4 import fp4_contiguous
from pallas_kernels.gemm.int4 import int4_contiguous
from pallas_kernels.int4 import GROUP, OFFSET, RUN, VALUES_PER_WORD

_INT4_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


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
    chosen = resolve_operation(name, backend)
    if chosen is Backend.NATIVE and native.takes(x.dtype, tile_m):
        return native.fp8_grouped_product(x, x_scale, w, w_scale, tile_group, group_offset, out_dtype)
    if chosen in KERNELS:
        return KERNELS[chosen].contiguous(x, x_scale, w, w_scale, tile_group, group_offset, tile_m, out_dtype)
    return _scaled_reference(x, x_scale, (w,), w_scale, tile_group, group_offset, tile_m, out_dtype)


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
    name = "int4_grouped_gemm_contiguous"
    check_int4(name, w, w_scale)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2] * VALUES_PER_WORD:
        raise ValueError(f"{name}: needs x [A, K] and w [G, N, K/8] with one K, got {x.shape} and {w.shape}")
    if x.dtype not in _INT4_DTYPES:
        raise ValueError(f"{name}: x must be bfloat16 or float32, got {x.dtype}")
    check_tiles(name, x.shape[0], tile_group, tile_m)
    chosen = plain_backend(name, x.dtype, tile_m, backend)
    operands = x, w, w_scale, tile_group, group_offset
    if chosen is Backend.MOSAIC:
        return int4_contiguous(*operands, tile_m)
    if chosen is Backend.NATIVE:
        return native.int4_grouped_product(*operands)
    if chosen is Backend.TRITON:
        return triton_dispatch.int4_contiguous(*operands, tile_m)
    return _int4_reference(*operands, tile_m)


def fp4_grouped_gemm_contiguous(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_powers: jax.Array,
    w_scale: jax.Array,
    tile_group: jax.Array,
    *,
    tile_m: int,
    group_offset: jax.Array | int = 0,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: Backend | None = None,
) -> jax.Array:
    """Computes `fp8_grouped_gemm_contiguous` with FP4 weights, whose codes become e4m3 values, exactly.

    Args:
      x, x_scale, tile_group, tile_m, group_offset, out_dtype, backend: as `fp8_grouped_gemm_contiguous`; on Hopper
        the result has 16 bits.
      w: [G, N, K / 8] uint32, w_powers: [G, K / 128, N] uint32, in the order of `pallas_kernels.fp4`; 128 divides K.
      w_scale: [G, ceil(N/128), K/128] float32.

    Returns:
      [A, N] in `out_dtype`.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also a `tile_m` that no kernel has.
    """
    name = "fp4_grouped_gemm_contiguous"
    fp4.check_weight(name, w, w_powers, w_scale)
    values = jax.ShapeDtypeStruct((*w.shape[:-1], w.shape[-1] * fp4.VALUES_PER_WORD), E4M3)
    check_fp8(name, x, x_scale, values, w_scale, 2)
    check_tiles(name, x.shape[0], tile_group, tile_m)
    chosen = resolve_operation(name, backend)
    operands = x, x_scale, w, w_powers, w_scale, tile_group, group_offset
    if chosen is Backend.MOSAIC:
        return fp4_contiguous(*operands, tile_m, out_dtype)
    if chosen is Backend.NATIVE and native.takes(x.dtype, tile_m):
        return native.fp4_grouped_product(*operands, out_dtype)
    if chosen is Backend.TRITON:
        return triton_dispatch.fp4_contiguous(*operands, tile_m, out_dtype)
    return _scaled_reference(x, x_scale, (w, w_powers), w_scale, tile_group, group_offset, tile_m, out_dtype)


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
    check_tiles(name, x.shape[0], tile_group, BLOCK)
    backend = with_fallback(name, backend)
    return trained_product(name, x, w, tile_group, _trained_contiguous, _trained_gradient, backend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _contiguous(x, w, tile_group, group_offset, tile_m, backend):
    if backend is Backend.NATIVE:
        return native.grouped_product(x, w, tile_group, group_offset)
    if backend in KERNELS:
        return KERNELS[backend].contiguous(x, None, w, None, tile_group, group_offset, tile_m, x.dtype)
    return _reference(x, w, tile_group, group_offset, tile_m)


def _contiguous_forward(x, w, tile_group, group_offset, tile_m, backend):
    return _contiguous(x, w, tile_group, group_offset, tile_m, backend), (x, w, tile_group, group_offset)


def _contiguous_backward(tile_m, backend, saved, dy):
    del backend  # gradients are the reference's
    x, w, tile_group, group_offset = saved
    dx = _reference(dy, w, tile_group, group_offset, tile_m, transposed=True)
    dw = weight_gradient(dy, x, tile_group, group_offset, tile_m, w.shape[0])
    return dx, dw.astype(w.dtype), None, None


_contiguous.defvjp(_contiguous_forward, _contiguous_backward)


def _reference(
    x: jax.Array, w: jax.Array, tile_group: jax.Array, group_offset: jax.Array | int, tile_m: int, *, transposed=False
) -> jax.Array:
    """Multiplies [M, K] x [G, N, K] -> [M, N] in x's dtype, float32 sums; tiles of group -1 are zero.

    With `transposed`, w is [G, K, N].
    """

    def product(tile, group):
        w_g = lax.dynamic_index_in_dim(w, group_offset + group, 0, keepdims=False)
        x_t = lax.dynamic_slice_in_dim(x, tile * tile_m, tile_m, 0)
        contract = (((1,), (0 if transposed else 1,)), ((), ()))
        return lax.dot_general(x_t, w_g, contract, preferred_element_type=jnp.float32).astype(x.dtype)

    n = w.shape[2] if transposed else w.shape[1]
    return _fill_tiles(product, tile_group, tile_m, jnp.zeros((x.shape[0], n), x.dtype))


def _scaled_reference(
    x: jax.Array,
    x_scale: jax.Array,
    w: tuple[jax.Array, ...],
    w_scale: jax.Array,
    tile_group: jax.Array,
    group_offset: jax.Array | int,
    tile_m: int,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Multiplies block-scaled e4m3 [M, K] x [G, N, K] -> [M, N] in `out_dtype`; tiles of group -1 are zero.

    w is e4m3, or words and powers of FP4.
    """

    def product(tile, group):
        *w_g, w_scale_g = (lax.dynamic_index_in_dim(v, group_offset + group, 0, keepdims=False) for v in (*w, w_scale))
        x_t = lax.dynamic_slice_in_dim(x, tile * tile_m, tile_m, 0)
        x_scale_t = lax.dynamic_slice_in_dim(x_scale, tile * tile_m, tile_m, 1)
        values = fp4.to_e4m3(*w_g) if len(w_g) > 1 else w_g[0]
        return scaled_matmul(x_t, x_scale_t, values, w_scale_g).astype(out_dtype)

    return _fill_tiles(product, tile_group, tile_m, jnp.zeros((x.shape[0], w[0].shape[1]), out_dtype))


def _int4_reference(
    x: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    tile_group: jax.Array,
    group_offset: jax.Array | int,
    tile_m: int,
) -> jax.Array:
    """Multiplies [M, K] x words [G, N, K / 8] -> [M, N] in x's dtype, float32 sums; tiles of group -1 are zero."""

    def product(tile, group):
        w_g, w_scale_g = (lax.dynamic_index_in_dim(v, group_offset + group, 0, keepdims=False) for v in (w, w_scale))
        x_t = lax.dynamic_slice_in_dim(x, tile * tile_m, tile_m, 0)
        contract = (((1,), (1,)), ((), ()))
        weights = dequantize_int4(w_g, w_scale_g, x.dtype)
        if invariance.required():
            return plain_gemm(x_t, weights)
        return lax.dot_general(x_t, weights, contract, preferred_element_type=jnp.float32).astype(x.dtype)

    return _fill_tiles(product, tile_group, tile_m, jnp.zeros((x.shape[0], w.shape[1]), x.dtype))


def dequantize_int4(words: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns weights `[..., N, K]` in `dtype`: each value times its scale in float32, rounded once.

    The product of four bits and a bfloat16 scale is exact in float32.

    Args:
      words: [..., N, K / 8] int32, in the order of `int4.interleave`.
      scale: [..., K / 32, N] bfloat16.
      dtype: of the result.

    Raises ValueError if the shapes do not match.
    """
    check_int4("dequantize_int4", words, scale)
    *lead, width = words.shape
    runs = words.reshape(*lead, -1, 1, GROUP)
    shifts = 4 * jnp.arange(VALUES_PER_WORD, dtype=words.dtype)[:, None]
    bits = lax.shift_right_logical(runs, shifts + jnp.zeros_like(runs)) & 15  # [..., N, runs, 8, 32]
    scales = jnp.swapaxes(scale, -1, -2).astype(jnp.float32).reshape(*lead, -1, VALUES_PER_WORD, 1)
    return ((bits - OFFSET).astype(jnp.float32) * scales).reshape(*lead, width * VALUES_PER_WORD).astype(dtype)


def check_int4(name: str, words: jax.Array, scale: jax.Array) -> None:
    """Raises ValueError unless `words` [..., N, K / 8] and `scale` [..., K / 32, N] are an INT4 weight."""
    k = words.shape[-1] * VALUES_PER_WORD
    if k % RUN or scale.shape != (*words.shape[:-2], k // GROUP, words.shape[-2]):
        raise ValueError(
            f"{name}: needs words [..., N, K/8] and scales [..., K/32, N] with K in multiples of {RUN}, "
            f"got {words.shape} and {scale.shape}"
        )
    if words.dtype != jnp.int32 or scale.dtype != jnp.bfloat16:
        raise ValueError(f"{name}: needs int32 words and bfloat16 scales, got {words.dtype} and {scale.dtype}")


def weight_gradient(
    dy: jax.Array, x: jax.Array, tile_group: jax.Array, group_offset: jax.Array | int, tile_m: int, num_groups: int
) -> jax.Array:
    """Sums dy^T x over each group's rows: [M, N], [M, K] -> [num_groups, N, K] float32 (k-grouped product)."""

    def add(tile, group, acc):
        dy_t, x_t = (lax.dynamic_slice_in_dim(v, tile * tile_m, tile_m, 0) for v in (dy, x))
        part = lax.dot_general(dy_t, x_t, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return acc.at[group_offset + group].add(part)

    return _for_each_tile(add, tile_group, jnp.zeros((num_groups, dy.shape[1], x.shape[1]), jnp.float32))


def _fill_tiles(product: Callable, tile_group: jax.Array, tile_m: int, out: jax.Array) -> jax.Array:
    """Returns `out` with `product(tile, group)` written over the rows of every tile that has a group."""

    def write(tile, group, acc):
        return lax.dynamic_update_slice_in_dim(acc, product(tile, group), tile * tile_m, 0)

    return _for_each_tile(write, tile_group, out)


def _for_each_tile(step: Callable, tile_group: jax.Array, init: jax.Array) -> jax.Array:
    """Folds `step(tile, group, acc)` over the tiles whose group is not -1; the trip count is their number."""
    tiles = jnp.argsort(tile_group < 0, stable=True)
    used = jnp.sum(tile_group >= 0)
    return lax.fori_loop(0, used, lambda i, acc: step(tiles[i], tile_group[tiles[i]], acc), init)


def _trained_contiguous(tiles, blocks, tile_group, dtype, backend):
    (x, x_scale), (w, w_scale) = tiles, blocks
    how = {"tile_m": BLOCK, "out_dtype": dtype, "backend": backend}
    return fp8_grouped_gemm_contiguous(x, x_scale, w, w_scale, tile_group, **how)


def _trained_gradient(dy, x, tile_group, w):
    return weight_gradient(dy, x, tile_group, 0, BLOCK, w.shape[0])
