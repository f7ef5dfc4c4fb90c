"""FP8 pages in the decode kernel: fetched as they are, dequantized in shared memory by the page's owner.

The raw bytes of a page (64 x 512 e4m3) arrive where the right half of its values will be, which is just as large:
shared memory has no room for more. What becomes the right half waits in registers until all of the page is read.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.float8 import E4M3
from pallas_kernels.lazily import plgpu
from pallas_kernels.mla.layout import FP8_TILE, PAGE_SIZE
from pallas_kernels.mosaic import row_layout, swizzle_transforms

VALUE_WIDTH = 512
"""The latent width of FP8 pages: those of 256 begin their rotated keys inside of a swizzled tile."""

_VALUES, _TILES, _ROPE = VALUE_WIDTH, VALUE_WIDTH // FP8_TILE, 64


def views(pages: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Views the pool as e4m3 `[pages, 328, 128]`, float32 `[pages, 10496]` and bfloat16 `[pages, 328, 64]`.

    The same memory: XLA copies nothing.
    """
    count, page_bytes = pages.shape[0], pages.shape[1] * pages.shape[2]

    def as_type(dtype):
        return lax.bitcast_convert_type(pages.reshape(count, -1, jnp.dtype(dtype).itemsize), dtype)

    values = lax.bitcast_convert_type(pages, E4M3).reshape(count, page_bytes // FP8_TILE, FP8_TILE)
    return values, as_type(jnp.float32), as_type(jnp.bfloat16).reshape(count, -1, _ROPE)


def scratch(right: Any) -> dict[str, Any]:
    """Lists the shared memory: the right halves, raw pages in the same place, and scales."""
    raw_type = E4M3
    tiled = swizzle_transforms(raw_type, FP8_TILE)
    raw = plgpu.SMEM((1, _TILES * PAGE_SIZE, FP8_TILE), raw_type, transforms=tiled)
    scale = plgpu.SMEM((1, _TILES * PAGE_SIZE), jnp.float32)
    return {"right_or_raw": plgpu.RefUnion(right, raw), "scale": scale}


COPIES = 3
"""Arrivals of a page at its barrier."""


def load_page(pool: Any, page: Any, smem: Any, stage: int) -> None:
    """Fetches raw values, scales and rotated keys, which arrive at `page_full`."""
    values, floats, halves = pool
    full = smem.page_full.at[stage]
    plgpu.copy_gmem_to_smem(values.at[page, pl.ds(0, _TILES * PAGE_SIZE)], smem.raw[stage].at[0], full)
    first_scale = PAGE_SIZE * _VALUES // 4
    scales = pl.ds(first_scale, _TILES * PAGE_SIZE)
    plgpu.copy_gmem_to_smem(floats.at[page, scales], smem.scale[stage].at[0], full)
    first_rope = (PAGE_SIZE * _VALUES + 4 * _TILES * PAGE_SIZE) // (2 * _ROPE)
    plgpu.copy_gmem_to_smem(halves.at[page, pl.ds(first_rope, PAGE_SIZE)], smem.rope[stage].at[0], full)


def dequantize(smem: Any, stage: int, zero: Any) -> None:
    """Turns the raw page of `stage` into both halves of its values. `zero` is 0, see `mosaic_decode`."""
    left, right = smem.left[stage], smem.right[stage]
    for tile in range(2):
        _store(left, zero, tile, _raw_tile(smem, stage, zero, tile), _scale(smem, stage, zero, tile))
    raw = [_raw_tile(smem, stage, zero, tile) for tile in (2, 3)]
    scales = [_scale(smem, stage, zero, tile) for tile in (2, 3)]
    plgpu.commit_smem()  # every warp has read all of the raw page, whose place the next stores take
    for tile in range(2):
        _store(right, zero, tile, raw[tile], scales[tile])
    plgpu.commit_smem()


def _raw_tile(smem: Any, stage: int, zero: Any, tile: int):
    rows = pl.ds(tile * PAGE_SIZE, PAGE_SIZE)
    return plgpu.load(smem.raw[stage].at[zero, rows], layout=plgpu.Layout.WGMMA_UPCAST_2X)


def _scale(smem: Any, stage: int, zero: Any, tile: int):
    return plgpu.load(smem.scale[stage].at[zero, pl.ds(tile * PAGE_SIZE, PAGE_SIZE)], layout=row_layout())


def _store(half: Any, zero: Any, tile: int, raw: Any, scale: Any) -> None:
    """Dequantizes a tile of 128 columns, a quarter of a page, 64 at a time: the output takes most of the registers."""
    for first in range(0, FP8_TILE, 64):
        # sm_90 converts e4m3 to float16 only.
        values = plgpu.layout_cast(raw[:, first : first + 64].astype(jnp.float16), plgpu.Layout.WGMMA)
        values = values.astype(jnp.float32).astype(jnp.bfloat16)
        # Exact: the scale is a power of two. Two values of 16 bits are multiplied by one instruction.
        scaled = values * lax.broadcast_in_dim(scale.astype(jnp.bfloat16), values.shape, [0])
        half[tile + zero, :, pl.ds(first, 64)] = scaled
