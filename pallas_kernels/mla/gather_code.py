"""The code that `mosaic_gather.py` puts into kernels: references are memrefs, arrays and scalars Mosaic's fragments."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.mla.layout import LISTED_BYTES, LISTED_PLAIN, LISTED_WIDTH

_VALUES = 8  # that a thread reads at once, of the 64 that eight lanes read
_COPY_BYTES = 16  # the most that `cp.async` copies
_TILE_BYTES = 8 * 128  # of a swizzled tile
_HALF, _QUARTER, _COLUMNS = LISTED_WIDTH // 2, LISTED_WIDTH // 4, 64
_LINE_BYTES = 128  # of the L2 cache


def copy(_: Any, target: Any, own: Any, window: Any, entries: Any, *rows_and_half: Any) -> None:
    """Emits the copies of half a tile, a group of them for each quarter."""
    *rows, half = rows_and_half
    warp, row_of_tile, lane = _place_of_thread()
    column = arith.addi(arith.muli(_scalar(half), _c(2 * _HALF)), arith.muli(lane, _c(_COPY_BYTES)))
    copies = []
    for far, near, start, is_real in _rows(own, window, entries, *rows, row_bytes=4 * _HALF):
        # A swizzled tile is 8 rows of 128 bytes, whose 16 bytes change places by their row; a quarter is 8 x 2 tiles.
        row = arith.addi(row_of_tile, _c(4 * near))
        place = arith.addi(arith.muli(arith.xori(lane, row), _c(_COPY_BYTES)), arith.muli(row, _c(128)))
        place = arith.addi(place, arith.muli(warp, _c(2 * _TILE_BYTES)))
        to = utils.getelementptr(utils.memref_ptr(target), [place], _int(8))
        to = utils.getelementptr(to, [4 * far * 2 * _TILE_BYTES], _int(8))
        size = arith.select(is_real, _c(_COPY_BYTES), _c(0))
        copies.append((to, _pointer(arith.addi(start, arith.extui(_int(64), column))), size))
    for quarter in range(2):
        for (to, start, size), tile in itertools.product(copies, range(2)):
            to = utils.getelementptr(to, [(16 * quarter + tile) * _TILE_BYTES], _int(8))
            start = utils.getelementptr(start, [2 * _QUARTER * quarter + 128 * tile], _int(8))
            nvvm.cp_async_shared_global(to, start, _COPY_BYTES, nvvm.LoadCacheModifierKind.CG, cp_size=size)
        nvvm.cp_async_commit_group()


def wait(groups: int, _: Any) -> None:
    """Emits a wait until at most the last `groups` groups of copies are under way."""
    nvvm.cp_async_wait_group(groups)


def fetch_part(part: int, layout: Any, _: Any, *arrays_and_rows: Any) -> Any:
    """Emits the loads of 64 columns of a tile of FP8 rows."""
    lane, first, found = _place_of_thread()[2], part * _COLUMNS, []
    for start in _fp8_rows(*arrays_and_rows):
        if first < LISTED_PLAIN:
            words = [_load(_int(64), start, first, lane, _VALUES)]
        else:
            words = [_load(_int(64), start, first + each, lane, 2 * _VALUES) for each in (0, _VALUES)]
        whole = vector.from_elements(ir.VectorType.get((len(words),), _int(64)), words)
        element = ir.Float8E4M3FNType.get() if first < LISTED_PLAIN else ir.BF16Type.get()
        found.append(vector.bitcast(ir.VectorType.get((_VALUES,), element), whole))
    return _fragment(found, (64, _COLUMNS), layout)


def fetch_exponents(layout: Any, _: Any, *arrays_and_rows: Any) -> Any:
    """Emits the loads of the exponents of a tile of FP8 rows, one of a row in each of eight lanes."""
    lane, found = _place_of_thread()[2], []
    for start in _fp8_rows(*arrays_and_rows):
        exponent = _load(_int(8), start, LISTED_BYTES - 8, lane, 1)
        found.append(_single(arith.extui(_int(32), exponent)))
    return _fragment(found, (64, 8), layout, is_signed=True)


def pack(layout: Any, _: Any, exponents: Any) -> Any:
    """Emits one register of a thread's four exponents."""
    four = _c(0)
    for place, register in enumerate(exponents.registers.flat):
        four = arith.ori(four, arith.shli(_element(register), _c(8 * place)))
    return _fragment([_single(four)], (16, 8), layout, is_signed=True)


