"""Grouped products in jax.numpy: a loop over the tiles with rows, one expert's weight at a time.

`lax.ragged_dot` is a dense product over all groups on CPU and on CUDA; a loop reads each needed weight once and skips
empty tiles.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import invariance
from pallas_kernels.dense import plain_gemm
from pallas_kernels.fp4 import VALUES
from pallas_kernels.fp8 import reference as fp8_reference
from pallas_kernels.int4 import GROUP, OFFSET, RUN, VALUES_PER_WORD


def contiguous(
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


def fp8_contiguous(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    tile_group: jax.Array,
    group_offset: jax.Array | int,
    tile_m: int,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Multiplies block-scaled e4m3 [M, K] x [G, N, K] -> [M, N] in `out_dtype`; tiles of group -1 are zero."""

    def product(tile, group):
        w_g, w_scale_g = (lax.dynamic_index_in_dim(v, group_offset + group, 0, keepdims=False) for v in (w, w_scale))
        x_t = lax.dynamic_slice_in_dim(x, tile * tile_m, tile_m, 0)
        x_scale_t = lax.dynamic_slice_in_dim(x_scale, tile * tile_m, tile_m, 1)
        return fp8_reference.scaled_matmul(x_t, x_scale_t, w_g, w_scale_g).astype(out_dtype)

    return _fill_tiles(product, tile_group, tile_m, jnp.zeros((x.shape[0], w.shape[1]), out_dtype))


def four_bit_contiguous(
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
        weights = dequantize_four_bit(w_g, w_scale_g, x.dtype)
        if invariance.required():
            return plain_gemm(x_t, weights)
        return lax.dot_general(x_t, weights, contract, preferred_element_type=jnp.float32).astype(x.dtype)

    return _fill_tiles(product, tile_group, tile_m, jnp.zeros((x.shape[0], w.shape[1]), x.dtype))


def dequantize_four_bit(words: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns weights `[..., N, K]` in `dtype`: each value times its scale in float32, rounded once.

    The product of four bits and a bfloat16 scale is exact in float32.

    Args:
      words: [..., N, K / 8], in the order of `int4.interleave`: int32 of INT4 numbers, or uint32 of FP4 codes.
      scale: [..., K / 32, N] bfloat16.
      dtype: of the result.

    Raises ValueError if the shapes do not match.
    """
    check_four_bit("dequantize_four_bit", words, scale, words.dtype)
    *lead, width = words.shape
    runs = words.reshape(*lead, -1, 1, GROUP)
    shifts = 4 * jnp.arange(VALUES_PER_WORD, dtype=words.dtype)[:, None]
    bits = lax.shift_right_logical(runs, shifts + jnp.zeros_like(runs)) & 15  # [..., N, runs, 8, 32]
    values = jnp.asarray(VALUES)[bits] if words.dtype == jnp.uint32 else (bits - OFFSET).astype(jnp.float32)
    scales = jnp.swapaxes(scale, -1, -2).astype(jnp.float32).reshape(*lead, -1, VALUES_PER_WORD, 1)
    return (values * scales).reshape(*lead, width * VALUES_PER_WORD).astype(dtype)


def check_four_bit(name: str, words: jax.Array, scale: jax.Array, word: jax.typing.DTypeLike) -> None:
    """Raises ValueError unless `words` [..., N, K / 8] of type `word` and `scale` [..., K / 32, N] are a weight."""
    k = words.shape[-1] * VALUES_PER_WORD
    if k % RUN or scale.shape != (*words.shape[:-2], k // GROUP, words.shape[-2]):
        raise ValueError(
            f"{name}: needs words [..., N, K/8] and scales [..., K/32, N] with K in multiples of {RUN}, "
            f"got {words.shape} and {scale.shape}"
        )
    if words.dtype != word or word not in (jnp.int32, jnp.uint32) or scale.dtype != jnp.bfloat16:
        raise ValueError(
            f"{name}: needs {jnp.dtype(word).name} words and bfloat16 scales, got {words.dtype} and {scale.dtype}"
        )


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
