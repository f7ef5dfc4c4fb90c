"""The paged latent cache: page size, row layouts, and FP8 pages of 656 bytes per token.

A page holds 64 tokens of one layer. A row is `R` values of the normed latent followed by `P` values of the rotated key
(RoPE pairs interleaved), in float32, bfloat16 or float16. An FP8 row is bytes (uint8) in FlashMLA's layout for
DeepSeek-V3.2: `R` e4m3 values, one float32 scale per 128 of them, then the `P` rotated values in bfloat16.

Within an FP8 page the bytes of its 64 rows are reordered: tile after tile of values `[R / 128, 64, 128]`, then scales
`[R / 128, 64]`, then rotated keys `[64, P]`. TMA fetches swizzled tiles only at multiples of their size, and 656 is no
multiple of anything large.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.float8 import AMAX_FLOOR, BLOCK, E4M3, E4M3_MAX

PAGE_SIZE = 64
"""Tokens in a page."""

FP8_TILE = BLOCK
"""Latent values that share one scale in the FP8 row."""

LISTED_WIDTH = 512
"""Values of a row of DeepSeek-V4, which queries list."""

LISTED_PLAIN, LISTED_BYTES = 448, 584
"""Values of such a row in e4m3 and its bytes, if it is an FP8 row (`pallas_kernels/entries.py`)."""

FLOAT_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
HALF_DTYPES = FLOAT_DTYPES[1:]
FP8_PAGES_DTYPE = jnp.dtype(jnp.uint8)
_SCALE_FLOOR = AMAX_FLOOR / E4M3_MAX  # a tile of zeros gets this scale, not 0 / 0
_MOST_SCALE = 128.0  # times 448 it fits in float16, in which sm_90's kernel multiplies


def fp8_tiles(value_width: int) -> int:
    """Counts the scales in an FP8 row: one per 128 latent values, the last tile may be shorter."""
    return -(-value_width // FP8_TILE)


def fp8_row_bytes(value_width: int, rope_width: int) -> int:
    """Returns the bytes of an FP8 row: 656 for `R` 512 and `P` 64."""
    return value_width + 4 * fp8_tiles(value_width) + 2 * rope_width


def is_fp8(pages: jax.Array) -> bool:
    """Returns True for a pool of FP8 rows (uint8)."""
    return pages.dtype == FP8_PAGES_DTYPE


def pack_fp8(latents: jax.Array, value_width: int) -> jax.Array:
    """Quantizes rows `[..., R + P]` of a float type to FP8 rows `[..., fp8_row_bytes(R, P)]` uint8.

    Each tile of 128 latent values is divided by a power of two, the smallest that brings its largest magnitude to
    448 or below (FlashMLA's rule: the product with the scale is then exact). e4m3 keeps 3 mantissa bits, so a value
    of at least 2^-6 scales is off by at most 1/16 of itself. Magnitudes beyond 57,344 become 57,344. Rotated keys are
    rounded to bfloat16.
    """
    lead, tiles = latents.shape[:-1], fp8_tiles(value_width)
    values = latents[..., :value_width].astype(jnp.float32)
    padded = jnp.pad(values, [(0, 0)] * len(lead) + [(0, tiles * FP8_TILE - value_width)])
    tiled = padded.reshape(*lead, tiles, FP8_TILE)
    scale = _power_of_two_at_least(jnp.maximum(jnp.abs(tiled).max(-1) / E4M3_MAX, _SCALE_FLOOR))
    scale = jnp.minimum(scale, _MOST_SCALE)
    quantized = (
        jnp.clip(tiled / scale[..., None], -E4M3_MAX, E4M3_MAX).astype(E4M3).reshape(*lead, -1)[..., :value_width]
    )
    rope = latents[..., value_width:].astype(jnp.bfloat16)
    return jnp.concatenate([_bytes(quantized), _bytes(scale), _bytes(rope)], axis=-1)


def unpack_fp8(rows: jax.Array, value_width: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Dequantizes rows `[..., fp8_row_bytes(R, P)]` uint8 to `[..., R + P]` of `dtype`."""
    lead, tiles = rows.shape[:-1], fp8_tiles(value_width)
    values = lax.bitcast_convert_type(rows[..., :value_width], E4M3).astype(jnp.float32)
    scale = _from_bytes(rows[..., value_width : value_width + 4 * tiles], jnp.float32)
    rope = _from_bytes(rows[..., value_width + 4 * tiles :], jnp.bfloat16)
    scales = jnp.broadcast_to(scale[..., None], (*lead, tiles, FP8_TILE)).reshape(*lead, -1)[..., :value_width]
    return jnp.concatenate([(values * scales).astype(dtype), rope.astype(dtype)], axis=-1)


def fp8_rows_of_pages(pages: jax.Array, value_width: int) -> jax.Array:
    """Returns the rows `[..., 64, W]` of FP8 pages `[..., 64, W]`: every page's bytes in the order of its tokens."""
    lead, (tokens, row_bytes), tiles = pages.shape[:-2], pages.shape[-2:], fp8_tiles(value_width)
    flat = pages.reshape(*lead, tokens * row_bytes)
    values, scales = tokens * value_width, tokens * 4 * tiles
    parts = (
        flat[..., :values].reshape(*lead, tiles, tokens, -1).swapaxes(-2, -3),
        flat[..., values : values + scales].reshape(*lead, tiles, tokens, 4).swapaxes(-2, -3),
        flat[..., values + scales :].reshape(*lead, tokens, -1),
    )
    return jnp.concatenate([part.reshape(*lead, tokens, -1) for part in parts], axis=-1)


def fp8_pages_of_rows(rows: jax.Array, value_width: int) -> jax.Array:
    """Inverts `fp8_rows_of_pages`."""
    order = fp8_page_bytes(value_width, rows.shape[-1]).reshape(-1)
    flat = rows.reshape(*rows.shape[:-2], -1)
    return jnp.zeros_like(flat).at[..., order].set(flat).reshape(rows.shape)


@functools.cache
def fp8_page_bytes(value_width: int, row_bytes: int) -> np.ndarray:
    """Returns the position in its page of each byte of a row, `[64, row_bytes]`."""
    places = np.arange(PAGE_SIZE * row_bytes, dtype=np.int32).reshape(PAGE_SIZE, row_bytes)
    with jax.ensure_compile_time_eval():
        return np.asarray(fp8_rows_of_pages(jnp.asarray(places), value_width))


def _power_of_two_at_least(x: jax.Array) -> jax.Array:
    mantissa, exponent = jnp.frexp(x)  # mantissa in [0.5, 1): 0.5 is a power of two already
    return jnp.ldexp(jnp.float32(1), jnp.where(mantissa == 0.5, exponent - 1, exponent))


def _bytes(x: jax.Array) -> jax.Array:
    raw = lax.bitcast_convert_type(x, jnp.uint8)
    return raw if x.dtype.itemsize == 1 else raw.reshape(*x.shape[:-1], -1)


def _from_bytes(raw: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    itemsize = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(raw.reshape(*raw.shape[:-1], -1, itemsize), dtype)
