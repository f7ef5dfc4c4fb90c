"""Ragged attention for Hopper in materialized form: the kernel behind `mla_prefill`, `_spans` and `_topk`.

Each query attends to a span of keys: those of its segment up to itself, or also cached keys of its request. A thread
block computes 128 consecutive tokens of the flat batch and one head; each of two compute warpgroups has 64 tokens, a
third loads keys and values by TMA. Blocks of keys are 128 tokens, 64 where heads
are wide, from the one in which the first query's span begins to the one in which the last one's ends. Only blocks in
which some span begins or ends are masked. The warpgroups take turns at the tensor core, so that one's softmax overlaps
the other's products (FlashAttention-3, Shah et al. 2024, section 3.1). Late tokens, which see most, start first.

Sparse attention passes a bit per pair of query and key. Then every block of scores is masked by its bits, read from the
L2 cache.

There is a thread block per 128 tokens and head, unless multiprocessors are reserved for transfers. Then persistent
blocks process the same items in rounds of alternating direction, which balances long and short ones.
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
from pallas_kernels.mosaic import plgpu, row_layout, swizzle_transforms

BLOCK = 128
"""Query tokens of a thread block; the flat batch is padded to a multiple."""

PADDING = 1 << 30
"""The start of the span of a query without keys: above every key."""

TILE_COLUMNS = 64
"""Columns of a tile of 16-bit values in shared memory: 128 bytes, the widest swizzle."""

KEY_BLOCKS = {(128, 128): 128, (192, 128): 128, (256, 256): 64}
"""Keys of a step by supported widths of keys and values: two steps and the queries fit in 227 KiB."""

_ROWS = 64
_WORD = 32  # keys whose bits share a word
_LOG2E = math.log2(math.e)
_MASKED = -1e30  # a masked score
_START = -1e29  # the first running maximum: above a masked score, so that exp2 of the difference is 0


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """Static facts of a call."""

    tokens: int
    heads: int
    key_width: int
    value_width: int
    dtype: jnp.dtype
    scale: float
    interpreted: bool
    """The interpreter has neither the tensor core's carried accumulator nor operands in registers."""
    key_block: int = 128
    """Keys of a step."""
    stages: int = 2
    """Blocks of keys and values in shared memory."""
    shared_width: int = 0
    """Columns of a key that all heads share, a separate array."""
    blocks: int | None = None
    """Persistent thread blocks; None for one per item."""
    use_topk: bool = False
    """Queries attend to the keys of their bitmasks; else to those of their spans."""

    @property
    def own_width(self) -> int:
        """Columns of a key that are a head's own."""
        return self.key_width - self.shared_width

    @property
    def items(self) -> int:
        """Blocks of queries of all heads."""
        return self.tokens // BLOCK * self.heads


