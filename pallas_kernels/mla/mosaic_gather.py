"""Listed rows from global memory to the stages of an attention kernel on Hopper: `mosaic_listed.py`'s third warpgroup.

TMA gathers no rows on sm_90, and Mosaic indexes memory with scalars, so `gather_code.py` emits what reads them; eight
lanes read 64 values of a row. Rows of 16 bits go by `cp.async` straight to where the swizzle has them, so that
registers hold addresses alone. FP8 rows (`entries.py`) go to registers, 64 columns while those before are dequantized.
Their scales are powers of two, so that bfloat16 has room for every value.

A slot past a list's count gives zeros. Arrays are the step's own rows, the window's and the entries', each `[rows, W]`;
with FP8 rows a row of zeros `[1, W]` follows them.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.float8 import E4M3
from pallas_kernels.mla.layout import LISTED_BYTES, LISTED_PLAIN, LISTED_WIDTH, PAGE_SIZE
from pallas_kernels.mosaic import inline_mgpu, load_mosaic, plgpu, swizzle_transforms

TILE = PAGE_SIZE
"""Slots of a list that are multiplied at once."""

_HALF, _QUARTER = LISTED_WIDTH // 2, LISTED_WIDTH // 4
_COLUMNS = 64  # of a swizzled tile of 16-bit values; as many values of an FP8 row share a scale
_COPIES = 8  # groups of copies in a pair of tiles: the quarters of each
_FIRST_SCALE = LISTED_BYTES - 8
_PACKED = 16, 8  # exponents of four rows in an element: one for each of 128 threads
_INT32 = jnp.dtype(jnp.int32)

PARTS, ROTATED_PART = LISTED_WIDTH // _COLUMNS, LISTED_PLAIN // _COLUMNS
"""How many parts an FP8 row has, and the one that has rotated values and no scale."""


class TileRows(NamedTuple):
    """The rows of a tile: for each lane the numbers of its own, in `copy_layout`, and scalars."""

    numbers: Any
    in_window: Any
    first: Any  # row of the layer in the array
    real: Any  # slots before the list's end


def copy_layout() -> Any:
    """Returns the layout in which eight lanes have 64 values of a row."""
    return plgpu.Layout.SMEM_GMEM_COPY((TILE, _COLUMNS), jnp.bfloat16, 128)


def _exponent_layout() -> Any:
    """Returns the layout in which eight lanes have eight values of a row, one each."""
    tiling = plgpu.Tiling(((32, PARTS), (8, PARTS), (4, PARTS), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)


def _packed_layout() -> Any:
    """Returns the layout of one value per thread."""
    tiling = plgpu.Tiling((_PACKED, (4, PARTS), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def copy_half(target: Any, arrays: Sequence[Any], rows: TileRows, half: int, *, interpreted: bool) -> None:
    """Starts to copy half the columns of a tile to `target` `[2, 64, 128]`, in a group of copies for each quarter."""
    if not interpreted:
        copier(jnp.dtype(target.dtype))(target, *arrays, *rows, jnp.int32(half))
        return
    found = _rows_in_turn(arrays, rows, pl.ds(half * _HALF, _HALF))
    for quarter in range(2):
        target[quarter] = found[:, quarter * _QUARTER : (quarter + 1) * _QUARTER]


def wait_for_copies(number: int, *, interpreted: bool) -> None:
    """Waits for group `number` of the copies of a pair of tiles, and those before it."""
    if not interpreted:
        _waiter(_COPIES - 1 - number)()
    plgpu.commit_smem()


def fetch_part(arrays: Sequence[Any], rows: TileRows, part: int, *, interpreted: bool) -> jax.Array:
    """Reads 64 columns of a tile of FP8 rows: e4m3, or rotated ones in bfloat16."""
    if not interpreted:
        return part_fetcher(part)(*arrays, *rows)
    found = _rows_in_turn(arrays, rows, pl.ds(part * _COLUMNS, _COLUMNS if part < ROTATED_PART else 2 * _COLUMNS))
    if part < ROTATED_PART:
        return lax.bitcast_convert_type(found, E4M3)
    return lax.bitcast_convert_type(found.reshape(TILE, _COLUMNS, 2), jnp.bfloat16)


def fetch_exponents(arrays: Sequence[Any], rows: TileRows, *, interpreted: bool) -> jax.Array:
    """Reads the exponents of a tile's scales, int32 `[64, 8]`, an element of a row in each of eight lanes."""
    if not interpreted:
        return exponent_fetcher()(*arrays, *rows)
    return _rows_in_turn(arrays, rows, pl.ds(_FIRST_SCALE, PARTS)).astype(jnp.int32)


def store_part(quarter: Any, part: int, values: jax.Array, packed: jax.Array) -> None:
    """Stores what `fetch_part` has read, dequantized, to its half of a quarter `[64, 128]` bfloat16.

    `packed` is what `packer` makes of the tile's exponents.
    """
    if part < ROTATED_PART:  # sm_90 converts e4m3 to float16 alone
        values = values.astype(jnp.float16).astype(jnp.float32).astype(jnp.bfloat16)
        values *= lax.broadcast_in_dim(scale_of(part)(packed).astype(jnp.bfloat16), values.shape, [0])
    quarter[:, pl.ds(part % 2 * _COLUMNS, _COLUMNS)] = values


