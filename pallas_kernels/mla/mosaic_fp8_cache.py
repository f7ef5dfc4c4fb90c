"""FP8 pages in the decode kernel: the producer's warpgroup dequantizes them into the stages that others multiply.

Shared memory has no room for raw bytes beside two pages in bfloat16, so a tile (64 x 128 e4m3, and a scale per row)
comes from global memory to registers while the one before it is dequantized. The L2 cache is asked for each page two
pages ahead. Rotated keys are in bfloat16 already: TMA copies them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.float8 import E4M3
from pallas_kernels.lazily import plgpu
from pallas_kernels.mla.layout import FP8_TILE, PAGE_SIZE

VALUE_WIDTH = 512
"""The latent width of FP8 pages: those of 256 begin their rotated keys inside of a swizzled tile."""

_VALUES, _TILES, _ROPE = VALUE_WIDTH, VALUE_WIDTH // FP8_TILE, 64
_HALF_TILE = FP8_TILE // 2


def views(pages: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Views the pool as e4m3 `[pages, 328, 128]`, float32 `[pages, 10496]` and bfloat16 `[pages, 328, 64]`.

    The same memory: XLA copies nothing.
    """
    count, page_bytes = pages.shape[0], pages.shape[1] * pages.shape[2]

    def as_type(dtype):
        return lax.bitcast_convert_type(pages.reshape(count, -1, jnp.dtype(dtype).itemsize), dtype)

    values = lax.bitcast_convert_type(pages, E4M3).reshape(count, page_bytes // FP8_TILE, FP8_TILE)
    return values, as_type(jnp.float32), as_type(jnp.bfloat16).reshape(count, -1, _ROPE)


def first_tile(memory: Any, piece: Any) -> tuple[Any, ...]:
    """Returns what `load_page` carries: a page's first tile, that page and the next, and where to find more."""
    empty = piece.end <= piece.begin  # then nobody reads what is fetched, but its address must exist
    row, first_page = memory.table_rows[piece.group], memory.first_page[0]

    def page_of(number: int):
        index = jnp.where(empty, 0, jnp.minimum(piece.begin + number, piece.end - 1))
        return first_page + jnp.where(empty, 0, memory.page_table[row, index])

    page = page_of(0)
    return _fetch(memory.pages, page, 0), page, page_of(1), row, first_page


def load_page(memory: Any, piece: Any, number: Any, stage: int, pairs_before: Any, carry: tuple) -> tuple[Any, ...]:
    """Dequantizes a page of a piece into a stage, once whoever reads it there is done; see `_Memory`, `_Piece`."""
    fetched, page, following, row, first_page = carry
    zero, reused = lax.shift_right_logical(pairs_before, 30), pairs_before > 0
    ahead = first_page + memory.page_table[row, jnp.minimum(piece.begin + number + 2, piece.end - 1)]
    for tile in range(_TILES):
        current = fetched
        fetched = _fetch(memory.pages, *((page, tile + 1) if tile + 1 < _TILES else (following, 0)))
        if tile in (0, 2):
            pl.when(reused)(functools.partial(memory.wait_until_free, stage, tile // 2, zero))
        if tile == 2:
            _copy_rope(memory.pages, page, memory.part(stage, _TILES, zero), memory.full(stage, _TILES, zero))
        _store(memory.part(stage, tile, zero), *current)
        if tile % 2:  # a fence for each tile would take longer than the first tile of a half waits for the second
            plgpu.commit_smem()
            for done in (tile - 1, tile):
                plgpu.barrier_arrive(memory.full(stage, done, zero))
    plgpu.async_prefetch(memory.pages[0].at[ahead, pl.ds(0, _TILES * PAGE_SIZE)])
    return fetched, following, ahead, row, first_page


def _fetch(pool: Any, page: Any, tile: int) -> tuple[jax.Array, ...]:
    """Reads a tile of a page from global memory: both halves of its columns, e4m3 `[64, 64]`, and its rows' scales."""
    values, floats, _ = pool
    rows = pl.ds(tile * PAGE_SIZE, PAGE_SIZE)
    halves = (values.at[page, rows, pl.ds(first, _HALF_TILE)] for first in range(0, FP8_TILE, _HALF_TILE))
    scale = floats.at[page, pl.ds((PAGE_SIZE * _VALUES) // 4 + tile * PAGE_SIZE, PAGE_SIZE)]
    # Eight lanes store a row of 128 bytes in bfloat16, so no two of them meet at a bank.
    layout = plgpu.Layout.SMEM_GMEM_COPY((PAGE_SIZE, _HALF_TILE), jnp.bfloat16, 128)
    left, right = (plgpu.load(half, layout=layout, optimized=False) for half in halves)
    return left, right, plgpu.load(scale, layout=layout.reduce(1), optimized=False)


def _copy_rope(pool: Any, page: Any, target: Any, full: Any) -> None:
    """Fetches the rotated keys of a page, which arrive at a barrier."""
    first = (PAGE_SIZE * _VALUES + 4 * _TILES * PAGE_SIZE) // (2 * _ROPE)
    plgpu.copy_gmem_to_smem(pool[2].at[page, pl.ds(first, PAGE_SIZE)], target, full)


def _store(quarter: Any, left: jax.Array, right: jax.Array, scale: jax.Array) -> None:
    """Dequantizes a tile into its quarter of a stage, half of it at a time: registers are few."""
    for number, raw in enumerate((left, right)):
        # sm_90 converts e4m3 to float16 only.
        values = raw.astype(jnp.float16).astype(jnp.float32).astype(jnp.bfloat16)
        # Exact: the scale is a power of two. Two values of 16 bits are multiplied by one instruction.
        scaled = values * lax.broadcast_in_dim(scale.astype(jnp.bfloat16), values.shape, [0])
        plgpu.store(quarter.at[:, pl.ds(_HALF_TILE * number, _HALF_TILE)], scaled)