@functools.partial(jax.jit, static_argnames=("shape", "interpret"))
def attend_spans(
    shape: PrefillShape,
    q: jax.Array,
    k: jax.Array | tuple[jax.Array, jax.Array],
    v: jax.Array,
    ranges: jax.Array,
    *seen: jax.Array,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the attention of every query to the keys of its span, or to its top-k keys.

    Equal calls of a program share a trace and a lowering.

    Args:
      q: `[T, H, key_width]`, T a multiple of 128.
      k: `[K, H, key_width]`, K a multiple of `key_block`; or with a `shared_width` `[K, H, own_width]` and
        `[K, shared_width]`.
      v: `[K, H, value_width]`, finite in every block of keys that is read.
      ranges: `[T / 128, 2]` int32, the first block of keys of each block of queries and their number.
      *seen: starts and ends of spans, `[T]` int32 each, never decreasing; PADDING and 0 for queries without keys, which
        follow all others of their 64. With `use_topk`, `[K / 32, T]` int32 bitmasks, whose bit b of word w is set if a
        query attends to key 32 w + b.

    Returns:
      out `[T, H, value_width]` and lse `[H, T]` float32; 0 and +inf for queries without keys.
    """
    kernel = plgpu.kernel(
        bodies.traced(functools.partial(_body, shape)),
        out_type=(
            jax.ShapeDtypeStruct((shape.tokens, shape.heads, shape.value_width), shape.dtype),
            jax.ShapeDtypeStruct((shape.heads, shape.tokens), jnp.float32),
        ),
        grid=(shape.blocks or shape.items,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="mla_prefill_topk" if shape.use_topk else "mla_prefill",
        interpret=interpret,
    )
    return kernel(q, *(k if isinstance(k, tuple) else (k,)), v, ranges, *seen)


def _scratch(shape: PrefillShape) -> dict[str, Any]:
    tiled = swizzle_transforms(shape.dtype, TILE_COLUMNS)

    def array(*dims: int):
        return plgpu.SMEM(dims, shape.dtype, transforms=tiled)

    scratch = {
        "query": plgpu.RefUnion(array(2, _ROWS, shape.key_width), array(2, _ROWS, shape.value_width)),
        "key": array(shape.stages, shape.key_block, shape.own_width),
        "value": array(shape.stages, shape.key_block, shape.value_width),
        "row_lse": plgpu.SMEM((2, _ROWS), jnp.float32),
        "query_full": plgpu.Barrier(num_arrivals=2),
        "key_full": plgpu.Barrier(num_arrivals=2 if shape.shared_width else 1, num_barriers=shape.stages),
        "value_full": plgpu.Barrier(num_barriers=shape.stages),
        "key_free": plgpu.Barrier(num_arrivals=2, num_barriers=shape.stages),
        "value_free": plgpu.Barrier(num_arrivals=2, num_barriers=shape.stages),
        "turn": plgpu.Barrier(num_arrivals=2),
    }
    if shape.blocks is not None:
        scratch["query_free"] = plgpu.Barrier(num_arrivals=2)
    if shape.shared_width:
        scratch["shared_key"] = array(shape.stages, shape.key_block, shape.shared_width)
    return scratch | ({"weights": array(2, _ROWS, shape.key_block)} if shape.interpreted else {})


@dataclasses.dataclass(frozen=True)
class _PrefillWork:
    """One item of a thread block: its tokens, head and range of key blocks.

    `number` and `done` count the thread block's previous items and key blocks; Python's 0 if there is one item.
    """

    shape: PrefillShape
    q: Any
    k: Any
    shared: Any
    v: Any
    seen: tuple
    out: Any
    lse: Any
    smem: Any
    head: Any
    first_token: Any
    first_block: Any
    blocks: Any
    number: Any
    done: Any

    @property
    def steps(self):
        """Key blocks of the thread block up to the end of this item."""
        return self.done + self.blocks

    def stage(self, i):
        """Returns the stage of the item's key block `i`."""
        return lax.rem(self.done + i, jnp.int32(self.shape.stages))


def _body(shape: PrefillShape, *arrays, **smem):
    memory = types.SimpleNamespace(**smem)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        _drain(shape, memory, _walk(shape, arrays, memory, _produce))

    @pl.when(warpgroup < 2)
    def attend():
        plgpu.set_max_registers(232, action="increase")
        _walk(shape, arrays, memory, lambda work: _consume(work, warpgroup))


def _walk(shape: PrefillShape, arrays: tuple, smem: Any, visit):
    """Calls `visit` with each item of this thread block; returns how many key blocks they have."""
    block = lax.axis_index("block")

    def step(number, item, done):
        work = _work(shape, arrays, smem, item, number, done)
        visit(work)
        return work.steps

    if shape.blocks is None:
        return step(0, block, 0)
    blocks, full_rounds = shape.blocks, shape.items // shape.blocks

    def place(number):  # alternating: the block with the longest item of a round gets the shortest of the next
        return jnp.where(lax.rem(number, jnp.int32(2)) == 0, block, blocks - 1 - block)

    more = place(jnp.int32(full_rounds)) < shape.items - full_rounds * blocks
    rounds = full_rounds + jnp.where(more, 1, 0)
    return lax.fori_loop(0, rounds, lambda n, done: step(n, n * blocks + place(n), done), jnp.int32(0))


def _work(shape: PrefillShape, arrays: tuple, smem: Any, item, number, done) -> _PrefillWork:
    q, k, *others = arrays
    shared, v, ranges, *seen, out, lse = others if shape.shared_width else (None, *others)
    query_block = (shape.tokens // BLOCK - 1) - lax.div(item, jnp.int32(shape.heads))
    head = lax.rem(item, jnp.int32(shape.heads))
    inputs = (shape, q, k, shared, v, tuple(seen), out, lse, smem)
    key_blocks = ranges[query_block, 0], ranges[query_block, 1]
    return _PrefillWork(*inputs, head, query_block * BLOCK, *key_blocks, number, done)


def _produce(work: _PrefillWork):
    smem, block = work.smem, work.shape.key_block
    if work.shape.blocks is not None:
        pl.when(work.number > 0)(lambda: plgpu.barrier_wait(smem.query_free))

    @pl.when(work.blocks > 0)
    def _():
        for half in range(2):
            rows = pl.ds(work.first_token + half * _ROWS, _ROWS)
            plgpu.copy_gmem_to_smem(work.q.at[rows, work.head], smem.query[0].at[half], smem.query_full)

    if work.shape.blocks is not None:

        @pl.when(work.blocks == 0)
        def _():  # zeros are staged in the queries' memory too, and a second `query_free` must not overtake the first
            for _ in range(2):
                plgpu.barrier_arrive(smem.query_full)

    def step(i, _):
        stage = work.stage(i)
        tokens = pl.ds((work.first_block + i) * block, block)
        for source, target, full, free in (
            (work.k, smem.key, smem.key_full, smem.key_free),
            (work.v, smem.value, smem.value_full, smem.value_free),
        ):

            @pl.when(work.done + i >= work.shape.stages)
            def _(free=free):
                plgpu.barrier_wait(free.at[stage])

            plgpu.copy_gmem_to_smem(source.at[tokens, work.head], target.at[stage], full.at[stage])
            if source is work.k and work.shared is not None:
                plgpu.copy_gmem_to_smem(work.shared.at[tokens], smem.shared_key.at[stage], full.at[stage])

    lax.fori_loop(0, work.blocks, step, None)


def _drain(shape: PrefillShape, smem: Any, steps) -> None:
    """Waits for the last reads: a barrier must not be invalidated while an arrival is pending."""
    for stage in range(shape.stages):

        @pl.when(steps > stage)
        def _(stage=stage):
            plgpu.barrier_wait(smem.key_free.at[stage])
            plgpu.barrier_wait(smem.value_free.at[stage])

    if shape.blocks is not None:
        plgpu.barrier_wait(smem.query_free)


def _consume(work: _PrefillWork, warpgroup):
    smem, shape = work.smem, work.shape
    first_row = work.first_token + warpgroup * _ROWS
    mask = _topk_mask if shape.use_topk else _span_mask(work, first_row)

    pl.when((work.blocks > 0) | (shape.blocks is not None))(lambda: plgpu.barrier_wait(smem.query_full))
    pl.when((work.blocks > 0) & (warpgroup == 1))(lambda: _take_turn(smem))

    def step(i, carry):
        output, top, total = carry
        stage = work.stage(i)
        scores = _scores(work, warpgroup, i, stage, first_row, mask)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        total = total * shrink + weights.sum(axis=1)
        output = output * lax.broadcast_in_dim(shrink, output.shape, [0])
        plgpu.barrier_wait(smem.value_full.at[stage])
        _take_turn(smem)
        output = _accumulate(work, warpgroup, output, weights.astype(shape.dtype), smem.value.at[stage])
        plgpu.barrier_arrive(smem.value_free.at[stage])
        return output, new_top, total

    output = plgpu.layout_cast(jnp.zeros((_ROWS, shape.value_width), jnp.float32), plgpu.Layout.WGMMA)
    top = plgpu.layout_cast(jnp.full((_ROWS,), _START, jnp.float32), row_layout())
    total = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), row_layout())
    output, top, total = lax.fori_loop(0, work.blocks, step, (output, top, total))

    @pl.when((work.blocks > 0) & (warpgroup == 0))
    def _():
        _take_turn(smem)

    seen = total > 0
    inverse = jnp.where(seen, 1.0 / total, 0.0)
    _store(
        work,
        warpgroup,
        first_row,
        output * lax.broadcast_in_dim(inverse, output.shape, [0]),
        jnp.where(seen, top / _LOG2E + jnp.log(total), jnp.inf),
    )


