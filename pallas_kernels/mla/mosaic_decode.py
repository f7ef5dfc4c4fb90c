"""MLA decode for Hopper: paged latent attention, the kernel behind `mla_decode` and `mla_prefill_context`.

A persistent thread block computes its part of the schedule, 64 rows (query tokens x heads) of one request at a time.
Two warpgroups compute, a third loads by TMA. Pages are processed in pairs, `a` and `b`. The float32 output, 64 x 512
for DeepSeek-V3, fills the registers of two warpgroups, so warpgroup 0 owns its left half and warpgroup 1 its right
half; each computes the scores of one page of the pair, and multiplies both pages' weights with its half of the values:

    warpgroup 0:  scores a -> softmax a ------> O_left += P_a V_a -------------> O_left += P_b V_b
                                       \\ max, P_a                       / max, P_b
    warpgroup 1:  scores b -------------> softmax b -----> O_right += P_a V_a -> O_right += P_b V_b

The running maximum passes from a to b to the next pair's a, so no step waits for both warpgroups at once. Halves of a
page are refilled after their last read; if two tiles of a group are a cluster of two blocks, each fetches half of a
page for both by multicast. A page arrives in five parts, four quarters of its values and the rotated keys, and scores
begin with the first. P overwrites the rotated part of its page, which is dead after the scores. The split of O and the
order of steps follow FlashMLA (deepseek-ai, 2025).
"""

import dataclasses
import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import bodies
from pallas_kernels.mla import mosaic_fp8_cache as fp8_cache
from pallas_kernels.mla.layout import PAGE_SIZE
from pallas_kernels.mla.mosaic_combine import store_partial, store_whole
from pallas_kernels.mla.schedule import DecodeSchedule
from pallas_kernels.mosaic import plgpu, row_layout, swizzle_transforms

ROWS = 64
"""Rows of a tile: the M of a wgmma."""

VALUE_WIDTHS = (256, 512)
"""Supported latent widths: quarters are whole swizzled tiles, and two pages fit in shared memory."""

ROPE_WIDTH = 64

_LOG2E = math.log2(math.e)
_MASKED = -1e30  # a masked score, scaled
_START = -1e29  # the first running maximum: above a masked score, so that exp2 of the difference is 0
_NO_KEYS = -1e30  # log-sum-exp of a split without keys
_TOP, _TOTAL = 0, 2  # rows of `vectors`: 2 maxima, 2 x 2 totals; the log-sum-exp follows
_A, _B = 0, 1  # the stages of a pair of pages, and the warpgroups that own them
_PARTS, _ROPE = 5, 4  # parts of a page with a barrier each: four quarters of the values, the rotated keys
# Barriers by their number of arrivals, `once` and `twice`: an array takes fewer registers than single barriers.
_PART_FULL, _LEFT_FREE, _WEIGHTS_READY = 0, 2 * _PARTS, 2 * _PARTS + 2  # in `once`; one per stage and part, per stage
_RIGHT_FREE, _QUERY_FREE, _TOTALS_READY, _QUERY_FULL = 0, 2, 3, 4  # in `twice`; one for each stage, one, one, one


@dataclasses.dataclass(frozen=True)
class TileShape:
    """Static facts of a call."""

    heads: int
    queries: int
    """Query tokens of a group that are causal among themselves; 1 if every row sees the whole length."""
    rows: int
    """Rows of a group, padded: a multiple of 8 up to 64, of 64 beyond."""
    parts: int
    dtype: jnp.dtype
    scale: float
    interpreted: bool
    """The interpreter has neither the tensor core's carried accumulator nor operands in registers."""
    fp8: bool = False
    """Whether the cache holds FP8 rows (`layout.py`)."""
    value_width: int = 512
    """R, one of `VALUE_WIDTHS`."""

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scores are scaled after their maximum is taken: scale must be above 0, got {self.scale}")

    @property
    def factor(self) -> float:
        """Factor from a product of query and key to a score in log base 2; above 0."""
        return self.scale * _LOG2E

    @property
    def values_dtype(self) -> jnp.dtype:
        """The type in which latents are multiplied.

        For FP8 pages it is float16: sm_90 converts a pair of e4m3 to it in one instruction, to bfloat16 in four.
        """
        return jnp.dtype(jnp.float16) if self.fp8 else self.dtype

    @property
    def half(self) -> int:
        """Columns of the output that a warpgroup owns."""
        return self.value_width // 2

    @property
    def quarter(self) -> int:
        """Columns of a quarter of the values."""
        return self.value_width // 4

    @property
    def parts_of_row(self) -> tuple[Any, ...]:
        """The columns of a cached row: the quarters of the latent, and the rotated key."""
        quarters = (pl.ds(first, self.quarter) for first in range(0, self.value_width, self.quarter))
        return (*quarters, pl.ds(self.value_width, ROPE_WIDTH))

    @property
    def tiles(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster: two tiles of a group read the same pages, and each fetches half of a page for both."""
        return 2 if self.tiles % 2 == 0 and not self.fp8 else 1

    @property
    def tile_rows(self) -> int:
        return min(self.rows, ROWS)

    def tile(self):
        """Returns the number of this block's tile of a group."""
        return lax.axis_index("cluster") * self.cluster + lax.axis_index("block")


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
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="mla_decode",
        interpret=interpret,
    )
    views = fp8_cache.views(pages) if shape.fp8 else pages
    return kernel(latents, rotated, views, page_table, table_rows, lengths, first_page, schedule.cuts.reshape(-1))


