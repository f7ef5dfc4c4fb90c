"""The MLA operations on Triton kernels: from the public shapes to the kernels' groups of rows and back."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import invariance
from pallas_kernels.backend import traced_gpu
from pallas_kernels.mla.layout import FP8_TILE, HALF_DTYPES, PAGE_SIZE, is_fp8
from pallas_kernels.mla.write import DROPPED
from pallas_kernels.search import search
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import page_splits, paged_tile, power_of_two, segments_tile

_NOWHERE = 1 << 30
"""The start of the span of a token without keys: above every key."""


def decode(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    first_page: jax.Array | int,
    value_width: int,
) -> tuple[jax.Array, jax.Array]:
    """See `mla_decode`; `first_page` is the layer's first page in the pool."""
    B, S, H, D = q.shape
    rows, own = q.reshape(B, S * H, D), jnp.arange(B, dtype=jnp.int32)
    arrays = rows, pages, page_table, own, lengths
    out, lse = _attend(arrays, scale, first_page, value_width, heads=H, split=True)
    return out.reshape(B, S, H, value_width), lse.reshape(B, S, H)


def context(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    context_lengths: jax.Array,
    cu_lengths: jax.Array,
    *,
    scale: float,
    first_page: jax.Array | int,
    value_width: int,
) -> tuple[jax.Array, jax.Array]:
    """See `mla_prefill_context`. Each token is a group; those without context, and padding, have length 0."""
    token = jnp.arange(q.shape[0], dtype=jnp.int32)
    request = search(cu_lengths[1:], token, side="right")  # G for padding
    lengths = context_lengths.at[request].get(mode="fill", fill_value=0)
    arrays = q, pages, page_table, jnp.minimum(request, page_table.shape[0] - 1), lengths
    return _attend(arrays, scale, first_page, value_width, heads=q.shape[1], split=False)


