"""Pages of index keys: one key of width Y per token and layer, beside the page of latents.

Keys are in the type of the latents, or FP8: `Y` e4m3 values and a float32 scale per 128 of them, 132 bytes for an Y of
128. An FP8 page has values first, 32 columns of its 64 tokens after the other, and then scales. Its 8,448 bytes are 33
times 256: TMA can fetch swizzled tiles of 8 rows and 32 columns, and no larger ones.

FP8 keys, and their queries, are rotated by an orthonormal Hadamard matrix before rounding: products stay, and large
values are spread over all channels, which reduces the error of rounding. Queries are rounded like keys, so that tensor
cores multiply e4m3 with e4m3 (as in DeepSeek's inference code).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import invariance
from pallas_kernels.dense import plain_gemm
from pallas_kernels.float8 import E4M3
from pallas_kernels.mla.layout import (
    FP8_PAGES_DTYPE,
    PAGE_SIZE,
    fp8_row_bytes,
    is_fp8,
    pack_fp8,
    unpack_fp8,
)
from pallas_kernels.mla.write import DROPPED, write_bytes, write_rows


def key_row(head_dim: int, dtype: jax.typing.DTypeLike | None) -> tuple[int, jnp.dtype]:
    """Returns width and type of a row of key pages: of a float `dtype`, or FP8 rows for None."""
    return (fp8_row_bytes(head_dim, 0), FP8_PAGES_DTYPE) if dtype is None else (head_dim, jnp.dtype(dtype))


def write_keys(
    pool: jax.Array,
    keys: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    layer: jax.Array | int,
    pages_per_layer: int,
) -> jax.Array:
    """Writes the index keys of new tokens into their pages; in place where the caller donates `pool`.

    Args:
      pool: `[layers * pages_per_layer, 64, Y]` of a float type, or FP8 pages, uint8 `[.., 64, fp8_row_bytes(Y, 0)]`.
      keys: `[T, Y]` of a float type, rotated.
      page_ids: `[T]` int32, page within the layer; keys of pages below 0 are dropped.
      offsets: `[T]` int32, row within the page, 0..63.
      layer: number of the layer in the pool, static or traced.
      pages_per_layer: pages that the pool holds for one layer.

    Raises:
      ValueError: the pool has no rows for keys of this width.
    """
    check_keys(pool, keys.shape[-1])
    targets = jnp.where(page_ids >= 0, layer * pages_per_layer + page_ids, DROPPED)
    if is_fp8(pool):
        width = keys.shape[-1]
        return write_bytes(pool, pack_fp8(_rotated(keys), width), targets, offsets, _fp8_page_bytes(width))
    return write_rows(pool, keys.astype(pool.dtype), targets, offsets)


def check_keys(pool: jax.Array, width: int) -> None:
    """Raises ValueError unless the rows of `pool` are keys of this width."""
    expected = key_row(width, None if is_fp8(pool) else pool.dtype)[0]
    if pool.ndim != 3 or pool.shape[1:] != (PAGE_SIZE, expected):
        raise ValueError(
            f"pages of index keys must be [.., {PAGE_SIZE}, {expected}] for a width of {width}, not {pool.shape}"
        )


def queries_for(pool: jax.Array, q: jax.Array) -> jax.Array:
    """Returns the index queries `[..., Y]` for the keys of `pool`: rotated and rounded if those are."""
    return unpack_fp8(pack_fp8(_rotated(q), q.shape[-1]), q.shape[-1], q.dtype) if is_fp8(pool) else q


def fp8_queries(q: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns e4m3 queries for FP8 keys, and the heads' `weights` `[T, Hi]` times the queries' scales.

    Queries are `[T, Y / chunk * Hi, chunk]`, in the chunks of the pages. Y is at most 128: a query has one scale.
    """
    T, heads, width = q.shape
    packed, chunk = pack_fp8(_rotated(q), width), fp8_chunk(width)
    scales = lax.bitcast_convert_type(packed[..., width:], jnp.float32)
    values = lax.bitcast_convert_type(packed[..., :width], E4M3).reshape(T, heads, -1, chunk)
    return values.swapaxes(1, 2).reshape(T, -1, chunk), weights * scales


def fp8_views(pool: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Views FP8 pages of keys as e4m3 `[pages, n, chunk]` and as float32 `[pages, m]`; XLA copies nothing.

    The first `64 * Y / chunk` rows of e4m3 of a page are its keys, its last 64 floats their scales.
    """
    count, floats = len(pool), lax.bitcast_convert_type(pool.reshape(len(pool), -1, 4), jnp.float32)
    return lax.bitcast_convert_type(pool, E4M3).reshape(count, -1, fp8_chunk(width)), floats


def fp8_chunk(width: int) -> int:
    """Returns the columns of a chunk of an FP8 page."""
    return 32 if width % 32 == 0 else width


@functools.cache
def _fp8_page_bytes(width: int) -> np.ndarray:
    """Returns the position in its page of each byte of an FP8 row, `[64, W]`: chunks of columns, then scales."""
    row_bytes = fp8_row_bytes(width, 0)
    values = np.arange(PAGE_SIZE * width).reshape(-1, PAGE_SIZE, fp8_chunk(width)).swapaxes(0, 1)
    scales = np.arange(PAGE_SIZE * width, PAGE_SIZE * row_bytes).reshape(-1, PAGE_SIZE, 4).swapaxes(0, 1)
    return np.concatenate([part.reshape(PAGE_SIZE, -1) for part in (values, scales)], axis=1).astype(np.int32)


def keys_of_pages(pool: jax.Array, ids: jax.Array, width: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the keys `[..., 64, Y]` in `dtype` on pages `ids` `[...]` of the pool; undefined for ids out of range."""
    rows = pool.at[ids].get(mode="clip")
    if is_fp8(pool):
        flat = rows.reshape(*rows.shape[:-2], rows.shape[-2] * rows.shape[-1])
        return unpack_fp8(flat[..., jnp.asarray(_fp8_page_bytes(width))], width, dtype)
    return rows.astype(dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """Multiplies the last axis of x by the Hadamard matrix if its width is a power of two; else returns x."""
    width = x.shape[-1]
    if width & (width - 1):
        return x
    if invariance.required():  # signs are exact in any type, so that the kernels take x as it is
        signs = jnp.asarray(np.sign(_hadamard(width)), x.dtype)
        return (plain_gemm(x, signs, out_dtype=jnp.float32) * np.float32(width**-0.5)).astype(x.dtype)
    product = jnp.einsum("...i,ij->...j", x.astype(jnp.float32), _hadamard(width), precision=lax.Precision.HIGHEST)
    return product.astype(x.dtype)


@functools.cache
def _hadamard(width: int) -> np.ndarray:
    """Returns the orthonormal Hadamard matrix `[width, width]` float32; it is symmetric, and its own inverse."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(width**0.5)