def scale(part: int, layout: Any, _: Any, packed: Any) -> Any:
    """Emits the powers of two of a part of four rows, whose exponents one of eight lanes has."""
    (register,) = packed.registers.flat
    all_lanes, groups_of_eight = _c(-1), _c(0x181F)
    four = nvvm.shfl_sync(all_lanes, _element(register), _c(part), groups_of_eight, nvvm.ShflKind.idx)
    found = []
    for place in range(4):
        bits = arith.shli(arith.andi(arith.shrui(four, _c(8 * place)), _c(255)), _c(23))
        found.append(_single(arith.bitcast(ir.F32Type.get(), bits)))
    return _fragment(found, (64,), layout)


def prefetch(_: Any, *arrays_and_rows: Any) -> None:
    """Emits requests for a tile of FP8 rows in the L2 cache."""
    offset = arith.minui(arith.muli(_place_of_thread()[2], _c(_LINE_BYTES)), _c(LISTED_BYTES - 1))
    for start in _fp8_rows(*arrays_and_rows):
        place = arith.addi(start, arith.extui(_int(64), offset))
        llvm.inline_asm(None, [place], "prefetch.global.L2 [$0];", "l", has_side_effects=True)


def _fp8_rows(own: Any, window: Any, entries: Any, zeros: Any, *rows: Any) -> Iterator[Any]:
    """Emits the address of each FP8 row that a thread reads."""
    for _, _, start, is_real in _rows(own, window, entries, *rows, row_bytes=LISTED_BYTES):
        yield arith.select(is_real, start, _address(zeros))


def _load(kind: Any, start: Any, offset: int, lane: Any, step: int) -> Any:
    """Emits the load of an integer at an offset, and `step` bytes further in each lane."""
    place = arith.addi(arith.muli(lane, _c(step)), _c(offset))
    return llvm.load(kind, _pointer(arith.addi(start, arith.extui(_int(64), place))), alignment=kind.width // 8)


def _rows(
    own: Any, window: Any, entries: Any, numbers: Any, in_window: Any, first: Any, real: Any, *, row_bytes: int
) -> Iterator[tuple[int, int, Any, Any]]:
    """Emits the address of each row that a thread reads, and whether its list has it.

    Thread t has rows 8 (t / 32) + t % 32 / 8 + 32 far + 4 near of a tile, as the layout says.
    """
    in_window, first, real = map(_scalar, (in_window, first, real))
    warp, row_of_tile, _ = _place_of_thread()
    listed = arith.select(arith.cmpi(arith.CmpIPredicate.ne, in_window, _c(0)), _address(window), _address(entries))
    for (far, near), register in zip(itertools.product(range(2), range(2)), numbers.registers.flat, strict=True):
        number = _element(register)
        is_own = arith.cmpi(arith.CmpIPredicate.slt, number, _c(0))
        number = arith.select(is_own, arith.subi(_c(-1), number), arith.addi(first, number))
        start = arith.muli(arith.extsi(_int(64), number), utils.c(row_bytes, _int(64)))
        start = arith.addi(arith.select(is_own, _address(own), listed), start)
        slot = arith.addi(arith.addi(arith.muli(warp, _c(8)), row_of_tile), _c(32 * far + 4 * near))
        yield far, near, start, arith.cmpi(arith.CmpIPredicate.slt, slot, real)


def _place_of_thread() -> tuple[Any, Any, Any]:
    """Emits a thread's warp in its warpgroup, its row among four that a warp reads at once, and its lane of eight."""
    thread = arith.remui(utils.thread_idx(), _c(128))
    return arith.divui(thread, _c(32)), arith.remui(arith.divui(thread, _c(8)), _c(4)), arith.remui(thread, _c(8))


def _fragment(registers: list[Any], shape: tuple[int, ...], layout: Any, is_signed: bool | None = None) -> Any:
    placed = np.empty(layout.registers_shape(shape), dtype=object)
    for index, register in zip(np.ndindex(placed.shape), registers, strict=True):
        placed[index] = register
    return mgpu.FragmentedArray(_registers=placed, _layout=layout, _is_signed=is_signed)


def _element(register: Any) -> Any:
    return vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register


def _single(element: Any) -> Any:
    return vector.broadcast(ir.VectorType.get((1,), element.type), element)


def _address(ref: Any) -> Any:
    return llvm.ptrtoint(_int(64), utils.memref_ptr(ref))


def _pointer(address: Any) -> Any:
    return llvm.inttoptr(llvm.PointerType.get(1), address)


def _scalar(fragment: Any) -> Any:
    return fragment.registers.item()


def _int(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)


def _c(value: int) -> Any:
    return utils.c(value, _int(32))
