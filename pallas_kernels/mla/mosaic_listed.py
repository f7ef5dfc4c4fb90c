"""Attention to listed rows for Hopper, the kernel of DeepSeek-V4's decode: latent attention whose rows are gathered.

Its thread block is that of the decode kernel (`mosaic_latent.py`), with tiles of 64 listed rows for pages and without
rotated keys: a row of 512 values is key and value. It computes 64 heads of a query on a share of its list. The third
warpgroup copies rows by `cp.async`, eight lanes for 128 bytes of a row, straight to where the swizzle has them, so that
registers hold addresses alone. (TMA gathers no rows on sm_90.) For a slot past a list's count it copies no bytes, which
writes zeros. `inline_mgpu` emits the copies, because Mosaic indexes memory with scalars.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import bodies
from pallas_kernels.mla.layout import HALF_DTYPES, PAGE_SIZE
from pallas_kernels.mla.mosaic_combine import store_partial, store_whole
from pallas_kernels.mla.mosaic_latent import LOG2E, NO_KEYS, ROWS, BlockMemory, TileShape, pair_stages, run, scratch
from pallas_kernels.mosaic import plgpu, row_layout, swizzle_transforms

WIDTH = 512
"""Values of a row."""

TILE = PAGE_SIZE
"""Slots of a list that are multiplied at once."""

_HALF, _QUARTER = WIDTH // 2, WIDTH // 4
_REGISTERS = 216, 72  # of a warpgroup that computes, and of the one that copies
_GROUPS = 8  # of copies in a pair of tiles: the quarters of each
_COPY_BYTES = 16  # the most that `cp.async` copies
_TILE_BYTES = 8 * 128


@dataclasses.dataclass(frozen=True)
class ListShape(TileShape):
    """Static facts of a call. `heads` and `rows` are the heads; `parts` is not used."""

    window: int = 0
    """Slots of a list before its entries, a multiple of 64."""
    entries: int = 0
    """Slots of entries, a multiple of 64."""
    share: int = 0
    """Slots that a thread block reads, a multiple of 64."""
    window_rows: int = 0
    entry_rows: int = 0
    """Rows of each array in a layer."""

    @property
    def key_parts(self) -> int:
        return 4

    @property
    def cluster(self) -> int:
        return 1

    @property
    def shares(self) -> int:
        return -(-(self.window + self.entries) // self.share)


def supports(q: Any, array: Any) -> bool:
    """Returns whether the kernel takes these queries and rows, or their shapes and types: not FP8 rows."""
    heads, width = q.shape[1:]
    return array.dtype == q.dtype and q.dtype in HALF_DTYPES and width == WIDTH and heads % ROWS == 0


def attend_lists(
    shape: ListShape,
    q: jax.Array,
    sink: jax.Array,
    own: jax.Array,
    window: Sequence[jax.Array],
    entries: Sequence[jax.Array],
    layers: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the attention of every query to its list of rows.

    Args:
      q: `[N, H, 512]`, H a multiple of 64.
      sink: `[L, H]` float32.
      own: `[T, 512]`, the rows with numbers -1 - t.
      window: rows `[R, 512]`, numbers `[N, window]` and counts `[N]`.
      entries: the same of entries.
      layers: `[3]` int32: that of the sink, of the window's rows and of the entries'.

    Returns:
      out `[N, H, 512]` in q's dtype and lse `[N, H]` where a list is one share; else float32 `[N * shares, H, 512]` and
      `[N * shares, H]`. lse is to base two, -1e30 without keys; a share without slots writes nothing but the first.
    """
    N, heads, width = q.shape
    kernel = plgpu.kernel(
        bodies.traced(functools.partial(_body, shape)),
        out_type=(
            jax.ShapeDtypeStruct((N * shape.shares, heads, width), shape.dtype if shape.shares == 1 else jnp.float32),
            jax.ShapeDtypeStruct((N * shape.shares, heads), jnp.float32),
        ),
        grid=(N * shape.shares * shape.tiles,),  # blocks of the same rows are neighbors
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="attend_lists",
        interpret=interpret,
    )
    return kernel(q, sink, own, *window, *entries, layers)


def _body(shape: ListShape, *arrays: Any, **smem: Any):
    run(_ListMemory(shape, pair_stages(smem), *arrays), *_REGISTERS)


@dataclasses.dataclass(frozen=True)
class _SharePiece:
    """The tiles [0, end) of a share of a query's list, all traced int32."""

    query: Any
    first_slot: Any
    window_count: Any
    entry_count: Any
    end: Any
    begin: Any
    group: Any

    @property
    def partial(self):
        return self.group

    @property
    def pairs(self):
        return lax.div(self.end + 1, jnp.int32(2))


