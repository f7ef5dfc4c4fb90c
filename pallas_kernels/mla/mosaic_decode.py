"""MLA decode for Hopper: paged latent attention, the kernel behind `mla_decode` and `mla_prefill_context`.

A persistent thread block computes its part of the schedule, 64 rows (query tokens x heads) of one request at a time, as
`mosaic_latent.py` says. A third warpgroup loads pages by TMA; if two tiles of a group are a cluster of two blocks, each
fetches half of a page for both by multicast.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import bodies
from pallas_kernels.mla import mosaic_fp8_cache as fp8_cache
from pallas_kernels.mla.layout import PAGE_SIZE
from pallas_kernels.mla.mosaic_combine import store_partial, store_whole
from pallas_kernels.mla.mosaic_latent import (
    LOG2E,
    NO_KEYS,
    ROPE_WIDTH,
    ROWS,
    BlockMemory,
    TileShape,
    pair_stages,
    run,
    scratch,
)
from pallas_kernels.mla.schedule import DecodeSchedule
from pallas_kernels.mosaic import plgpu

VALUE_WIDTHS = (256, 512)
"""Supported latent widths: quarters are whole swizzled tiles, and two pages fit in shared memory."""


def padded_rows(rows: int) -> int:
    """Pads a group's rows for the kernel: TMA copies at least 8 of a swizzled tile, a wgmma multiplies 64."""
    return -(-rows // 8) * 8 if rows < ROWS else -(-rows // ROWS) * ROWS


def part_count(rows: int, multiprocessors: int) -> int:
    """Counts the schedule's parts for groups of `rows` padded rows: a thread block per tile and part fills the GPU."""
    return max(1, multiprocessors // -(-rows // ROWS))


def attend_pages(
    shape: TileShape,
    latents: jax.Array,
    rotated: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    table_rows: jax.Array,
    lengths: jax.Array,
    first_page: jax.Array,
    schedule: DecodeSchedule,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Computes the attention of every group's rows over its pages.

    Args:
      latents: `[B, rows, R or more]` of `values_dtype`, the part of group b's queries that multiplies latents.
      rotated: `[B, rows, 64 or more]` of `dtype`; its last 64 columns multiply rotated keys.
      page_table: `[requests, MP]` int32; group b uses row `table_rows[b]` of it, up to `lengths[b]` tokens.
      first_page: `[1]` int32, added to each page id.

    Returns:
      out `[B, rows, R]` and lse `[B, rows]` float32 of the groups that are not split; and of the splits, float32,
      unnormalized log base 2: partial out `[2 * parts, rows, R]` and lse `[2 * parts, rows]`. A part writes its first
      piece, if split, at 2p and its last at 2p + 1.
    """
    groups, partials = latents.shape[0], 2 * shape.parts
    kernel = plgpu.kernel(
        bodies.traced(functools.partial(_body, shape)),
        out_type=(
            jax.ShapeDtypeStruct((groups, shape.rows, shape.value_width), shape.dtype),
            jax.ShapeDtypeStruct((groups, shape.rows), jnp.float32),
            jax.ShapeDtypeStruct((partials, shape.rows, shape.value_width), jnp.float32),
            jax.ShapeDtypeStruct((partials, shape.rows), jnp.float32),
        ),
        grid=(shape.parts, shape.tiles // shape.cluster),
        grid_names=("part", "cluster"),
        cluster=(shape.cluster,),
        cluster_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="mla_decode",
        interpret=interpret,
    )
    views = fp8_cache.views(pages) if shape.fp8 else pages
    return kernel(latents, rotated, views, page_table, table_rows, lengths, first_page, schedule.cuts.reshape(-1))


@dataclasses.dataclass(frozen=True)
class _PageRange:
    """The pages [begin, end) of one group that this part works on, all traced int32."""

    group: Any
    begin: Any
    end: Any
    whole: Any
    partial: Any
    length: Any

    @property
    def pairs(self):
        return lax.div(self.end - self.begin + 1, jnp.int32(2))


@dataclasses.dataclass(frozen=True)
class _PagedMemory(BlockMemory):
    """Global arrays of a block that attends to pages."""

    latents: Any
    rotated: Any
    pages: Any
    page_table: Any
    table_rows: Any
    lengths: Any
    first_page: Any
    cuts: Any
    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any

    @property
    def tile_rows(self):
        """This block's rows of a group."""
        return pl.ds(self.shape.tile() * ROWS, self.shape.tile_rows)

    @property
    def shared_along(self) -> str | None:
        """The axis of the blocks to which a copy of a page is sent."""
        return "block" if self.shape.cluster > 1 else None

    def pieces(self, visit, init):
        part = lax.axis_index("part")
        group0, group1, page1 = (self.cuts[2 * part + i] for i in (0, 2, 3))

        def step(group, carry):
            length = self.lengths[group]
            pages = lax.div(jnp.maximum(length, 0) + (PAGE_SIZE - 1), jnp.int32(PAGE_SIZE))
            begin = jnp.where(group == group0, self.cuts[2 * part + 1], 0)
            end = jnp.where(group == group1, page1, pages)
            whole = (begin == 0) & (end == pages)
            partial = 2 * part + jnp.where(group == group0, 0, 1)
            return visit(_PageRange(group, begin, end, whole, partial, length), group - group0, carry)

        return lax.fori_loop(group0, group1 + jnp.where(page1 > 0, 1, 0), step, init)

    def query_copies(self, piece):
        (latents, rotated), first = self.smem.query[0], self.rotated.shape[-1] - ROPE_WIDTH
        rows = pl.ds(0, self.shape.tile_rows)

        def copy(source, target, first):
            own = source.at[piece.group, self.tile_rows, pl.ds(first, target.shape[-1])]
            return own, target.at[0, rows]

        return copy(self.latents, latents, 0), copy(self.rotated, rotated, first)

    def first_pair(self, piece):
        return fp8_cache.first_pair(self, piece) if self.shape.fp8 else None

    def load_pair(self, piece, pair, pairs_before, carry):
        return (fp8_cache.load_pair if self.shape.fp8 else _load_pair)(self, piece, pair, pairs_before, carry)

    def mask(self, piece, page, scores):
        shape = self.shape
        length = jnp.where(page < piece.end, piece.length, 0)

        def masked():
            column = plgpu.broadcasted_iota(jnp.int32, (ROWS, PAGE_SIZE), 1, layout=plgpu.Layout.WGMMA)
            column, limit = column + page * PAGE_SIZE, length
            if shape.queries > 1:
                row = plgpu.broadcasted_iota(jnp.int32, (ROWS, PAGE_SIZE), 0, layout=plgpu.Layout.WGMMA)
                query = lax.div(row + shape.tile() * ROWS, jnp.int32(shape.heads))
                limit = query + (length - (shape.queries - 1))
            return jnp.where(column < limit, scores, self.masked_score)

        return lax.cond((page + 1) * PAGE_SIZE > length - (shape.queries - 1), masked, lambda: scores)

    def clear(self, piece, page, stage):
        written = piece.length - jnp.minimum(page, piece.end - 1) * PAGE_SIZE

        @pl.when(written < PAGE_SIZE)
        def _():
            def clear(chunk, _):
                quarter = lax.rem(chunk, jnp.int32(2))
                columns = pl.ds(pl.multiple_of(lax.div(chunk, jnp.int32(2)) * 64, 64), 64)
                row = plgpu.broadcasted_iota(jnp.int32, (PAGE_SIZE, 64), 0, layout=plgpu.Layout.WGMMA)
                for half in (self.smem.left[stage], self.smem.right[stage]):
                    values = plgpu.load(half.at[quarter, :, columns], layout=plgpu.Layout.WGMMA)
                    half[quarter, :, columns] = jnp.where(row < written, values, jnp.zeros((), values.dtype))

            lax.fori_loop(0, self.shape.half // 64, clear, None)

    def store(self, half, piece, output, lse, seen):
        @pl.when(piece.whole)
        def _():
            store_whole(self, half, piece, output, jnp.where(seen, lse / LOG2E, jnp.inf))

        @pl.when(jnp.logical_not(piece.whole))
        def _():
            store_partial(self, half, piece, output, jnp.where(seen, lse, NO_KEYS))


def _body(shape: TileShape, *arrays: Any, **smem: Any):
    run(_PagedMemory(shape, pair_stages(smem), *arrays), *((216, 72) if shape.fp8 else (240, 24)))


def _load_pair(memory: _PagedMemory, piece: _PageRange, pair, pairs_before, _) -> None:
    """Fetches a pair of pages of a piece into the stages."""
    for stage in range(2):
        _load_page(memory, piece, 2 * pair + stage, stage, pairs_before)


def _load_page(memory: _PagedMemory, piece: _PageRange, number, stage: int, pairs_before) -> None:
    """Fetches a page of a piece into a stage when that is free; past the end, the last page."""
    zero, reused = lax.shift_right_logical(pairs_before, 30), pairs_before > 0
    row, index = memory.table_rows[piece.group], jnp.minimum(piece.begin + number, piece.end - 1)
    page = memory.first_page[0] + memory.page_table[row, index]
    for part, columns in enumerate(memory.shape.parts_of_row):
        if part in (0, 2):
            pl.when(reused)(functools.partial(memory.wait_until_free, stage, part // 2, zero))
        source, target = memory.pages.at[page, :, columns], memory.part(stage, part, zero)
        full = memory.full(stage, part, zero)
        plgpu.copy_gmem_to_smem(source, target, full, collective_axes=memory.shared_along)