def _take_turn(smem):
    """Passes the tensor core to the other warpgroup and waits to get it back."""
    plgpu.barrier_arrive(smem.turn)
    plgpu.barrier_wait(smem.turn)


def _scores(work: _PrefillWork, warpgroup, i, stage, first_row, mask):
    """Returns scaled scores [64, key_block] in log base 2, masked to the keys of each row."""
    smem, block = work.smem, work.shape.key_block
    # Always 0, but opaque to the compiler, which would otherwise keep the queries' descriptors in registers and spill.
    zero = lax.shift_right_logical(i, 30)
    first_key = (work.first_block + i) * block
    finish = mask(work, first_row, first_key)
    plgpu.barrier_wait(smem.key_full.at[stage])

    query, own = smem.query[0].at[warpgroup + zero], work.shape.own_width

    def products(accumulator):
        if work.shared is None:
            plgpu.wgmma(accumulator, query, smem.key.at[stage].T)
        else:
            plgpu.wgmma(accumulator, query.at[:, pl.ds(0, own)], smem.key.at[stage].T)
            plgpu.wgmma(accumulator, query.at[:, pl.ds(own, work.shape.shared_width)], smem.shared_key.at[stage].T)
        _take_turn(smem)
        return accumulator[...]

    scores = pl.run_scoped(products, plgpu.ACC((_ROWS, block), jnp.float32)) * (work.shape.scale * _LOG2E)
    plgpu.barrier_arrive(smem.key_free.at[stage])
    return finish(scores)


