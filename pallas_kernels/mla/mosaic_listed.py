"""Attention to listed rows for Hopper, the kernel of DeepSeek-V4's decode: latent attention whose rows are gathered.

Its thread block is that of the decode kernel (`mosaic_latent.py`), with tiles of 64 listed rows for pages and without
rotated keys: a row of 512 values is key and value. It computes 64 heads of a query on a share of its list. The third
warpgroup gathers rows (`mosaic_gather.py`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import bodies
from pallas_kernels.mla import mosaic_gather
from pallas_kernels.mla.layout import HALF_DTYPES, LISTED_BYTES, LISTED_PLAIN, LISTED_WIDTH
from pallas_kernels.mla.mosaic_combine import store_partial, store_whole
from pallas_kernels.mla.mosaic_gather import PARTS, TILE, TileRows, copy_layout
from pallas_kernels.mla.mosaic_latent import LOG2E, NO_KEYS, ROWS, BlockMemory, TileShape, pair_stages, run, scratch
from pallas_kernels.mosaic import plgpu, row_layout

_REGISTERS = 216, 72  # of a warpgroup that computes, and of the one that gathers


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
    def values_dtype(self) -> jnp.dtype:
        return self.dtype

    @property
    def key_parts(self) -> int:
        return 4

    @property
    def cluster(self) -> int:
        return 1

    @property
    def shares(self) -> int:
        return -(-(self.window + self.entries) // self.share)


def supports(q: Any, array: Any, plain: int) -> bool:
    """Returns whether the kernel takes these queries and rows, or their shapes and types."""
    heads, width = q.shape[1:]
    if q.dtype not in HALF_DTYPES or width != LISTED_WIDTH or heads % ROWS:
        return False
    fp8_rows = (
        array.dtype == jnp.uint8
        and (plain, array.shape[-1]) == (LISTED_PLAIN, LISTED_BYTES)
        and q.dtype == jnp.bfloat16
    )
    return array.dtype == q.dtype or fp8_rows


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
      own: `[T, W]`, the rows with numbers -1 - t: W is 512 in q's dtype, or 584 bytes.
      window: rows `[R, W]`, numbers `[N, window]` and counts `[N]`.
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
    return kernel(q, sink, own, *window, *entries, layers, np.zeros((1, own.shape[1]), own.dtype))


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
    zeros: Any
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
        rows = self.rows_of(piece, 0)
        return rows, self.first_part(rows) if self.shape.fp8 else self.rows_of(piece, 1)

    def rows_of(self, piece, tile):
        """Returns where a tile's rows are: their numbers past a list's end are others."""
        in_window, place, real = self.slot(piece, tile)

        def of(numbers, most):
            slots = pl.ds(jnp.minimum(place, most - TILE), TILE)
            return lambda: plgpu.load(numbers.at[piece.query, slots], layout=copy_layout().reduce(1), optimized=False)

        numbers = lax.cond(
            in_window, of(self.window_numbers, self.shape.window), of(self.entry_numbers, self.shape.entries)
        )
        first = jnp.where(in_window, self.layers[1] * self.shape.window_rows, self.layers[2] * self.shape.entry_rows)
        return TileRows(numbers, in_window.astype(jnp.int32), first, real)

    @property
    def arrays(self):
        return self.own, self.window, self.entries, *([self.zeros] if self.shape.fp8 else [])

    def gather(self, call, rows, *part):
        return call(self.arrays, rows, *part, interpreted=self.shape.interpreted)

    def load_pair(self, piece, pair, pairs_before, carry):
        if self.shape.fp8:
            return self.dequantize_pair(piece, pair, pairs_before, *carry)
        following = self.rows_of(piece, 2 * pair + 2), self.rows_of(piece, 2 * pair + 3)
        for stage, rows in enumerate(carry):
            for half, target in enumerate((self.smem.left[stage], self.smem.right[stage])):
                pl.when(pairs_before > 0)(functools.partial(self.wait_until_free, stage, half))
                mosaic_gather.copy_half(target, self.arrays, rows, half, interpreted=self.shape.interpreted)
        return following

    def first_part(self, rows):
        return self.gather(mosaic_gather.fetch_exponents, rows), self.gather(mosaic_gather.fetch_part, rows, 0)

    def dequantize_pair(self, piece, pair, pairs_before, rows, fetched):
        """Dequantizes a pair of tiles into the stages when those are free; returns the rows of the following, begun.

        A tile is asked for in the L2 cache where its addresses are in registers anyway: more registers would spill.
        """
        zero = lax.shift_right_logical(pairs_before, 30)
        for stage in range(2):
            following = self.rows_of(piece, 2 * pair + stage + 1)
            packed, values = mosaic_gather.packer()(fetched[0]), fetched[1]
            for part in range(PARTS):
                if part + 1 < PARTS:
                    after = self.gather(mosaic_gather.fetch_part, rows, part + 1)
                else:
                    fetched = self.first_part(following)
                quarter = part // 2
                if part in (0, PARTS // 2):
                    pl.when(pairs_before > 0)(functools.partial(self.wait_until_free, stage, quarter // 2, zero))
                mosaic_gather.store_part(self.part(stage, quarter, zero), part, values, packed)
                if part % 2:
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(self.full(stage, quarter, zero))
                values = after
            self.gather(mosaic_gather.prefetch, following)
            rows = following
        return rows, fetched

    def finish_pair(self, pair):
        if self.shape.fp8:
            return
        for number, (stage, part) in enumerate(itertools.product(range(2), range(4))):
            mosaic_gather.wait_for_copies(number, interpreted=self.shape.interpreted)
            plgpu.barrier_arrive(self.full(stage, part, lax.shift_right_logical(pair, 30)))