def _attend(
    arrays: tuple[jax.Array, ...],
    scale: float,
    first_page: jax.Array | int,
    value_width: int,
    *,
    heads: int,
    split: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attends rows [groups, M, R + P] to the pages of their group; the M / heads newest tokens are causal."""
    rows, pages, page_table, table_rows, lengths = arrays
    (groups, count, width), gpu = rows.shape, traced_gpu()
    tile = paged_tile(gpu, count, width, rows.dtype.itemsize, fp8_pages=is_fp8(pages))
    row_tiles = -(-count // tile.rows)
    split = split and not invariance.required()
    splits = page_splits(gpu, groups * row_tiles, page_table.shape[1]) if split else 1
    shape = (groups, splits, count)
    out, lse = call.start(
        "attention.paged",
        (rows, pages, page_table, table_rows, lengths, call.scalar(first_page)),
        (
            jax.ShapeDtypeStruct((*shape, value_width), rows.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(groups, splits, row_tiles),
        warps=tile.warps,
        stages=tile.stages,
        SCALE=base_two(scale),
        HEADS=heads,
        QUERIES=count // heads,
        ROWS=count,
        R=value_width,
        P=width - value_width,
        PAGE=PAGE_SIZE,
        TABLE_WIDTH=page_table.shape[1],
        SPLITS=splits,
        FP8=is_fp8(pages),
        BLOCK_H=tile.rows,
        BLOCK_N=tile.columns,
    )
    return (out[:, 0], lse[:, 0]) if splits == 1 else _join(out, lse, rows.dtype)


def _join(out: jax.Array, lse: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Combines the parts [groups, splits, M, R] of each request; parts without keys have an lse of +inf."""
    logs = jnp.where(jnp.isposinf(lse), -jnp.inf, lse)
    top = jnp.max(logs, axis=1, keepdims=True)
    base = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.exp(logs - base)
    total = jnp.sum(weights, axis=1)
    safe = jnp.where(total > 0, total, 1)
    joined = jnp.sum(out * weights[..., None], axis=1) / safe[..., None]
    return joined.astype(dtype), jnp.where(total > 0, base[:, 0] + jnp.log(safe), jnp.inf)


def prefill(
    q: jax.Array, k: jax.Array, v: jax.Array, cu_lengths: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `mla_prefill`."""
    token, end = jnp.arange(len(q), dtype=jnp.int32), cu_lengths[-1]
    starts = cu_lengths[search(cu_lengths[1:], token, side="right")]
    return prefill_spans(q, k, v, starts, jnp.where(token < end, token + 1, 0), end, scale=scale)


def prefill_spans(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    live: jax.Array | int,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `mla_prefill_spans`, with whole keys of which the first `live` are finite."""
    starts, ends = jnp.where(ends > 0, starts, _NOWHERE).astype(jnp.int32), ends.astype(jnp.int32)
    arrays = q, k, v, starts, ends, call.scalar(live)
    out, lse = _materialized("attention.spans", arrays, scale, jax.ShapeDtypeStruct(q.shape[:2], jnp.float32))
    return out, lse


def prefill_topk(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bits: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """See `mla_prefill_topk`, with whole keys."""
    (out,) = _materialized("attention.masked", (q, k, v, bits, starts, ends), scale)
    return out


def _materialized(
    kernel: str, arrays: tuple[jax.Array, ...], scale: float, *more: jax.ShapeDtypeStruct
) -> tuple[jax.Array, ...]:
    """Attends with `q, k, v` of `arrays`: one program per tile of queries and head. `more` are additional outputs."""
    q, _, v, *_ = arrays
    (T, H, width), value_width = q.shape, v.shape[-1]
    tile = segments_tile(traced_gpu(), width, value_width, q.dtype.itemsize)
    first, second = _powers_of_two(width)
    return call.start(
        kernel,
        arrays,
        (jax.ShapeDtypeStruct((T, H, value_width), q.dtype), *more),
        grid=(-(-T // tile.rows), H),
        warps=tile.warps,
        stages=tile.stages,
        tokens=T,
        SCALE=base_two(scale),
        HEADS=H,
        K1=first,
        K2=second,
        V=value_width,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
    )


def write_rows(pages: jax.Array, rows: jax.Array, targets: jax.Array, offsets: jax.Array) -> jax.Array:
    """See `write.write_rows`: one program per row."""
    width = pages.shape[2]
    (written,) = call.update(
        "attention.write",
        (pages,),
        (rows, targets, offsets),
        grid=(rows.shape[0],),
        WIDTH=width,
        PAGE=PAGE_SIZE,
        DROPPED=DROPPED,
        BLOCK=power_of_two(width),
    )
    return written


def decode_unsupported(q: Any, pages: Any, value_width: int) -> str | None:
    """Returns why the decode kernel does not support these arrays (or their shapes and types), or None if it does."""
    widths = (value_width, q.shape[-1] - value_width)
    if any(not _is_block(width) for width in widths) or widths[0] > 512:
        return f"latent and rope widths {widths} are no powers of two from 16 to 512"
    if is_fp8(pages) and value_width % FP8_TILE:
        return f"FP8 pages have latents of {value_width} values, no whole blocks of {FP8_TILE}"
    if q.dtype not in HALF_DTYPES:
        return f"{q.dtype} is neither bfloat16 nor float16"
    if not is_fp8(pages) and pages.dtype != q.dtype:
        return f"pages of {pages.dtype} are not of the queries' type, {q.dtype}"
    return None


def prefill_unsupported(q: Any, v: Any) -> str | None:
    """Returns why the prefill kernel does not support these arrays (or their shapes and types), or None if it does."""
    widths = (q.shape[-1], v.shape[-1])
    first, second = _powers_of_two(widths[0])
    if not all(map(_is_block, (first, second or first, widths[1]))) or max(first, widths[1]) > 256:
        return f"key and value widths {widths} are no powers of two from 16 to 256, nor is a key's the sum of two"
    if q.dtype not in HALF_DTYPES:
        return f"{q.dtype} is neither bfloat16 nor float16"
    return None


def _powers_of_two(width: int) -> tuple[int, int]:
    """Splits a width into its largest power of two and the rest: 192 into 128 and 64."""
    first = 1 << (width.bit_length() - 1)
    return first, width - first


def _is_block(width: int) -> bool:
    return width >= 16 and width & (width - 1) == 0


def base_two(scale: float) -> float:
    """Returns the factor that makes scores logarithms to base 2."""
    return float(scale) * math.log2(math.e)
