"""Latent attention in a thread block on Hopper: two warpgroups that share scores, and a third that loads keys.

A block has 64 rows (query tokens x heads); keys come in pages of 64, in pairs, `a` and `b`. The float32 output, 64 x
512 for DeepSeek-V3, fills the registers of two warpgroups, so warpgroup 0 owns its left half and warpgroup 1 its right
half; each computes the scores of one page of the pair, and multiplies both pages' weights with its half of the values:

    warpgroup 0:  scores a -> softmax a ------> O_left += P_a V_a -------------> O_left += P_b V_b
                                       \\ max, P_a                       / max, P_b
    warpgroup 1:  scores b -------------> softmax b -----> O_right += P_a V_a -> O_right += P_b V_b

The running maximum passes from a to b to the next pair's a, so no step waits for both warpgroups at once. Halves of a
page are refilled after their last read. A page arrives in five parts, four quarters of its values and the rotated keys,
and scores begin with the first. P overwrites the rotated part of its page, which is dead after the scores. The split of
O and the order of steps follow FlashMLA (deepseek-ai, 2025).
"""

import abc
import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mla.layout import PAGE_SIZE
from pallas_kernels.mosaic import plgpu, row_layout, swizzle_transforms

ROWS = 64
"""Rows of a tile: the M of a wgmma."""

ROPE_WIDTH = 64
LOG2E = math.log2(math.e)
NO_KEYS = -1e30
"""The log-sum-exp of rows without keys, to base two."""

_MASKED = -1e30  # a masked score, scaled
_START = -1e29  # the first running maximum: above a masked score, so that exp2 of the difference is 0
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
    """R: quarters are whole swizzled tiles."""

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scores are scaled after their maximum is taken: scale must be above 0, got {self.scale}")

    @property
    def factor(self) -> float:
        """Factor from a product of query and key to a score in log base 2; above 0."""
        return self.scale * LOG2E

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
    def key_parts(self) -> int:
        """Parts of a row that are multiplied with the queries."""
        return _PARTS

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


def scratch(shape: TileShape) -> dict[str, Any]:
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
class BlockMemory(abc.ABC):
    """Shared memory of a thread block, and where its rows of keys come from and its results go."""

    shape: TileShape
    smem: Any

    @abc.abstractmethod
    def pieces(self, visit: Callable[[Any, Any, Any], Any], init: Any) -> Any:
        """Folds `visit(piece, index, carry)` over the pieces of this block. A piece has `begin`, `end` and `pairs`."""

    @abc.abstractmethod
    def query_copies(self, piece: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Returns the two copies that fetch a piece's queries: sources and targets."""

    def first_pair(self, piece: Any) -> Any:
        """Returns what `load_pair` carries to a piece's first pair."""
        return None

    @abc.abstractmethod
    def load_pair(self, piece: Any, pair: Any, pairs_before: Any, carry: Any) -> Any:
        """Starts to fetch a pair of pages of a piece into the stages when those are free."""

    def finish_pair(self, pair: Any) -> None:
        """Waits for what `load_pair` has started, if it does not arrive at barriers by itself."""
        return

    def start(self, half: int) -> tuple[Any, Any]:
        """Returns the first running maximum, and the sum of weights that a warpgroup starts with."""
        top = plgpu.layout_cast(jnp.full((ROWS,), _START, jnp.float32), row_layout())
        return top, plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row_layout())

    @abc.abstractmethod
    def mask(self, piece: Any, page: Any, scores: Any) -> Any:
        """Returns unscaled scores [64, 64] of a page with `masked_score` where a row does not see a key."""

    def clear(self, piece: Any, page: Any, stage: int) -> None:
        """Zeroes a page's values that nobody has written; those may hold NaN, and 0 * NaN is NaN."""
        return

    @abc.abstractmethod
    def store(self, half: int, piece: Any, output: Any, lse: Any, seen: Any) -> None:
        """Stores a warpgroup's half of a piece's output; `lse` is to base two, of rows that have `seen` a key."""

    @property
    def masked_score(self) -> float:
        """An unscaled score that becomes a weight of 0."""
        return _MASKED / self.shape.factor

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


def run(memory: BlockMemory, registers: int, registers_of_producer: int) -> None:
    """Runs a thread block of three warpgroups, of which two compute and the third loads."""
    warpgroup = lax.axis_index("warpgroup")

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