def _scratch(shape: TileShape) -> dict[str, Any]:
    dtype, values, half = shape.dtype, shape.values_dtype, shape.half

    def tiles(count: int, width: int, dtype):
        return plgpu.SMEM((count, ROWS, width), dtype, transforms=swizzle_transforms(dtype, 128 // dtype.itemsize))

    quarters = tiles(2, shape.quarter, values)
    rope_then_weights = plgpu.RefUnion(tiles(1, ROPE_WIDTH, dtype), tiles(1, PAGE_SIZE, values))
    pages = {"left": quarters, "right": quarters, "rope": rope_then_weights}
    return {
        "query": plgpu.RefUnion(
            [tiles(1, shape.value_width, values), tiles(1, ROPE_WIDTH, dtype)],
            tiles(2, half, dtype),
            tiles(2, half // 2, jnp.dtype(jnp.float32)),
        ),
        **{f"{name}_{stage}": array for name, array in pages.items() for stage in "ab"},
        "vectors": plgpu.SMEM((7, ROWS), jnp.float32),  # one array: each is rounded up to 1,024 bytes
        "once": plgpu.Barrier(num_barriers=2 * _PARTS + 4),
        "twice": plgpu.Barrier(num_arrivals=2, num_barriers=5),
    } | (
        {} if shape.cluster == 1 else {"free_in_both": plgpu.ClusterBarrier(collective_axes=("block",), num_barriers=4)}
    )


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
class _BlockMemory:
    """Global arrays and shared memory of a thread block."""

    shape: TileShape
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
    smem: Any

    @property
    def tile_rows(self):
        """This block's rows of a group."""
        return pl.ds(self.shape.tile() * ROWS, self.shape.tile_rows)

    def part(self, stage: int, part: int, zero):
        """Returns a part of the page in a stage, `[64, R / 4]`, or `[64, 64]` for the rotated keys."""
        if part == _ROPE:
            return self.smem.rope[stage][0].at[zero]
        half = self.smem.left if part < 2 else self.smem.right
        return half[stage].at[part % 2 + zero]

    def weights(self, stage: int, zero=0):
        """Returns the memory of the weights of the page in a stage, `[64, 64]`, previously of its rotated keys."""
        return self.smem.rope[stage][1].at[zero]

    def query(self, part: int, zero=0):
        """Returns the queries' columns that multiply a part of a page, `[64, R / 4]` or `[64, 64]`."""
        latents, rotated = self.smem.query[0]
        return rotated.at[zero] if part == _ROPE else latents.at[zero, :, self.shape.parts_of_row[part]]

    @property
    def shared_along(self) -> str | None:
        """The axis of the blocks to which a copy of a page is sent."""
        return "block" if self.shape.cluster > 1 else None

    def wait_until_free(self, stage: int, half: int, zero=0) -> None:
        """Waits until a half of a stage may be overwritten in all blocks of a cluster.

        Producers signal each other. Consumers, which have no registers left, arrive only in their own block.
        """
        arrivals, first = (self.smem.once, _LEFT_FREE) if half == 0 else (self.smem.twice, _RIGHT_FREE)
        plgpu.barrier_wait(arrivals.at[first + stage + zero])
        if self.shape.cluster > 1:
            both = self.smem.free_in_both.at[2 * stage + half + zero]
            plgpu.barrier_arrive(both)
            plgpu.barrier_wait(both)

    def full(self, stage: int, part: int, zero):
        """Returns the barrier at which a part of the page in a stage arrives."""
        return self.smem.once.at[_PART_FULL + stage * _PARTS + part + zero]

    def wait_for(self, stage: int, zero, *parts: int) -> None:
        """Waits until parts of the page in a stage have arrived."""
        for part in parts:
            plgpu.barrier_wait(self.full(stage, part, zero))

    def pieces(self, visit, init):
        """Folds `visit(piece, index, carry)` over the pieces of this block's part."""
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


def _body(shape: TileShape, *arrays: Any, **smem: Any):
    names = [field.name for field in dataclasses.fields(_BlockMemory)][1:-1]
    memory = _BlockMemory(shape, **dict(zip(names, arrays, strict=True)), smem=_pair_stages(smem))
    warpgroup = lax.axis_index("warpgroup")
    registers, registers_of_producer = (216, 72) if shape.fp8 else (240, 24)

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(registers_of_producer, action="decrease")
        _produce(memory)

    for index, consume in ((0, _consume_left), (1, _consume_right)):

        @pl.when(warpgroup == index)
        def attend(index=index, consume=consume):
            plgpu.set_max_registers(registers, action="increase")
            memory.pieces(lambda piece, number, _: _attend_piece(memory, index, consume, piece, number), None)
            plgpu.wait_smem_to_gmem(0)


def _pair_stages(smem: dict[str, Any]) -> types.SimpleNamespace:
    """Returns the scratch by name, with `x_a` and `x_b` as the pair `x`.

    Stages are apart so that each has its own aliases.
    """
    pairs = {name[:-2]: (ref, smem[name[:-1] + "b"]) for name, ref in smem.items() if name.endswith("_a")}
    return types.SimpleNamespace(**(smem | pairs))


def _produce(memory: _BlockMemory):
    """Runs in the third warpgroup: fetches a piece's queries and, part by part, its pages."""
    smem, fp8 = memory.smem, memory.shape.fp8
    load_pair = fp8_cache.load_pair if fp8 else _load_pair

    def visit(piece, number, pairs_before):
        def pair(i, fetched):
            fetched = load_pair(memory, piece, i, pairs_before + i, fetched)
            pl.when(i == 0)(lambda: _load_query(memory, piece, number))
            return fetched

        lax.fori_loop(0, piece.pairs, pair, fp8_cache.first_pair(memory, piece) if fp8 else None)
        pl.when(piece.pairs == 0)(lambda: _load_query(memory, piece, number))
        return pairs_before + piece.pairs, number + 1

    pairs, pieces = memory.pieces(lambda piece, number, carry: visit(piece, number, carry[0]), (jnp.int32(0),) * 2)

    @pl.when(pieces > 0)
    def _():
        plgpu.barrier_wait(smem.twice.at[_QUERY_FREE])

    @pl.when(pairs > 0)
    def _():
        for stage in (_A, _B):
            for half in range(2):
                memory.wait_until_free(stage, half)


def _load_query(memory: _BlockMemory, piece: _PageRange, number):
    smem = memory.smem

    @pl.when(number > 0)
    def _():
        plgpu.barrier_wait(smem.twice.at[_QUERY_FREE])

    @pl.when(piece.pairs > 0)
    def _():
        rows = pl.ds(0, memory.shape.tile_rows)
        latents, rotated = smem.query[0]
        for source, target, first in (
            (memory.latents, latents, 0),
            (memory.rotated, rotated, memory.rotated.shape[-1] - ROPE_WIDTH),
        ):
            own = source.at[piece.group, memory.tile_rows, pl.ds(first, target.shape[-1])]
            plgpu.copy_gmem_to_smem(own, target.at[0, rows], smem.twice.at[_QUERY_FULL])

    @pl.when(piece.pairs == 0)
    def _():  # the output is staged in the queries' memory, so even an empty piece waits for it
        for _ in range(2):
            plgpu.barrier_arrive(smem.twice.at[_QUERY_FULL])


def _load_pair(memory: _BlockMemory, piece: _PageRange, pair, pairs_before, _) -> None:
    """Fetches a pair of pages of a piece into the stages."""
    for stage in (_A, _B):
        _load_page(memory, piece, 2 * pair + stage, stage, pairs_before)


def _load_page(memory: _BlockMemory, piece: _PageRange, number, stage: int, pairs_before) -> None:
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


def _attend_piece(memory: _BlockMemory, half: int, consume, piece: _PageRange, number):
    """Computes one consumer's share of a piece: its half of the output, and of the pages' scores."""
    smem = memory.smem
    # Addresses must look loop-variant to the compiler: it would keep constant ones, and their 70 descriptors, in
    # registers, and spill. A shifted counter is always 0.
    piece_zero = lax.shift_right_logical(number, 30)
    query_free, totals_ready = (smem.twice.at[name + piece_zero] for name in (_QUERY_FREE, _TOTALS_READY))
    plgpu.barrier_wait(smem.twice.at[_QUERY_FULL + piece_zero])

    def pair(i, carry):
        return consume(memory, piece, piece.begin + 2 * i, lax.shift_right_logical(i, 30), carry)

    quarter = plgpu.layout_cast(jnp.zeros((ROWS, memory.shape.quarter), jnp.float32), plgpu.Layout.WGMMA)
    output = (quarter, quarter)
    top = plgpu.layout_cast(jnp.full((ROWS,), _START, jnp.float32), row_layout())
    total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row_layout())
    output, top, total = lax.fori_loop(0, piece.pairs, pair, (output, top, total))

    parity = lax.rem(number, jnp.int32(2))  # the other warpgroup may still read the totals of the previous piece
    smem.vectors[_TOTAL + 2 * parity + half] = total
    plgpu.barrier_arrive(totals_ready)
    plgpu.barrier_wait(totals_ready)
    total = _load_vector(memory, _TOTAL + 2 * parity) + _load_vector(memory, _TOTAL + 2 * parity + 1)
    seen = total > 0
    output = _scaled(output, jnp.where(seen, 1.0 / total, 0.0))
    lse = top + jnp.log(total) * _LOG2E

    @pl.when(piece.whole)
    def _():
        store_whole(memory, half, piece, output, jnp.where(seen, lse / _LOG2E, jnp.inf))

    @pl.when(jnp.logical_not(piece.whole))
    def _():
        store_partial(memory, half, piece, output, jnp.where(seen, lse, _NO_KEYS))

    plgpu.barrier_arrive(query_free)


def _consume_left(memory: _BlockMemory, piece: _PageRange, page_a, zero, carry):
    """Runs in warpgroup 0: scores of page a, left half of the values of both."""
    smem = memory.smem
    output, top_before, total = carry
    scores = _scores(memory, piece, page_a, _A, zero)
    weights, top_a, alpha = _softmax(scores, top_before, memory.shape.factor)
    own = weights.astype(memory.shape.values_dtype)
    _publish(memory, piece, page_a, _A, zero, own, top_a)
    total = total * alpha + weights.sum(axis=1)
    output = _accumulate(memory, output, alpha, _A, zero, 0, own)
    _release_left(memory, _A + zero)

    plgpu.barrier_wait(smem.once.at[_WEIGHTS_READY + _B + zero])
    memory.wait_for(_B, zero, 0, 1)
    top_b = _load_vector(memory, _TOP + _B)
    beta = jnp.exp2(top_a - top_b)
    output = _accumulate(memory, output, beta, _B, zero, 0)
    _release_left(memory, _B + zero)
    return output, top_b, total * beta


def _consume_right(memory: _BlockMemory, piece: _PageRange, page_a, zero, carry):
    """Runs in warpgroup 1: scores of page b, right half of the values of both."""
    smem = memory.smem
    output, top_before, total = carry
    scores = _scores(memory, piece, page_a + 1, _B, zero)
    plgpu.barrier_wait(smem.once.at[_WEIGHTS_READY + _A + zero])
    top_a = _load_vector(memory, _TOP)
    alpha = jnp.exp2(top_before - top_a)
    weights, top_b, beta = _softmax(scores, top_a, memory.shape.factor)
    own = weights.astype(memory.shape.values_dtype)
    _publish(memory, piece, page_a + 1, _B, zero, own, top_b)
    total = total * (alpha * beta) + weights.sum(axis=1)

    memory.wait_for(_A, zero, 2, 3)
    output = _accumulate(memory, output, alpha, _A, zero, 1)
    plgpu.barrier_arrive(smem.twice.at[_RIGHT_FREE + _A + zero])
    output = _accumulate(memory, output, beta, _B, zero, 1, own)
    plgpu.barrier_arrive(smem.twice.at[_RIGHT_FREE + _B + zero])
    return output, top_b, total


def _release_left(memory: _BlockMemory, stage):
    """Releases a page after warpgroup 0's last read."""
    plgpu.barrier_arrive(memory.smem.once.at[_LEFT_FREE + stage])
    plgpu.barrier_arrive(memory.smem.twice.at[_RIGHT_FREE + stage])


def _softmax(scores, top, factor: float):
    """Returns weights relative to the new running maximum, that maximum, and the factor for the previous sums.

    Scores are scaled by `factor` within the subtraction, one instruction for each; maxima are of scaled scores.
    """
    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
    return jnp.exp2(scores * factor - _columns(new_top, PAGE_SIZE)), new_top, jnp.exp2(top - new_top)


def _scores(memory: _BlockMemory, piece: _PageRange, page, stage, zero):
    """Returns the unscaled, masked scores [64, 64] of a page.

    A page past the end of the piece is entirely masked.
    """
    shape = memory.shape

    def products(accumulator):
        for part in range(_PARTS):
            memory.wait_for(stage, zero, part)
            plgpu.wgmma(accumulator, memory.query(part, zero), memory.part(stage, part, zero).T)
        return accumulator[...]

    scores = pl.run_scoped(products, plgpu.ACC((ROWS, PAGE_SIZE), jnp.float32))
    length = jnp.where(page < piece.end, piece.length, 0)

    def masked():
        column = plgpu.broadcasted_iota(jnp.int32, (ROWS, PAGE_SIZE), 1, layout=plgpu.Layout.WGMMA) + page * PAGE_SIZE
        limit = length
        if shape.queries > 1:
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS, PAGE_SIZE), 0, layout=plgpu.Layout.WGMMA)
            query = lax.div(row + shape.tile() * ROWS, jnp.int32(shape.heads))
            limit = query + (length - (shape.queries - 1))
        return jnp.where(column < limit, scores, _MASKED / shape.factor)

    return lax.cond((page + 1) * PAGE_SIZE > length - (shape.queries - 1), masked, lambda: scores)


