"""Chunks of a step: they keep their bounds, every oldest prompt advances, and the ranks are balanced."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.scheduler.chunks import _mixed, _Mixtures, batch_size, schedule_chunks
from dsv3.scheduler.cost import chunks_cost, prefill_cost

PROMPT = st.tuples(st.integers(0, 30_000), st.integers(1, 30_000)).map(lambda pair: (pair[0], sum(pair)))
RANKS = st.lists(st.lists(PROMPT, max_size=20), min_size=1, max_size=6)
KEYS = 3000.0


def cost(pending: list[tuple[int, int]], taken: list[int]) -> float:
    return sum(prefill_cost(done, done + n, KEYS) for (done, _), n in zip(pending, taken, strict=False))


@settings(max_examples=200, deadline=None)
@given(ranks=RANKS, budget=st.integers(64, 8192), rows=st.integers(1, 16))
def test_chunks_keep_their_bounds_and_every_oldest_prompt_advances(ranks, budget, rows) -> None:
    chunks = schedule_chunks(ranks, budget, rows, KEYS)
    assert len(chunks) == len(ranks)
    for pending, taken in zip(ranks, chunks, strict=True):
        assert len(taken) <= rows and sum(taken) <= budget
        assert all(0 <= n <= length - done for (done, length), n in zip(pending, taken, strict=False))
        assert not pending or taken[0] > 0


@settings(deadline=None)
@given(pending=st.lists(PROMPT, min_size=1, max_size=20), idle=st.integers(0, 5), budget=st.integers(64, 8192))
def test_the_only_busy_rank_computes_its_prompts_in_order(pending, idle, budget) -> None:
    [taken, *others] = schedule_chunks([pending, *([] for _ in range(idle))], budget, 16, KEYS)
    left = budget
    for (done, length), count in zip(pending, taken, strict=False):
        assert count == min(length - done, left)
        left -= count
    assert others == [[]] * idle


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 500), min_size=2, max_size=8))
def test_short_prompts_are_computed_in_one_step(lengths) -> None:
    """One prompt per rank, all of the same length."""
    ranks = [[(0, max(lengths))] for _ in lengths]
    assert schedule_chunks(ranks, 1024, 16, KEYS) == [[max(lengths)]] * len(lengths)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), num_ranks=st.integers(2, 8))
def test_ranks_with_deep_and_shallow_prompts_are_balanced(seed, num_ranks) -> None:
    drawn = random.Random(seed)
    ranks = []
    for _ in range(num_ranks):
        deep = [(n := drawn.randrange(8000, 12000), n + 8000)]
        shallow = [(0, drawn.randrange(500, 3000)) for _ in range(12)]
        pending = deep + shallow
        drawn.shuffle(pending)
        ranks.append(pending)
    chunks = schedule_chunks(ranks, 4096, 16, KEYS)
    work = [cost(pending, taken) for pending, taken in zip(ranks, chunks, strict=True)]
    tokens = [sum(taken) for taken in chunks]
    assert max(work) * len(work) <= 1.1 * sum(work)
    assert max(tokens) * len(tokens) <= 1.1 * sum(tokens)


def test_a_deep_prompt_gets_a_short_chunk_and_advances() -> None:
    ranks = [[(100_000, 110_000)], *([(0, 4000)] for _ in range(7))]
    chunks = schedule_chunks(ranks, 4000, 16, KEYS)
    assert 64 <= chunks[0][0] < 1000 and [sum(taken) for taken in chunks[1:]] == [4000] * 7


@settings(deadline=None)
@given(pending=st.lists(PROMPT, min_size=2, max_size=20), aim=st.integers(1, 9000), data=st.data())
def test_a_mixture_costs_what_its_tokens_cost(pending, aim, data) -> None:
    """The cost from prefix sums equals the sum over the prompts."""
    done, length = pending[0]
    head = [data.draw(st.integers(0, min(aim, length - done))), *[0] * (len(pending) - 1)]
    by_context = sorted(range(len(pending)), key=lambda i: pending[i][0] + head[i])
    mixtures = _Mixtures(pending, head, by_context, aim, KEYS)
    deep = data.draw(st.integers(0, aim - head[0]))
    assert mixtures.cost(deep) == chunks_cost(pending, _mixed(pending, head, by_context, deep, aim), KEYS)


SIZES = (64, 256, 1024, 4096, 16_384)


def test_the_batch_size_follows_the_waiting_tokens() -> None:
    assert [batch_size([n] * 32, SIZES) for n in (30, 200, 5000, 16_384, 10**6)] == [64, 256, 4096, 16_384, 16_384]
    assert batch_size([16_384, *[0] * 31], SIZES) == 16_384  # the other ranks have no tokens
    assert batch_size([5000, *[64] * 31], SIZES) == 1024  # short prompts first, but the long one advances


@given(st.lists(st.integers(0, 10**5), min_size=1, max_size=8).filter(any))
def test_a_long_prompt_always_advances(waiting) -> None:
    size = batch_size(waiting, SIZES)
    assert size in SIZES and 16 * size >= min(max(waiting), SIZES[-1])