def pair_stages(smem: dict[str, Any]) -> types.SimpleNamespace:
    """Returns the scratch by name, with `x_a` and `x_b` as the pair `x`.

    Stages are apart so that each has its own aliases.
    """
    pairs = {name[:-2]: (ref, smem[name[:-1] + "b"]) for name, ref in smem.items() if name.endswith("_a")}
    return types.SimpleNamespace(**(smem | pairs))


def _produce(memory: BlockMemory):
    """Runs in the third warpgroup: fetches a piece's queries and, part by part, its pages."""
    smem = memory.smem

    def visit(piece, number, pairs_before):
        def pair(i, fetched):
            fetched = memory.load_pair(piece, i, pairs_before + i, fetched)
            pl.when(i == 0)(lambda: _load_query(memory, piece, number))
            memory.finish_pair(i)
            return fetched

        lax.fori_loop(0, piece.pairs, pair, memory.first_pair(piece))
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


def _load_query(memory: BlockMemory, piece: Any, number):
    smem = memory.smem

    @pl.when(number > 0)
    def _():
        plgpu.barrier_wait(smem.twice.at[_QUERY_FREE])

    @pl.when(piece.pairs > 0)
    def _():
        for source, target in memory.query_copies(piece):
            plgpu.copy_gmem_to_smem(source, target, smem.twice.at[_QUERY_FULL])

    @pl.when(piece.pairs == 0)
    def _():  # the output is staged in the queries' memory, so even an empty piece waits for it
        for _ in range(2):
            plgpu.barrier_arrive(smem.twice.at[_QUERY_FULL])


def _attend_piece(memory: BlockMemory, half: int, consume, piece: Any, number):
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
    top, total = memory.start(half)
    output, top, total = lax.fori_loop(0, piece.pairs, pair, (output, top, total))

    parity = lax.rem(number, jnp.int32(2))  # the other warpgroup may still read the totals of the previous piece
    smem.vectors[_TOTAL + 2 * parity + half] = total
    plgpu.barrier_arrive(totals_ready)
    plgpu.barrier_wait(totals_ready)
    total = _load_vector(memory, _TOTAL + 2 * parity) + _load_vector(memory, _TOTAL + 2 * parity + 1)
    seen = total > 0
    output = _scaled(output, jnp.where(seen, 1.0 / total, 0.0))
    memory.store(half, piece, output, top + jnp.log(total) * LOG2E, seen)
    plgpu.barrier_arrive(query_free)


def _consume_left(memory: BlockMemory, piece: Any, page_a, zero, carry):
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


def _consume_right(memory: BlockMemory, piece: Any, page_a, zero, carry):
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


def _release_left(memory: BlockMemory, stage):
    """Releases a page after warpgroup 0's last read."""
    plgpu.barrier_arrive(memory.smem.once.at[_LEFT_FREE + stage])
    plgpu.barrier_arrive(memory.smem.twice.at[_RIGHT_FREE + stage])


def _softmax(scores, top, factor: float):
    """Returns weights relative to the new running maximum, that maximum, and the factor for the previous sums.

    Scores are scaled by `factor` within the subtraction, one instruction for each; maxima are of scaled scores.
    """
    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
    return jnp.exp2(scores * factor - _columns(new_top, PAGE_SIZE)), new_top, jnp.exp2(top - new_top)


def _scores(memory: BlockMemory, piece: Any, page, stage, zero):
    """Returns the unscaled, masked scores [64, 64] of a page.

    A page past the end of the piece is entirely masked.
    """

    def products(accumulator):
        for part in range(memory.shape.key_parts):
            memory.wait_for(stage, zero, part)
            plgpu.wgmma(accumulator, memory.query(part, zero), memory.part(stage, part, zero).T)
        return accumulator[...]

    scores = pl.run_scoped(products, plgpu.ACC((ROWS, PAGE_SIZE), jnp.float32))
    return memory.mask(piece, page, scores)


def _publish(memory: BlockMemory, piece: Any, page, stage: int, zero, weights, top):
    """Publishes a page's weights and maximum to the other warpgroup, with zeros for the page's unwritten values."""
    smem = memory.smem
    memory.clear(piece, page, stage)
    smem.rope[stage][1][zero] = weights
    smem.vectors[_TOP + stage] = top
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.once.at[_WEIGHTS_READY + stage + zero])


def _accumulate(memory: BlockMemory, output, shrink, stage: int, zero, half: int, own=None):
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


def _load_vector(memory: BlockMemory, index):
    return plgpu.load(memory.smem.vectors.at[index], layout=row_layout())


def _columns(x, width: int):
    return lax.broadcast_in_dim(x, (ROWS, width), [0])
