"""Sparse attention on Triton kernels: scores, top-k selection and copies of rows.

Hopper uses selection and copies too: Mosaic can neither gather rows nor scan within a thread block.
"""

import contextlib
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import gpus
from pallas_kernels.backend import Backend, BackendUnavailableError, traced_gpu
from pallas_kernels.dsa.keys import fp8_chunk
from pallas_kernels.mla.layout import FP8_TILE, PAGE_SIZE, fp8_tiles, is_fp8
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import power_of_two

_log = logging.getLogger(__name__)
_HOPPER = gpus.by_number(90)
_SELECT_BLOCK, _SELECT_WARPS = 4096, 16  # one program per row and multiprocessor: many loads in flight
_COPY_WARPS = 4
SCORE_PAGES = 32
"""Pages of a program: 2,048 tokens."""

_HALF_TYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_SCORE_WARPS, _SCORE_STAGES = 4, 3


def usable(backend: Backend) -> bool:
    """Returns whether programs of this backend use these kernels; logs once if jax-triton is missing."""
    if backend not in (Backend.MOSAIC, Backend.TRITON):
        return False
    try:
        call.require()
    except BackendUnavailableError as error:
        _log_missing(str(error))
        return False
    return True


def index_scores_triton(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    visible: jax.Array,
    *,
    first_page: jax.Array | int,
) -> jax.Array:
    """See `topk.raw_scores`; FP8 pages need the results of `keys.fp8_queries`."""
    (T, heads), columns, fp8 = weights.shape, page_table.shape[1], is_fp8(pool)
    width = q.size // (T * heads)
    (scores,) = call.start(
        "sparse.scores",
        (
            lax.bitcast_convert_type(q, jnp.uint8) if fp8 else q,
            weights,
            pool,
            page_table,
            visible,
            jnp.asarray(first_page, jnp.int32).reshape(1),
        ),
        (jax.ShapeDtypeStruct((T, columns * PAGE_SIZE), jnp.float32),),
        grid=(T, -(-columns // SCORE_PAGES)),
        warps=_SCORE_WARPS,
        stages=_SCORE_STAGES,
        HEADS=heads,
        WIDTH=width,
        CHUNK=fp8_chunk(width) if fp8 else width,
        PAGE=PAGE_SIZE,
        PAGE_ITEMS=PAGE_SIZE * pool.shape[2],
        TABLE_WIDTH=columns,
        FP8=fp8,
        NATIVE=fp8 and traced_gpu().fp8,
        BLOCK_H=power_of_two(heads),
        PAGES=SCORE_PAGES,
    )
    return scores


def scores_unsupported(q: Any, pool: Any) -> str | None:
    """Returns why the kernel does not support these arrays (or their shapes and types), or None if it does."""
    heads, width = q.shape[-2:]
    if width & (width - 1) or not 16 <= width <= 128 or heads > 128:
        return f"{heads} heads of {width} are more than 128, or no power of two from 16 to 128 wide"
    if is_fp8(pool):
        return None if width >= 32 else f"FP8 keys of {width} are narrower than what a tensor core multiplies, 32"
    if q.dtype not in _HALF_TYPES or pool.dtype != q.dtype:
        return f"queries of {q.dtype} and index keys of {pool.dtype} are not of one type of 16 bits"
    return None


def select_topk(scores: jax.Array, visible: jax.Array, topk: int, backend: Backend) -> jax.Array:
    """See `topk.select_topk`; scores past `visible` may hold anything."""
    T, N = scores.shape
    with traced_for(backend):
        (indices,) = call.start(
            "sparse.select",
            (scores, visible),
            (jax.ShapeDtypeStruct((T, topk), jnp.int32),),
            grid=(T,),
            warps=_SELECT_WARPS,
            N=N,
            TOPK=topk,
            BLOCK=_SELECT_BLOCK,
        )
    return indices


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

    The arguments are those of `attend.attend_topk`.
    """
    (T, Kt), width = positions.shape, pages.shape[2]
    with traced_for(backend):
        (compact,) = call.start(
            "sparse.copy_rows",
            (pages, page_table, positions, counts, jnp.asarray(first_page, jnp.int32).reshape(1)),
            (jax.ShapeDtypeStruct((T * Kt // PAGE_SIZE, PAGE_SIZE, width), pages.dtype),),
            grid=(T, Kt // PAGE_SIZE),
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


def traced_for(backend: Backend) -> contextlib.AbstractContextManager:
    """Traces Triton kernels for Hopper where the others are Mosaic's."""
    return gpus.compiling_for(_HOPPER) if backend is Backend.MOSAIC else contextlib.nullcontext()


@functools.cache
def _log_missing(reason: str) -> None:
    _log.warning("sparse attention: jax.numpy selects and copies, because %s", reason)
