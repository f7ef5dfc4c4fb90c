"""DeepSeek-V4's attention over a cache: however requests are cut, batched and placed, they equal whole sequences."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.config.model import DRAFT_ROWS
from dsv3.engine.device.sampling import log_probabilities
from dsv3.model import DecodeBatch, forward
from dsv3.model.batch import StepRows
from dsv3.model.layers import compressed_uncached
from dsv3.model.layers.compressed_paged import paged_attend_compressed
from pallas_kernels import dsa, invariance
from pallas_kernels.compressed import sink_attention
from pallas_kernels.entries import decode_rows, encode_rows
from tests.dsv3.model import deepseek_v4_steps
from tests.dsv3.model.deepseek_v4 import model
from tests.dsv3.model.deepseek_v4_steps import (
    CHUNKS,
    IN_TURN,
    ROWS,
    Engine,
    Request,
    T,
    first_window_page,
    invariant_step,
)
from tests.dsv3.model.golden import data, run
from training.served import served_logprobs

S = 1 + DRAFT_ROWS
PARAMS, CFG = model("deepseek_v4", 0, 2, 3, 4, 5)  # of layers of the sparse ratio, none whose experts a token chooses
PAGE = CFG.page_size


LONG = 32


@pytest.fixture(autouse=True)
def groups_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds memory so that a prefill step works on 64 to 128 queries at once."""
    monkeypatch.setattr(dsa, "BYTES_AT_ONCE", 2**17)


NUMBERS = (0, 3, 20, 27, 31, LONG)


@functools.cache
def sequence(number: int) -> np.ndarray:
    """Tokens: the golden sequence of more than a page, others that begin with its prompts, and one of three pages."""
    golden = data("deepseek_v4")
    if number == 0:
        return golden["input_ids"][0]
    if number == LONG:
        return np.random.default_rng(0).integers(0, CFG.vocab_size, 2 * PAGE + 32).astype(np.int32)
    prompt = golden["prompts"][number]
    return np.concatenate([prompt[: (prompt >= 0).sum()], golden["greedy"][number]])


@functools.cache
def whole(number: int) -> np.ndarray:
    tokens = np.zeros((1, len(sequence(LONG))), np.int32)
    tokens[0, : len(sequence(number))] = sequence(number)
    return np.asarray(run(PARAMS, CFG, tokens).logits[0, : len(sequence(number))])


@functools.cache
def alone(number: int) -> np.ndarray:
    """The logits of a sequence in chunks of T rows, with nothing beside it."""
    engine, tokens = Engine(PARAMS, CFG, 0), sequence(number)
    request = engine.begin()
    chunks = [tokens[i : i + T] for i in range(0, len(tokens), T)]
    return np.concatenate([engine.prefill([(request, chunk)])[0] for chunk in chunks])


