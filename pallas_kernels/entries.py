"""Compressed entries (DeepSeek-V4): their rows in a cache, the entries that a step completes, the rings that it leaves.

XLA compiles the last two to a dozen kernels that copy the rows of every request's window, though a token in 4 or in 128
completes an entry. Triton kernels, on Hopper too, read them where they are, and only for a token that completes one.

A row of latents or of an entry is of a float type, or FP8. An FP8 row of R values and P rotated ones is bytes: R of
e4m3, P bfloat16, then an e8m0 scale per 64 of the R, padded to whole 8 bytes. It takes 584 for R 448 and P 64, in the
order that FlashMLA has in its rows, which puts the scales of all rows of a page at the page's end. The model was
trained with this rounding (DeepSeek's `act_quant`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend, resolve_operation, uses_triton
from pallas_kernels.float8 import AMAX_FLOOR, E4M3, E4M3_MAX
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import power_of_two

_ROWS_AT_ONCE = 8  # of an entry's windows
_FLOAT, _FP8_ENTRY, _FP8_KEY = range(3)
_POOL_WARPS, _RING_WARPS = 8, 4
_GROUP = 64  # values of an FP8 entry that share a scale
_BIAS = 127  # exponent of an e8m0 byte 0, negated
_MOST_KEYS = 128  # values of an FP8 index key, which has one scale


class StepTokens(NamedTuple):
    """The T tokens of a step of B requests, and where the cache keeps these requests' rows."""

    requests: jax.Array  # [T] int32
    positions: jax.Array  # [T] int32, -1 in padding
    firsts: jax.Array  # [B] int32, where a request's tokens begin
    contexts: jax.Array  # [B] int32, tokens that it had before the step
    ends: jax.Array  # [B] int32, tokens that it has after it
    slots: jax.Array  # [B] int32
    page_table: jax.Array  # [B, Mp] int32, of pages with as many entries as the array's; -1: those are not written
    window_table: jax.Array  # [B, Mp] int32


class PoolSizes(NamedTuple):
    """How many pages, window pages and slots each layer of a pool has, and the tokens of a page."""

    pages: int
    window_pages: int
    slots: int
    page_tokens: int


class Given(NamedTuple):
    """What tokens give to the entries of a compressor: C values each, then C scores, float32.

    C is d, or 2 * d where entries overlap. Layers of the arrays lie one after the other.
    """

    own: jax.Array  # [T, 2 * C], of the step's tokens; their scores lack `position`
    position: jax.Array  # [Lc, ratio, C], added to the scores of a token by its place in the window
    parts: jax.Array  # [Lc * slots, R, 2 * C], rings of a request's last tokens
    tails: jax.Array | None  # [Lc * window pages, ratio, 2 * d], the first series of a page's last; where they overlap


def complete_entries(
    entries: jax.Array,
    given: Given,
    norm: jax.Array,
    layer: jax.Array | int,
    tokens: StepTokens,
    cos: jax.Array,
    sin: jax.Array,
    *,
    sizes: PoolSizes,
    eps: float,
    is_key: bool,
    backend: Backend,
) -> jax.Array:
    """Returns the array of entries with those that the step completes; in place where it is donated.

    Args:
      entries: `[Lc * pages, E, W]` as `encode_rows` has them, or as `dsa.write_keys` has index keys (`is_key`).
      given: what the tokens' windows are made of.
      norm: `[Lc, d]`, in the type that entries are rounded to before they are normed.
      layer: number of the layer among those with the compressor, static or traced.
      tokens: of the step.
      cos, sin: `[T, P / 2]` float32, the rotation of each token's own entry.
      sizes: of the pool.
      eps: added to the mean square of an entry.
      is_key: whether FP8 entries are index keys.
      backend: MOSAIC or TRITON; see `completes`.
    """
    (_, ratio, channels), d, form = given.position.shape, norm.shape[1], _FLOAT
    if entries.dtype == jnp.uint8:
        form = _FP8_KEY if is_key else _FP8_ENTRY
    tails = given.parts if given.tails is None else given.tails
    arrays = given.own, given.parts, tails, given.position, norm, call.scalar(layer), tokens.requests, tokens.positions
    tables = tokens.firsts, tokens.contexts, tokens.slots, tokens.page_table, tokens.window_table
    (written,) = call.update(
        "entries.complete",
        (entries,),
        (*arrays, *tables, cos, sin),
        grid=tokens.positions.shape,
        backend=backend,
        warps=_POOL_WARPS,
        RATIO=ratio,
        OVERLAPS=given.tails is not None,
        D=d,
        CHANNELS=channels,
        SLOTS=sizes.slots,
        RING=given.parts.shape[1],
        WINDOW_PAGES=sizes.window_pages,
        TAILS=tails.shape[1],
        TABLE=tokens.page_table.shape[1],
        PAGES=sizes.pages,
        ENTRIES=entries.shape[1],
        WIDTH=entries.shape[2],
        PAGE_TOKENS=sizes.page_tokens,
        ROTATED=2 * cos.shape[1],
        EPS=eps,
        FORM=form,
        FLOOR=AMAX_FLOOR,
        BLOCK=_ROWS_AT_ONCE,
    )
    return written


