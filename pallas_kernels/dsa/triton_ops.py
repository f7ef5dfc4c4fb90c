"""The choice and the copies of sparse attention on Triton kernels, on Hopper too: Mosaic has no gather of rows.

Triton compares and scans within a block of threads, and reads rows by pointer. Both kernels are for any GPU of
`gpus.KINDS`; programs on Mosaic kernels start them for Hopper.
"""

import contextlib
import functools
import logging

import jax
import jax.numpy as jnp

from pallas_kernels import gpus
from pallas_kernels.backend import Backend, BackendUnavailableError
from pallas_kernels.mla.layout import FP8_TILE, PAGE_SIZE, fp8_tiles, is_fp8
from pallas_kernels.triton import call

_log = logging.getLogger(__name__)
_HOPPER = gpus.by_number(90)
_SELECT_BLOCK, _SELECT_WARPS = 4096, 16  # one program per row has a multiprocessor for itself: many loads at once
_COPY_WARPS = 4


def usable(backend: Backend) -> bool:
    """Returns whether programs of this backend start these kernels; without jax-triton it says once that not."""
    if backend not in (Backend.MOSAIC, Backend.TRITON):
        return False
    try:
        call.require()
    except BackendUnavailableError as error:
        _log_missing(str(error))
        return False
    return True


def select_best(scores: jax.Array, visible: jax.Array, best: int, backend: Backend) -> jax.Array:
    """See `select.select_best`; scores beyond `visible` may hold anything."""
    T, N = scores.shape
    with _traced_for(backend):
        (chosen,) = call.start(
            "sparse.select",
            (scores, visible),
            (jax.ShapeDtypeStruct((T, best), jnp.int32),),
            grid=(T,),
            warps=_SELECT_WARPS,
            N=N,
            BEST=best,
            BLOCK=_SELECT_BLOCK,
        )
    return chosen


def copy_rows(
    pages: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    counts: jax.Array,
    first_page: jax.Array | int,
    value_width: int,
    backend: Backend,
) -> jax.Array:
    """Returns pages `[T * Kt / 64, 64, W]` with the rows at the first `counts` positions; other rows hold anything.

    The arguments are those of `attend.attend_chosen`.
    """
    (T, Kt), width = positions.shape, pages.shape[2]
    with _traced_for(backend):
        (compact,) = call.start(
            "sparse.copy_rows",
            (pages, page_table, positions, counts, jnp.asarray(first_page, jnp.int32).reshape(1)),
            (jax.ShapeDtypeStruct((T * Kt // PAGE_SIZE, PAGE_SIZE, width), pages.dtype),),
            grid=(T, Kt // PAGE_SIZE),
            warps=_COPY_WARPS,
            TABLE_WIDTH=page_table.shape[1],
            CHOSEN=Kt,
            PAGE=PAGE_SIZE,
            WIDTH=width,
            **_parts(width, value_width if is_fp8(pages) else None),
        )
    return compact


def _parts(width: int, fp8_values: int | None) -> dict[str, int]:
    """Returns how a page is cut into columns of a power of two: rows of a float page, or the parts of an FP8 page."""
    if fp8_values is None:
        chunk = min(64, width & -width)
        return {"CHUNKS": width // chunk, "CHUNK": chunk, "STRIDE": width, "NEXT": chunk, "TILES": 0, "ROPE": 0}
    tiles, tile = fp8_tiles(fp8_values), min(FP8_TILE, fp8_values)
    rope = width - fp8_values - 4 * tiles
    return {"CHUNKS": tiles, "CHUNK": tile, "STRIDE": tile, "NEXT": PAGE_SIZE * tile, "TILES": tiles, "ROPE": rope}


def copy_unsupported(pages: jax.Array, value_width: int) -> str | None:
    """Returns why `copy_rows` cannot take these pages, or None where it can."""
    if not is_fp8(pages):
        return None
    tile, rope = min(FP8_TILE, value_width), pages.shape[2] - value_width - 4 * fp8_tiles(value_width)
    if value_width % tile or any(n < 1 or n & (n - 1) for n in (tile, rope)):
        return f"FP8 rows of {value_width} values and {rope} bytes of rotated key are not cut into powers of two"
    return None


def _traced_for(backend: Backend) -> contextlib.AbstractContextManager:
    return gpus.compiling_for(_HOPPER) if backend is Backend.MOSAIC else contextlib.nullcontext()


@functools.cache
def _log_missing(reason: str) -> None:
    _log.warning("sparse attention: jax.numpy chooses and copies, because %s", reason)