@dataclasses.dataclass(frozen=True)
class _ListMemory(BlockMemory):
    """Global arrays of a block that attends to listed rows."""

    shape: ListShape
    q: Any
    sink: Any
    own: Any
    window: Any
    window_numbers: Any
    window_counts: Any
    entries: Any
    entry_numbers: Any
    entry_counts: Any
    layers: Any
    out: Any
    lse: Any

    @property
    def partial_out(self):
        return self.out

    @property
    def partial_lse(self):
        return self.lse

    @property
    def first_head(self):
        return lax.rem(lax.axis_index("block"), jnp.int32(self.shape.tiles)) * ROWS

    @property
    def tile_rows(self):
        """This block's heads."""
        return pl.ds(self.first_head, ROWS)

    @property
    def place(self):
        """This block's share of all lists: the number of its query times shares, and its share."""
        return lax.div(lax.axis_index("block"), jnp.int32(self.shape.tiles))

    def pieces(self, visit, init):
        shares, listed = jnp.int32(self.shape.shares), self.place
        query, share = lax.div(listed, shares), lax.rem(listed, shares)
        window, entries = self.window_counts[query], self.entry_counts[query]
        slots = jnp.where(entries > 0, self.shape.window + entries, window)
        first = share * self.shape.share
        tiles = lax.div(jnp.clip(slots - first, 0, self.shape.share) + (TILE - 1), jnp.int32(TILE))
        piece = _SharePiece(query, first, window, entries, tiles, jnp.int32(0), listed)
        some = jnp.where((tiles > 0) | (share == 0), 1, 0)
        return lax.fori_loop(0, some, lambda number, carry: visit(piece, number, carry), init)

    def query_copies(self, piece):
        half, (latents, _) = ROWS // 2, self.smem.query[0]

        def copy(first):
            return self.q.at[piece.query, pl.ds(self.first_head + first, half)], latents.at[0, pl.ds(first, half)]

        return copy(0), copy(half)

    def start(self, half):
        top, total = super().start(half)
        sink = plgpu.load(self.sink.at[self.layers[0], self.tile_rows], layout=row_layout(), optimized=False)
        is_first = lax.rem(self.place, jnp.int32(self.shape.shares)) == 0
        sink = sink * LOG2E + jnp.where(is_first, 0.0, -jnp.inf)
        top = jnp.maximum(top, sink)
        return top, jnp.exp2(sink - top) if half == 0 else total

    def slot(self, piece, tile):
        """Returns whether a tile is of the window, its first slot there or among the entries, and how many are real."""
        slot = piece.first_slot + tile * TILE
        in_window = slot < self.shape.window
        place = jnp.where(in_window, slot, slot - self.shape.window)
        real = jnp.where(in_window, piece.window_count, piece.entry_count) - place
        return in_window, place, jnp.where(tile < piece.end, real, 0)

    def mask(self, piece, page, scores):
        _, _, real = self.slot(piece, page)

        def masked():
            column = plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 1, layout=plgpu.Layout.WGMMA)
            return jnp.where(column < real, scores, self.masked_score)

        return lax.cond(real < TILE, masked, lambda: scores)

    def store(self, half, piece, output, lse, seen):
        store = store_whole if self.shape.shares == 1 else store_partial
        store(self, half, piece, output, jnp.where(seen, lse, NO_KEYS))

    def first_pair(self, piece):
        return tuple(self.numbers(piece, tile) for tile in range(2))

    def numbers(self, piece, tile):
        """Reads the numbers of a tile's rows, for each lane those of its rows; past a list's end others."""
        in_window, place, _ = self.slot(piece, tile)

        def of(numbers, most):
            slots = pl.ds(jnp.minimum(place, most - TILE), TILE)
            return lambda: plgpu.load(numbers.at[piece.query, slots], layout=copy_layout().reduce(1), optimized=False)

        return lax.cond(
            in_window, of(self.window_numbers, self.shape.window), of(self.entry_numbers, self.shape.entries)
        )

    def load_pair(self, piece, pair, pairs_before, carry):
        following = tuple(self.numbers(piece, 2 * pair + 2 + stage) for stage in range(2))
        for stage, numbers in enumerate(carry):
            in_window, _, real = self.slot(piece, 2 * pair + stage)
            first = jnp.where(
                in_window, self.layers[1] * self.shape.window_rows, self.layers[2] * self.shape.entry_rows
            )
            for half, target in enumerate((self.smem.left[stage], self.smem.right[stage])):
                pl.when(pairs_before > 0)(functools.partial(self.wait_until_free, stage, half))
                copy = _copy_in_turn if self.shape.interpreted else copier(self.shape.dtype)
                arrays = target, self.own, self.window, self.entries, numbers
                copy(*arrays, in_window.astype(jnp.int32), first, real, jnp.int32(half))
        return following

    def finish_pair(self, pair):
        for number, (stage, part) in enumerate(itertools.product(range(2), range(4))):
            if not self.shape.interpreted:
                _waiter(_GROUPS - 1 - number)()
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.full(stage, part, lax.shift_right_logical(pair, 30)))


def copy_layout() -> Any:
    """Returns the layout in which eight lanes have 128 bytes of a row."""
    return plgpu.Layout.SMEM_GMEM_COPY((TILE, 64), jnp.bfloat16, 128)