def _publish(memory: _BlockMemory, piece: _PageRange, page, stage: int, zero, weights, top):
    """Publishes a page's weights and maximum to the other warpgroup, and zeroes the page's unwritten values.

    Those may hold NaN, and 0 * NaN is NaN.
    """
    smem = memory.smem
    written = piece.length - jnp.minimum(page, piece.end - 1) * PAGE_SIZE

    @pl.when(written < PAGE_SIZE)
    def _():
        def clear(chunk, _):
            quarter = lax.rem(chunk, jnp.int32(2))
            columns = pl.ds(pl.multiple_of(lax.div(chunk, jnp.int32(2)) * 64, 64), 64)
            row = plgpu.broadcasted_iota(jnp.int32, (PAGE_SIZE, 64), 0, layout=plgpu.Layout.WGMMA)
            for half in (smem.left[stage], smem.right[stage]):
                values = plgpu.load(half.at[quarter, :, columns], layout=plgpu.Layout.WGMMA)
                half[quarter, :, columns] = jnp.where(row < written, values, jnp.zeros((), values.dtype))

        lax.fori_loop(0, memory.shape.half // 64, clear, None)

    smem.rope[stage][1][zero] = weights
    smem.vectors[_TOP + stage] = top
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.once.at[_WEIGHTS_READY + stage + zero])