def close(actual: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@settings(max_examples=2, deadline=None)
@given(st.integers(0, 2**16), st.data())
def test_chunks_of_several_requests(seed: int, draw: st.DataObject) -> None:
    """Bits depend on nothing but the sequence."""
    engine, rng = Engine(PARAMS, CFG, seed), np.random.default_rng(seed)
    waiting, running = rng.permutation(NUMBERS).tolist(), {}
    most = draw.draw(st.sampled_from([30, 100, T]))
    while waiting or running:
        while waiting and len(running) < CHUNKS:
            running[waiting.pop()] = engine.begin()
        room, chunks = T, {}
        for number in rng.permutation(list(running))[: rng.integers(1, CHUNKS + 1)].tolist():
            left = len(sequence(number)) - running[number].length
            if count := min(room, left, int(rng.integers(1, most + 1)) if rng.random() < 0.9 else left):
                start, room = running[number].length, room - count
                chunks[number] = start, sequence(number)[start : start + count]
        found = engine.prefill([(running[number], new) for number, (_, new) in chunks.items()])
        for (number, (start, new)), logits in zip(chunks.items(), found, strict=True):
            np.testing.assert_array_equal(logits, alone(number)[start : start + len(new)])
            if running[number].length == len(sequence(number)):
                engine.end(running.pop(number))
    for held in engine.holders.values():
        assert not held.any()
    assert all(np.isnan(np.asarray(array)).all() for array in engine.pool.values())


@pytest.mark.parametrize("number", NUMBERS)
def test_chunks_equal_whole_sequences(number: int) -> None:
    close(alone(number), whole(number))


def test_a_chunk_cut_between_micro_batches() -> None:
    """The later one sees what the cache does not keep: a chunk that ends in the next page has no window page before it.

    The middle is in a chunk behind another one, where a page begins; then behind all, and in a chunk alone.
    """
    wanted, engine = {n: alone(n) for n in (20, LONG)}, Engine(PARAMS, CFG, 3)
    engine.prefill_schedule, engine.prefill_rows = IN_TURN, 2 * (PAGE + 4)
    long, other, third = engine.begin(), engine.begin(), engine.begin()
    first = [(other, 20, 0, 4), (long, LONG, 0, engine.prefill_rows - 4)]
    for chunks in (first, [(long, LONG, engine.prefill_rows - 4, 8)], [(third, LONG, 0, engine.prefill_rows)]):
        found = engine.prefill([(who, sequence(n)[start : start + count]) for who, n, start, count in chunks])
        for logits, (_, n, start, count) in zip(found, chunks, strict=True):
            np.testing.assert_array_equal(logits, wanted[n][start : start + count])


def test_layers_in_another_order() -> None:
    """The other golden model begins with a layer of the heavy ratio, and has one without entries between."""
    params, cfg = model("deepseek_v4_plain")
    engine, golden = Engine(params, cfg, 1), data("deepseek_v4_plain")
    request, tokens = engine.begin(), golden["input_ids"][0]
    found = [engine.prefill([(request, new)])[0] for new in (tokens[:43], tokens[43:])]
    close(np.concatenate(found), golden["logits"][0])


def test_fp8_rows_are_the_same_however_a_request_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step rounds its own tokens, drafts too, as those that it reads. That is all that whole sequences lack."""
    (params, cfg), found, tokens = model("deepseek_v4", 1, 2), [], sequence(0)
    for first, last in ((T, T), (118, 142)):  # tokens between them are decoded; most drafts are rejected
        engine = Engine(params, cfg, 0, "fp8")
        request = engine.begin()
        logits = engine.prefill([(request, tokens[:first])])
        while request.length < last:
            logits += [engine.decode([(request, drafted(0, request.length, 3, engine.rng), 3)])[0][:3]]
        found.append(np.concatenate([*logits, *engine.prefill([(request, tokens[last:])])]))
    np.testing.assert_array_equal(*found)

    def rounded(q: jax.Array, keys: jax.Array, *others: Any) -> tuple[jax.Array, jax.Array]:
        rows = encode_rows(keys, cfg.kv_lora_rank, jnp.uint8)
        return sink_attention(q, decode_rows(rows, cfg.kv_lora_rank, cfg.latent_dim, keys.dtype), *others)

    monkeypatch.setattr(compressed_uncached, "sink_attention", rounded)
    start = tokens[None, : 4 * cfg.compressed.indexer.topk]  # so many have all entries chosen
    logits = jax.jit(lambda tokens: forward(params, cfg, tokens).logits)(jnp.asarray(start))
    error = np.abs(found[0][: start.size] - np.asarray(logits[0]))
    assert np.median(error) < 1e-5 * found[0].std(), np.median(error)  # where noise turns a value, a token is far off


@functools.cache
def decoded_alone(number: int, start: int) -> np.ndarray:
    """The logits of a sequence's tokens from `start` on, one by one, with drafts that are all rejected."""
    engine, tokens = Engine(PARAMS, CFG, 0), sequence(number)
    request, found = started(engine, number, start), []
    while request.length < len(tokens):
        found.append(engine.decode([(request, drafted(number, request.length, 1, engine.rng), 1)])[0][0])
    return np.stack(found)


def started(engine: Engine, number: int, length: int) -> Request:
    request = engine.begin()
    for i in range(0, length, T):
        engine.prefill([(request, sequence(number)[i : min(i + T, length)])])
    return request


def drafted(number: int, start: int, right: int, rng: np.random.Generator) -> np.ndarray:
    """S tokens, of which so many are the right ones, and the next is not."""
    tokens = rng.integers(0, CFG.vocab_size, S).astype(np.int32)
    there = sequence(number)[start : start + right + 1]
    if len(there) > right and right < S:
        tokens[right] = (there[right] + 1) % CFG.vocab_size
    tokens[:right] = there[:right]
    return tokens


def test_decode_and_the_trainers_log_probabilities_have_the_bits_of_prefill() -> None:
    """Each chooses the same entries for a token, of which the sparse layers take some."""
    tokens, found = sequence(0), alone(0)
    np.testing.assert_array_equal(decoded_alone(0, 246), found[246:])
    options = dict(invariance.CPU_OPTIONS)
    chosen = jax.jit(log_probabilities, static_argnums=2, compiler_options=options)(found[:-1], tokens[1:], 1)[0]
    np.testing.assert_array_equal(served_logprobs(PARAMS, CFG, tokens[None])[0], chosen)


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 2**16))
def test_decode_with_rejected_drafts(seed: int) -> None:
    """What a rejected draft has written is never read: the first logits of a step have the bits of any other batch."""
    engine, rng = Engine(PARAMS, CFG, seed), np.random.default_rng(seed)
    starts = {0: 246} | {number: max(1, len(sequence(number)) - 25) for number in NUMBERS[1:-1]}
    waiting, running = rng.permutation(list(starts)).tolist(), {}
    while waiting or running:
        while waiting and len(running) < ROWS:
            number = int(waiting.pop())
            running[number] = started(engine, number, starts[number])
        rows = []
        for number in rng.permutation(list(running))[: rng.integers(1, ROWS + 1)].tolist():
            request = running[number]
            right = min(int(rng.integers(1, S + 1)), len(sequence(number)) - request.length)
            rows.append((number, request.length, right, drafted(number, request.length, right, rng)))
        found = engine.decode([(running[number], tokens, right) for number, _, right, tokens in rows])
        for (number, at, right, _), logits in zip(rows, found, strict=True):
            np.testing.assert_array_equal(logits[0], decoded_alone(number, starts[number])[at - starts[number]])
            close(logits[:right], whole(number)[at : at + right])
            if running[number].length == len(sequence(number)):
                engine.end(running.pop(number))