def prefetch(arrays: Sequence[Any], rows: TileRows, *, interpreted: bool) -> None:
    """Asks for a tile of FP8 rows in the L2 cache."""
    if not interpreted:
        _prefetcher()(*arrays, *rows)


def _rows_in_turn(arrays: Sequence[Any], rows: TileRows, columns: Any) -> jax.Array:
    """Reads columns of a tile's rows in the interpreter, row by row."""
    own, window, entries, *_ = arrays

    def read(i, found):
        number = rows.numbers[i]
        reads = [
            lambda: jnp.zeros(columns.size, found.dtype),
            lambda: own[-1 - number, columns],
            lambda: window[rows.first + number, columns],
            lambda: entries[rows.first + number, columns],
        ]
        which = jnp.where(i >= rows.real, 0, jnp.where(number < 0, 1, jnp.where(rows.in_window > 0, 2, 3)))
        return found.at[i].set(lax.switch(which, reads))

    return lax.fori_loop(0, TILE, read, jnp.zeros((TILE, columns.size), own.dtype))


def _types(arrays: int) -> tuple[Any, ...]:
    """Returns the types of so many arrays and `TileRows`."""
    return *[plgpu.RefType()] * arrays, copy_layout().reduce(1), *[plgpu.Layout.WG_SPLAT] * 3


@functools.cache
def copier(dtype: jnp.dtype) -> Any:
    """Returns the function that starts to copy a half of each row of a tile.

    Its arguments are half of a stage `[2, 64, 128]`, three arrays, `TileRows`, and which half of their columns to copy.
    """
    target = plgpu.RefType(swizzle_transforms(dtype, _COLUMNS))
    return plgpu.inline_mgpu(arg_types=(target, *_types(3), plgpu.Layout.WG_SPLAT))(_code().copy)


@functools.cache
def part_fetcher(part: int) -> Any:
    """Returns the function of four arrays and `TileRows` that does what `fetch_part` does."""
    dtype = jnp.dtype(E4M3 if part < ROTATED_PART else jnp.bfloat16)
    result = plgpu.ShapeDtypeStruct((TILE, _COLUMNS), dtype, layout=copy_layout())
    fetch = functools.partial(_code().fetch_part, part, copy_layout().to_mgpu())
    return plgpu.inline_mgpu(arg_types=_types(4), return_type=result)(fetch)


@functools.cache
def exponent_fetcher() -> Any:
    """Returns the function of four arrays and `TileRows` that does what `fetch_exponents` does."""
    result = plgpu.ShapeDtypeStruct((TILE, PARTS), _INT32, layout=_exponent_layout())
    fetch = functools.partial(_code().fetch_exponents, _exponent_layout().to_mgpu())
    return plgpu.inline_mgpu(arg_types=_types(4), return_type=result)(fetch)


@functools.cache
def packer() -> Any:
    """Returns the function of exponents that puts a lane's four of them into one int32 of `[16, 8]`."""

    def model(exponents: jax.Array) -> jax.Array:
        of_lanes = exponents.reshape(2, 4, 2, 4, PARTS)  # far, warp, near, row, as the layout has them
        shifts = jnp.arange(0, 32, 8).reshape(2, 1, 2, 1, 1)
        return (of_lanes << shifts).sum((0, 2)).reshape(_PACKED)

    def emit(*given: Any) -> Any:
        return _code().pack(_packed_layout().to_mgpu(), *given)

    result = plgpu.ShapeDtypeStruct(_PACKED, _INT32, layout=_packed_layout())
    return inline_mgpu(emit, (_exponent_layout(),), result, model)


@functools.cache
def scale_of(part: int) -> Any:
    """Returns the function of packed exponents that gives the scales of a part, float32 `[64]`."""

    def model(packed: jax.Array) -> jax.Array:
        of_lanes = packed[:, part].reshape(1, 4, 1, 4) >> jnp.arange(0, 32, 8).reshape(2, 1, 2, 1)
        return lax.bitcast_convert_type((of_lanes.reshape(TILE) & 255) << 23, jnp.float32)

    def emit(*given: Any) -> Any:
        return _code().scale(part, copy_layout().reduce(1).to_mgpu(), *given)

    result = plgpu.ShapeDtypeStruct((TILE,), jnp.dtype(jnp.float32), layout=copy_layout().reduce(1))
    return inline_mgpu(emit, (_packed_layout(),), result, model)


@functools.cache
def _prefetcher() -> Any:
    return plgpu.inline_mgpu(arg_types=_types(4))(_code().prefetch)


@functools.cache
def _waiter(groups: int) -> Any:
    """Returns the function that waits until at most the last `groups` groups of copies are under way."""
    return plgpu.inline_mgpu()(functools.partial(_code().wait, groups))


def _code() -> Any:
    """Returns the module that emits code, whose imports take the compiler's dialects."""
    load_mosaic()
    return importlib.import_module("pallas_kernels.mla.gather_code")