def _accumulate(memory: _BlockMemory, output, shrink, stage: int, zero, half: int, own=None):
    """Returns output * shrink + a page's weights @ a half of its values, as two quarters [64, R / 4].

    Weights of a warpgroup's own page, `own`, are still in its registers; the other's are in shared memory.
    """
    output, shape = _scaled(output, shrink), memory.shape
    shared = own is None or shape.interpreted
    weights = memory.weights(stage, zero) if shared else own

    def multiply(accumulators):
        for quarter, accumulator in enumerate(accumulators):
            plgpu.wgmma(accumulator, weights, memory.part(stage, 2 * half + quarter, zero))

    if not shape.interpreted:
        return pl.run_state(multiply)(tuple(map(plgpu.ACC.init, output)))

    def fresh(*accumulators):
        multiply(accumulators)
        return [accumulator[...] for accumulator in accumulators]

    products = pl.run_scoped(fresh, *[plgpu.ACC((ROWS, shape.quarter), jnp.float32)] * 2)
    return tuple(before + product for before, product in zip(output, products, strict=True))


def _scaled(output, factor):
    """Returns the quarters of an output, each row times its factor."""
    return tuple(quarter * _columns(factor, quarter.shape[1]) for quarter in output)


def _load_vector(memory: _BlockMemory, index):
    return plgpu.load(memory.smem.vectors.at[index], layout=row_layout())


def _columns(x, width: int):
    return lax.broadcast_in_dim(x, (ROWS, width), [0])