@settings(max_examples=2, deadline=None)
@given(st.integers(0, 2**16), st.booleans())
def test_requests_go_on_from_a_parked_page(seed: int, in_one_chunk: bool) -> None:
    """A prefix that ends with a page gives the bits that it gave in its own request, which has ended."""
    engine, rng = Engine(PARAMS, CFG, seed), np.random.default_rng(seed)
    tokens, first = sequence(0), started(engine, 0, 180)
    more = 90 if in_one_chunk else PAGE - 180
    engine.prefill([(first, tokens[180 : 180 + more])], release=False)
    parked = engine.park(first, PAGE)
    engine.end(first)
    for _ in range(2):
        request, at = engine.begin(parked), PAGE
        if rng.random() < 0.5:
            engine.move_window(request)
        while at < len(tokens):
            new = tokens[at : at + int(rng.integers(1, 20))]
            np.testing.assert_array_equal(engine.prefill([(request, new)])[0], alone(0)[at : at + len(new)])
            at += len(new)
        engine.end(request)
    request = engine.begin(parked)
    draft = drafted(0, PAGE, S, rng)
    close(engine.decode([(request, draft, 1)])[0], whole(0)[PAGE : PAGE + S])
    engine.end(request)
    engine.end(parked)
    assert not any(held.any() for held in engine.holders.values())


def test_a_page_that_is_released_too_early_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = first_window_page
    monkeypatch.setattr(deepseek_v4_steps, "first_window_page", lambda cfg, tokens: right(cfg, tokens + 1))
    engine, tokens = Engine(PARAMS, CFG, 0), sequence(0)
    first_reached = PAGE + CFG.compressed.window - 2  # its next token sees the last one of the first page
    request = started(engine, 0, first_reached)
    assert not np.isfinite(engine.prefill([(request, tokens[first_reached : first_reached + 1])])[0]).any()


def test_the_pool_is_not_copied() -> None:
    """What is read of a ring before a step writes to it is read first."""
    engine = Engine(PARAMS, CFG, 0)
    request = engine.begin()
    engine.prefill([(request, sequence(0)[:9])])
    batches = [engine.last_batch]
    engine.decode([(request, sequence(0)[:S], 1)])
    shapes = [f"f32[{','.join(map(str, array.shape))}]" for array in engine.pool.values()]
    for batch in (*batches, engine.last_batch):
        text = invariant_step.lower(PARAMS, CFG, batch, engine.pool).compile().as_text()
        assert all(shape in text for shape in shapes)
        copies = [line for line in text.splitlines() if " copy(" in line and any(shape in line for shape in shapes)]
        assert not copies, copies


def test_more_drafts_than_rings_have_rows_for_are_refused() -> None:
    ints = functools.partial(jnp.zeros, dtype=jnp.int32)
    batch = DecodeBatch(ints((1, S + 1)), ints(1), ints((1, 1)), window_table=ints((1, 1)), slots=ints(1))
    with pytest.raises(ValueError, match="9 drafts: the cache keeps rows for at most 8 in a step"):
        paged_attend_compressed(CFG, batch, StepRows.of(batch))