def write_rings(
    window: jax.Array,
    new: jax.Array,
    cache_layer: jax.Array | int,
    given: tuple[Given, ...],
    layer: jax.Array | int,
    tokens: StepTokens,
    *,
    sizes: PoolSizes,
    backend: Backend,
) -> tuple[jax.Array, ...]:
    """Returns the arrays of rings with the rows of the step's last tokens; in place where they are donated.

    They are those of the window, then `parts` of each of `given`, and `tails` of those that have them.

    Args:
      window: `[L * window pages, R, W]`, and its `new` rows `[T, W]`.
      cache_layer: the layer's number among those with a window, static or traced.
      given: of the layer's compressors: none, one without tails, or two with tails.
      layer: the layer's number among those with these compressors.
      tokens: of the step.
      sizes: of the pool.
      backend: MOSAIC or TRITON; see `completes`.
    """
    kernel, where = ("rings_plain", "rings_heavy", "rings_sparse")[len(given)], (tokens.requests, tokens.positions)
    targets, rows, places = [window], [new], [call.scalar(cache_layer)]
    constants: dict[str, Any] = {}
    for each in given:
        targets += [each.parts] if each.tails is None else [each.parts, each.tails]
        rows += [each.own, each.position]
    if given:
        (_, ratio, channels), parts = given[0].position.shape, given[0].parts.shape[1]
        places.append(call.scalar(layer))
        constants = {"SLOTS": sizes.slots, "RATIO": ratio, "PARTS": parts, "D": channels // len(given)}
    if len(given) > 1 and given[0].tails is not None:
        constants |= {"TAILS": given[0].tails.shape[1], "KEY_D": given[1].position.shape[2] // 2}
    slots = (tokens.slots,) if given else ()
    return call.update(
        f"entries.{kernel}",
        targets,
        (*rows, *places, *where, tokens.ends, *slots, tokens.window_table),
        grid=tokens.positions.shape,
        backend=backend,
        warps=_RING_WARPS,
        TABLE=tokens.window_table.shape[1],
        PAGE_TOKENS=sizes.page_tokens,
        WINDOW_PAGES=sizes.window_pages,
        RING=window.shape[1],
        WIDTH=window.shape[2],
        BLOCK=power_of_two(window.shape[2]),
        **constants,
    )


def completes(entries: Any, norm: Any, dtype: jax.typing.DTypeLike, rotated: int, *, is_key: bool) -> bool:
    """Returns whether the kernels take entries that are rounded to `dtype`, `rotated` of their values turned."""
    width = norm.shape[-1]
    if width & (width - 1) or width < _GROUP or norm.dtype != dtype:
        return False
    if entries.dtype != jnp.uint8:
        return True
    return width <= _MOST_KEYS if is_key else (width - rotated) % _GROUP == 0


def encode_rows(
    rows: jax.Array, plain: int, dtype: jax.typing.DTypeLike, *, backend: Backend | None = None
) -> jax.Array:
    """Returns `rows` `[..., R + P]`, of which `plain` R are not rotated, as a cache of `dtype` has them.

    For uint8 they are FP8 rows, of R + 8 * ceil(R / 512) + 2 * P bytes. A GPU makes those of `[T, R + P]` in one Triton
    kernel, if R and P are whole groups of 64 values and their sum is a power of two.
    """
    if jnp.dtype(dtype) != jnp.uint8:
        return rows.astype(dtype)
    chosen, width = resolve_operation("encode_rows", backend), rows.shape[-1]
    fits = rows.ndim == 2 and rows.size > 0 and plain % _GROUP == width % _GROUP == 0 and width & (width - 1) == 0
    if fits and uses_triton(chosen):
        return _encode_kernel(rows, plain, chosen)
    return _encode(rows, plain)


def _encode_kernel(rows: jax.Array, plain: int, backend: Backend) -> jax.Array:
    (T, width), scales = rows.shape, 8 * -(-plain // (8 * _GROUP))
    row_bytes = plain + 2 * (width - plain) + scales
    (encoded,) = call.start(
        "entries.encode",
        (rows,),
        [jax.ShapeDtypeStruct((T, row_bytes), jnp.uint8)],
        grid=(T,),
        backend=backend,
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
