"""Rows of latents and compressed entries as the cache has them (DeepSeek-V4): of a float type, or FP8.

An FP8 row of R values and P rotated ones is bytes: R of e4m3, P bfloat16, then an e8m0 scale per 64 of the R, padded to
whole 8 bytes. It takes 584 for R 448 and P 64, in the order that FlashMLA has in its rows, which puts the scales of all
rows of a page at the page's end. The model was trained with this rounding (DeepSeek's `act_quant`).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend, has_jax_triton, resolve_backend, with_fallback
from pallas_kernels.dsa.triton_ops import traced_for
from pallas_kernels.float8 import AMAX_FLOOR, E4M3, E4M3_MAX
from pallas_kernels.triton import call

_GROUP = 64  # values that share a scale
_BIAS = 127  # exponent of an e8m0 byte 0, negated


def encode_rows(
    rows: jax.Array, plain: int, dtype: jax.typing.DTypeLike, *, backend: Backend | None = None
) -> jax.Array:
    """Returns `rows` `[..., R + P]`, of which `plain` R are not rotated, as a cache of `dtype` has them.

    For uint8 they are FP8 rows, of R + 8 * ceil(R / 512) + 2 * P bytes. A GPU makes those of `[T, R + P]` in one Triton
    kernel, if R and P are whole groups of 64 values and their sum is a power of two.
    """
    if jnp.dtype(dtype) != jnp.uint8:
        return rows.astype(dtype)
    chosen, width = resolve_backend(requested=with_fallback("encode_rows", backend)), rows.shape[-1]
    fits = rows.ndim == 2 and rows.size > 0 and plain % _GROUP == width % _GROUP == 0 and width & (width - 1) == 0
    if fits and chosen in (Backend.MOSAIC, Backend.TRITON) and has_jax_triton():
        return _encode_kernel(rows, plain, chosen)
    return _encode(rows, plain)


def _encode_kernel(rows: jax.Array, plain: int, backend: Backend) -> jax.Array:
    (T, width), scales = rows.shape, 8 * -(-plain // (8 * _GROUP))
    row_bytes = plain + 2 * (width - plain) + scales
    with traced_for(backend):
        (encoded,) = call.start(
            "entries.encode",
            (rows,),
            [jax.ShapeDtypeStruct((T, row_bytes), jnp.uint8)],
            grid=(T,),
            warps=1,
            D=width,
            PLAIN=plain,
            WIDTH=row_bytes,
            FLOOR=AMAX_FLOOR,
        )
    return encoded


def _encode(rows: jax.Array, plain: int) -> jax.Array:
    scales, padded = -(-plain // _GROUP), 8 * -(-plain // (8 * _GROUP))
    values = _widened(rows[..., :plain].astype(jnp.float32), scales * _GROUP)
    grouped = values.reshape(*values.shape[:-1], scales, _GROUP)
    mantissa, exponent = jnp.frexp(jnp.maximum(jnp.abs(grouped).max(-1), AMAX_FLOOR) / E4M3_MAX)
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)  # the power of two at or above it
    scaled = jnp.clip(jnp.ldexp(grouped, -exponent[..., None]), -E4M3_MAX, E4M3_MAX).astype(E4M3)
    rotated = lax.bitcast_convert_type(rows[..., plain:].astype(jnp.bfloat16), jnp.uint8)
    parts = (
        lax.bitcast_convert_type(scaled, jnp.uint8).reshape(values.shape)[..., :plain],
        rotated.reshape(*rotated.shape[:-2], -1),
        _widened((exponent + _BIAS).astype(jnp.uint8), padded),
    )
    return jnp.concatenate(parts, axis=-1)


def decode_rows(rows: jax.Array, plain: int, width: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns cached `rows` as `[..., width]` of a float `dtype`, of which the first `plain` are not rotated."""
    if rows.dtype != jnp.uint8:
        return rows.astype(dtype)
    scales, end = -(-plain // _GROUP), plain + 2 * (width - plain)
    values = _widened(lax.bitcast_convert_type(rows[..., :plain], E4M3).astype(jnp.float32), scales * _GROUP)
    exponent = rows[..., end : end + scales].astype(jnp.int32) - _BIAS
    grouped = jnp.ldexp(values.reshape(*values.shape[:-1], scales, _GROUP), exponent[..., None])
    pairs = rows[..., plain:end].reshape(*rows.shape[:-1], -1, 2)
    rotated = lax.bitcast_convert_type(pairs, jnp.bfloat16).astype(dtype)
    return jnp.concatenate([grouped.reshape(values.shape)[..., :plain].astype(dtype), rotated], axis=-1)


def _widened(x: jax.Array, width: int) -> jax.Array:
    """Returns `x` with zeros behind the last axis, to `width`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