def _span_mask(work: _PrefillWork, first_row):
    """Returns the function that masks scores to each row's span."""
    starts, ends = (plgpu.load(x.at[pl.ds(first_row, _ROWS)], layout=row_layout(), optimized=False) for x in work.seen)
    last_start, first_end = work.seen[0][first_row + (_ROWS - 1)], work.seen[1][first_row]
    block = work.shape.key_block

    def mask(work, first_row, first_key):
        def finish(scores):
            def masked():
                key = plgpu.broadcasted_iota(jnp.int32, (_ROWS, block), 1, layout=plgpu.Layout.WGMMA) + first_key
                begun = key >= lax.broadcast_in_dim(starts, key.shape, [0])
                return jnp.where(begun & (key < lax.broadcast_in_dim(ends, key.shape, [0])), scores, _MASKED)

            crosses = (first_key + block > first_end) | (first_key < last_start)
            return lax.cond(crosses, masked, lambda: scores)

        return finish

    return mask


def _topk_mask(work: _PrefillWork, first_row, first_key):
    """Returns the function that masks scores to the top-k keys; their words load while the tensor core multiplies.

    A thread has columns 8 n + 2 t + {0, 1} of its rows, t from 0 to 3. After a shift by 2 t, the bits of a word have
    static positions: two instructions per bit.
    """
    block, first_word = work.shape.key_block, lax.div(first_key, jnp.int32(_WORD))
    rows = pl.ds(first_row, _ROWS)
    words = [
        plgpu.load(work.seen[0].at[first_word + w, rows], layout=row_layout(), optimized=False)
        for w in range(block // _WORD)
    ]

    def finish(scores):
        column = plgpu.broadcasted_iota(jnp.int32, (_ROWS, block), 1, layout=plgpu.Layout.WGMMA)
        word = lax.broadcast_in_dim(words[-1], column.shape, [0])
        for w in reversed(range(len(words) - 1)):
            word = jnp.where(column < (w + 1) * _WORD, lax.broadcast_in_dim(words[w], column.shape, [0]), word)
        bit = ((word >> (column & 6)) >> (column & 25)) & 1
        return jnp.where(bit != 0, scores, _MASKED)

    return finish


def _accumulate(work: _PrefillWork, warpgroup, output, weights, values):
    """Returns output + weights @ values, [64, value_width]."""
    if not work.shape.interpreted:
        return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, weights, values))(plgpu.ACC.init(output))
    staging = work.smem.weights.at[warpgroup]
    staging[...] = weights
    plgpu.commit_smem()

    def fresh(accumulator):
        plgpu.wgmma(accumulator, staging, values)
        return accumulator[...]

    return output + pl.run_scoped(fresh, plgpu.ACC(output.shape, jnp.float32))


def _store(work: _PrefillWork, warpgroup, first_row, output, lse):
    staging, rows = work.smem.query[1].at[warpgroup], pl.ds(first_row, _ROWS)
    staging[...] = output.astype(work.shape.dtype)
    work.smem.row_lse[warpgroup] = lse
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, work.out.at[rows, work.head])
    plgpu.copy_smem_to_gmem(work.smem.row_lse.at[warpgroup], work.lse.at[work.head, rows])
    plgpu.wait_smem_to_gmem(0)
    if work.shape.blocks is not None:
        plgpu.barrier_arrive(work.smem.query_free)
