"""Attention to the top-k tokens: their rows are copied into contiguous pages for decode attention."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mla
from pallas_kernels.backend import Backend, resolve_backend, uses_triton, with_fallback
from pallas_kernels.mla.layout import FP8_TILE, PAGE_SIZE, fp8_page_bytes, fp8_pages_of_rows, fp8_tiles, is_fp8
from pallas_kernels.triton import call

_COPY_WARPS = 4
BYTES_AT_ONCE = 2**28
"""The most bytes of a group of queries' scores, and of the rows copied for it."""


def topk_width(topk: int) -> int:
    """Returns the copied rows of a query for its `topk` tokens: whole pages."""
    return -(-topk // PAGE_SIZE) * PAGE_SIZE


def rows_at_once(pages: jax.Array, page_table: jax.Array, copies: int) -> int:
    """Returns the queries of a group, at least 1: their scores and copied rows stay within 256 MiB.

    `copies` are the rows of latents that are copied per query, 0 if its attention is masked.
    """
    scores = 4 * PAGE_SIZE * page_table.shape[1]
    copied = topk_width(copies) * pages.shape[2] * pages.dtype.itemsize
    return max(1, BYTES_AT_ONCE // max(scores, copied))


def attend_topk(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    counts: jax.Array,
    *,
    scale: float,
    first_page: jax.Array | int,
    value_width: int,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes absorbed latent attention of each query to its own top-k tokens.

    Args:
      q: `[T, H, R + P]`, as one query of `mla_decode`.
      pages: the page pool of latents, as in `mla_decode`.
      page_table: `[T, Mp]` int32, pages of each query's request.
      positions: `[T, Kt]` int32, the top-k tokens, Kt a multiple of 64.
      counts: `[T]` int32, how many of them are valid, from the first on.
      scale, value_width, backend: as in `mla_decode`.
      first_page: the layer's first page in the pool.

    Returns:
      out `[T, H, R]` in the dtype of `q` and lse `[T, H]` float32; 0 and +inf for a query without tokens.

    Raises:
      ValueError: a shape, dtype or page size does not fit.
    """
    T, Kt = positions.shape
    backend = with_fallback("attend_topk", backend)
    chosen, arrays = resolve_backend(requested=backend), (pages, page_table, positions)
    if uses_triton(chosen) and copy_unsupported(pages, value_width) is None:
        compact = copy_rows(*arrays, counts, first_page, value_width, chosen)
    else:
        compact = _copied(*arrays, first_page, value_width)
    table = jnp.arange(len(compact), dtype=jnp.int32).reshape(T, Kt // PAGE_SIZE)
    out, lse = mla.mla_decode(
        q[:, None],
        compact,
        table,
        counts,
        scale=scale,
        pages_per_layer=len(compact),
        value_width=value_width,
        backend=backend,
    )
    return out[:, 0], lse[:, 0]


def copy_rows(
    pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    counts: jax.Array,
    first_page: jax.Array | int,
    value_width: int,
    backend: Backend,
) -> jax.Array:
    """Returns pages `[T * Kt / 64, 64, W]` with the rows at the first `counts` positions; other rows are undefined.

    The arguments are those of `attend_topk`. It runs in Triton, on Hopper too.
    """
    (T, Kt), width = positions.shape, pages.shape[2]
    (compact,) = call.start(
        "sparse.copy_rows",
        (pages, page_table, positions, counts, call.scalar(first_page)),
        (jax.ShapeDtypeStruct((T * Kt // PAGE_SIZE, PAGE_SIZE, width), pages.dtype),),
        grid=(T, Kt // PAGE_SIZE),
        backend=backend,
        warps=_COPY_WARPS,
        TABLE_WIDTH=page_table.shape[1],
        TOPK=Kt,
        PAGE=PAGE_SIZE,
        WIDTH=width,
        **_parts(width, value_width if is_fp8(pages) else None),
    )
    return compact


def _parts(width: int, fp8_values: int | None) -> dict[str, int]:
    """Returns how a page divides into columns of a power of two: rows of a float page, or the parts of an FP8 page."""
    if fp8_values is None:
        chunk = min(64, width & -width)
        return {"CHUNKS": width // chunk, "CHUNK": chunk, "STRIDE": width, "NEXT": chunk, "TILES": 0, "ROPE": 0}
    tiles, tile = fp8_tiles(fp8_values), min(FP8_TILE, fp8_values)
    rope = width - fp8_values - 4 * tiles
    return {"CHUNKS": tiles, "CHUNK": tile, "STRIDE": tile, "NEXT": PAGE_SIZE * tile, "TILES": tiles, "ROPE": rope}


def copy_unsupported(pages: jax.Array, value_width: int) -> str | None:
    """Returns why `copy_rows` does not support these pages, or None if it does."""
    if not is_fp8(pages):
        return None
    tile, rope = min(FP8_TILE, value_width), pages.shape[2] - value_width - 4 * fp8_tiles(value_width)
    if value_width % tile or any(n < 1 or n & (n - 1) for n in (tile, rope)):
        return f"FP8 rows of {value_width} values and {rope} bytes of rotated key are not cut into powers of two"
    return None


def _copied(
    pages: jax.Array, page_table: jax.Array, positions: jax.Array, first_page: jax.Array | int, value_width: int
) -> jax.Array:
    """Returns pages `[T * Kt / 64, 64, W]` with the rows at the positions of each query."""
    column = jnp.minimum(positions // PAGE_SIZE, page_table.shape[1] - 1)
    ids = first_page + jnp.take_along_axis(page_table, column, axis=1)
    rows = _rows(pages, ids, positions % PAGE_SIZE, value_width).reshape(-1, PAGE_SIZE, pages.shape[2])
    return fp8_pages_of_rows(rows, value_width) if is_fp8(pages) else rows


def _rows(pages: jax.Array, ids: jax.Array, offsets: jax.Array, value_width: int) -> jax.Array:
    """Returns rows `[T, Kt, W]` at `offsets` in pages `ids`, `[T, Kt]` each; any rows where ids are out of range."""
    count, tokens, width = pages.shape
    if not is_fp8(pages):
        return pages.reshape(count * tokens, width).at[ids * tokens + offsets].get(mode="clip")
    places, flat = jnp.asarray(fp8_page_bytes(value_width, width)), pages.reshape(count, tokens * width)
    starts, first = [], 0
    for size in _runs(value_width, width):
        starts.append((first, size))
        first += size
    parts = [_windows(flat, ids, places[offsets, first], size) for first, size in starts]
    return jnp.concatenate(parts, axis=-1)


def _runs(value_width: int, row_bytes: int) -> list[int]:
    """Returns the lengths of the runs of bytes that an FP8 row is kept in: tiles of values, scales, the rotated key."""
    tiles = fp8_tiles(value_width)
    values = [min(FP8_TILE, value_width)] * tiles
    return [*values, *[4] * tiles, row_bytes - value_width - 4 * tiles]


def _windows(flat: jax.Array, ids: jax.Array, starts: jax.Array, size: int) -> jax.Array:
    """Returns `flat[ids, starts : starts + size]` `[T, Kt, size]` of bytes `[pages, n]`."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    return lax.gather(flat, jnp.stack([ids, starts], axis=-1), numbers, (1, size), mode="clip")