def _copy_in_turn(target, own, window, entries, numbers, in_window, first, real, half) -> None:
    """Does in the interpreter what `copier`'s function does, row by row."""
    columns = pl.ds(half * _HALF, _HALF)

    def copy(i, rows):
        number = numbers[i]
        read = [
            lambda: jnp.zeros(_HALF, rows.dtype),
            lambda: own[-1 - number, columns],
            lambda: window[first + number, columns],
            lambda: entries[first + number, columns],
        ]
        which = jnp.where(i >= real, 0, jnp.where(number < 0, 1, jnp.where(in_window > 0, 2, 3)))
        return rows.at[i].set(lax.switch(which, read))

    rows = lax.fori_loop(0, TILE, copy, jnp.zeros((TILE, _HALF), target.dtype))
    for quarter in range(2):
        target[quarter] = rows[:, quarter * _QUARTER : (quarter + 1) * _QUARTER]


@functools.cache
def copier(dtype: jnp.dtype) -> Any:
    """Returns the function that starts to copy a half of each row of a tile, in a group of copies for each quarter.

    Its arguments are half of a stage `[2, 64, 128]`; the arrays `own`, window and entries `[rows, 512]`; the tile's row
    numbers in `copy_layout`; whether they are of the window; the first row of the layer there; how many rows are real;
    which half of their columns to copy.
    """
    target, memory, scalar = plgpu.RefType(swizzle_transforms(dtype, 64)), plgpu.RefType(), plgpu.Layout.WG_SPLAT
    types = (target, memory, memory, memory, copy_layout().reduce(1), *[scalar] * 4)
    return plgpu.inline_mgpu(arg_types=types)(_copy)


def _copy(_, target, own, window, entries, numbers, *scalars) -> None:
    """Emits the copies; references are memrefs, arrays and scalars Mosaic's fragments."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

    i8, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 32, 64))
    in_window, first, real, half = (scalar.registers.item() for scalar in scalars)
    less, differs = arith.CmpIPredicate.slt, arith.CmpIPredicate.ne

    def c(value: int) -> Any:
        return utils.c(value, i32)

    def address(ref: Any) -> Any:
        return llvm.ptrtoint(i64, utils.memref_ptr(ref))

    def element(register: Any) -> Any:
        return vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register

    # Thread t has the numbers of rows 8 (t / 32) + t % 32 / 8 + {0, 4, 32, 36}, as the layout says.
    thread = arith.remui(utils.thread_idx(), c(128))
    warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(8))
    row_of_tile = arith.remui(arith.divui(thread, c(8)), c(4))
    listed = arith.select(arith.cmpi(differs, in_window, c(0)), address(window), address(entries))
    column = arith.addi(arith.muli(half, c(2 * _HALF)), arith.muli(lane, c(_COPY_BYTES)))
    copies = []
    for (far, near), number in zip(itertools.product(range(2), range(2)), numbers.registers.flat, strict=True):
        # A swizzled tile is 8 rows of 128 bytes, whose 16 bytes change places by their row; a quarter is 8 x 2 tiles.
        row = arith.addi(row_of_tile, c(4 * near))
        place = arith.addi(arith.muli(arith.xori(lane, row), c(_COPY_BYTES)), arith.muli(row, c(128)))
        place = arith.addi(place, arith.muli(warp, c(2 * _TILE_BYTES)))
        to = utils.getelementptr(utils.memref_ptr(target), [place], i8)
        to = utils.getelementptr(to, [4 * far * 2 * _TILE_BYTES], i8)

        number = element(number)
        is_own = arith.cmpi(less, number, c(0))
        number = arith.select(is_own, arith.subi(c(-1), number), arith.addi(first, number))
        start = arith.muli(arith.extsi(i64, number), utils.c(2 * WIDTH, i64))
        start = arith.addi(arith.select(is_own, address(own), listed), arith.addi(start, arith.extui(i64, column)))
        slot = arith.addi(arith.addi(arith.muli(warp, c(8)), row), c(32 * far))
        size = arith.select(arith.cmpi(less, slot, real), c(_COPY_BYTES), c(0))
        copies.append((to, llvm.inttoptr(llvm.PointerType.get(1), start), size))
    for quarter in range(2):
        for (to, start, size), tile in itertools.product(copies, range(2)):
            to = utils.getelementptr(to, [(16 * quarter + tile) * _TILE_BYTES], i8)
            start = utils.getelementptr(start, [2 * _QUARTER * quarter + 128 * tile], i8)
            nvvm.cp_async_shared_global(to, start, _COPY_BYTES, nvvm.LoadCacheModifierKind.CG, cp_size=size)
        nvvm.cp_async_commit_group()


@functools.cache
def _waiter(groups: int) -> Any:
    """Returns the function that waits until at most the last `groups` groups of copies are under way."""

    def wait(_: Any) -> None:
        from jaxlib.mlir.dialects import nvvm

        nvvm.cp_async_wait_group(groups)

    return plgpu.inline_mgpu()(wait)
