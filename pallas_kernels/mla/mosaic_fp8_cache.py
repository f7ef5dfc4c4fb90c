"""FP8 pages in the decode kernel: the producer warpgroup dequantizes them into the stages.

Latents become float16: sm_90 has an instruction that converts two e4m3 to it, and none to bfloat16. Shared memory does
not fit raw bytes beside two dequantized pages, so a tile (64 x 128 e4m3, and a scale per row) is loaded from global
memory to registers while the previous one is dequantized. Pages are prefetched to the L2 cache two pages ahead. Rotated
keys are bfloat16: TMA copies them.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.float8 import E4M3
from pallas_kernels.mla.layout import FP8_TILE, PAGE_SIZE
from pallas_kernels.mosaic import plgpu

VALUE_WIDTH = 512
"""The latent width of FP8 pages: with 256 the rotated keys would begin inside a swizzled tile."""

_VALUES, _TILES, _ROPE = VALUE_WIDTH, VALUE_WIDTH // FP8_TILE, 64
_HALF_TILE = FP8_TILE // 2


def views(pages: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Views the pool as e4m3 `[pages, 328, 128]`, float32 `[pages, 10496]` and bfloat16 `[pages, 328, 64]`.

    XLA copies nothing.
    """
    count, page_bytes = pages.shape[0], pages.shape[1] * pages.shape[2]

    def as_type(dtype):
        return lax.bitcast_convert_type(pages.reshape(count, -1, jnp.dtype(dtype).itemsize), dtype)

    values = lax.bitcast_convert_type(pages, E4M3).reshape(count, page_bytes // FP8_TILE, FP8_TILE)
    return values, as_type(jnp.float32), as_type(jnp.bfloat16).reshape(count, -1, _ROPE)


def first_pair(memory: Any, piece: Any) -> tuple[Any, ...]:
    """Returns what `load_pair` carries: the first tile of a pair of pages, the pair, and the location of the next."""
    row, first_page = memory.table_rows[piece.group], memory.first_page[0]
    pages = _pair(memory, piece, 0, row, first_page)
    return _fetch(memory.pages, pages[0], 0), pages, row, first_page


def _pair(memory: Any, piece: Any, pair: Any, row: Any, first_page: Any) -> tuple[Any, Any]:
    """Returns the pages of a pair of a piece; past its end the last one, for an empty piece an arbitrary one."""
    empty = piece.end <= piece.begin  # the fetched page is not read, but its address must exist

    def page_of(number):
        index = jnp.where(empty, 0, jnp.minimum(piece.begin + number, piece.end - 1))
        return first_page + jnp.where(empty, 0, memory.page_table[row, index])

    return page_of(2 * pair), page_of(2 * pair + 1)


def load_pair(memory: Any, piece: Any, pair: Any, pairs_before: Any, carry: tuple) -> tuple[Any, ...]:
    """Dequantizes a pair of pages into the stages when those are free; see `_PagedMemory` and `_PageRange`."""
    fetched, pages, row, first_page = carry
    zero, reused = lax.shift_right_logical(pairs_before, 30), pairs_before > 0
    following = _pair(memory, piece, pair + 1, row, first_page)
    tiles = [(pages[stage], stage, tile) for stage in range(2) for tile in range(_TILES)]
    for (page, stage, tile), (page_after, _, tile_after) in itertools.pairwise([*tiles, (following[0], 0, 0)]):
        current, fetched = fetched, _fetch(memory.pages, page_after, tile_after)
        if tile in (0, 2):
            pl.when(reused)(functools.partial(memory.wait_until_free, stage, tile // 2, zero))
        if tile == 2:
            _copy_rope(memory.pages, page, memory.part(stage, _TILES, zero), memory.full(stage, _TILES, zero))
        _store(memory.part(stage, tile, zero), *current)
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.full(stage, tile, zero))
        if tile == _TILES - 1:
            plgpu.async_prefetch(memory.pages[0].at[following[stage], pl.ds(0, _TILES * PAGE_SIZE)])
    return fetched, following, row, first_page


def _fetch(pool: Any, page: Any, tile: int) -> tuple[jax.Array, ...]:
    """Reads a tile of a page from global memory: both halves of its columns, e4m3 `[64, 64]`, and its rows' scales."""
    values, floats, _ = pool
    rows = pl.ds(tile * PAGE_SIZE, PAGE_SIZE)
    halves = (values.at[page, rows, pl.ds(first, _HALF_TILE)] for first in range(0, FP8_TILE, _HALF_TILE))
    scale = floats.at[page, pl.ds((PAGE_SIZE * _VALUES) // 4 + tile * PAGE_SIZE, PAGE_SIZE)]
    # Eight lanes store a row of 128 bytes in float16, without bank conflicts.
    layout = plgpu.Layout.SMEM_GMEM_COPY((PAGE_SIZE, _HALF_TILE), jnp.float16, 128)
    left, right = (plgpu.load(half, layout=layout, optimized=False) for half in halves)
    return left, right, plgpu.load(scale, layout=layout.reduce(1), optimized=False)


def _copy_rope(pool: Any, page: Any, target: Any, full: Any) -> None:
    """Fetches the rotated keys of a page to a barrier."""
    first = (PAGE_SIZE * _VALUES + 4 * _TILES * PAGE_SIZE) // (2 * _ROPE)
    plgpu.copy_gmem_to_smem(pool[2].at[page, pl.ds(first, PAGE_SIZE)], target, full)


def _store(quarter: Any, left: jax.Array, right: jax.Array, scale: jax.Array) -> None:
    """Dequantizes a tile into its quarter of a stage, half at a time, to save registers."""
    factor = scale.astype(jnp.float16)
    for number, raw in enumerate((left, right)):
        values = raw.astype(jnp.float16)
        # Exact from 2^-24 on: the scale is a power of two. One instruction multiplies two values.
        scaled = values * lax.broadcast_in_dim(factor, values.shape, [0])
        quarter[:, pl.ds(_HALF_TILE * number, _HALF_TILE)] = scaled
