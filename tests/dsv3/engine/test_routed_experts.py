"""Experts of tokens: a request gets those that its answer was sampled with, and a replay gives the same numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from dsv3.config.engine import EngineConfig
from dsv3.config.options import EngineOptions
from dsv3.engine.build import served
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.engine.functions import in_full_precision, model_functions
from dsv3.engine.operations import ContinueGeneration, PauseGeneration, UpdateWeights
from dsv3.model.forward import forward
from dsv3.scheduler.request import (
    EngineRequest,
    ExpertIds,
    InvalidRequest,
    PreparedRequest,
    RequestRules,
    join_routed_experts,
    prepare,
)
from tests.dsv3.engine import toy
from tests.dsv3.engine.driving import Gathered, begin_update, drain, request, run, take
from tests.dsv3.engine.fewer import one_bucket
from tests.dsv3.model.golden import model

LONGEST, SHAPE = 256, (2, 4, "|u1")
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
LIMITS = {"max_model_len": LONGEST, "num_pages": 8, "max_num_seqs": 4, "max_num_batched_tokens": 100}
PROMPT = [(11 * i) % 200 + 2 for i in range(90)]
asked = functools.partial(request, return_routed_experts=True, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Two ranks, few pages, and two drafts per step; processed log-probabilities, here those of the model."""
    params, cfg = model("greedy")
    limits = LIMITS | {"num_ranks": 2, "speculative_config": DRAFTS, "tokens_per_row": 3}
    functions = in_full_precision(model_functions())
    with one_bucket():
        given = EngineConfig(**limits, enable_return_routed_experts=True, logprobs_mode="processed_logprobs")
        return Engine(EngineComponents.on_devices(functions, params, cfg, given))


@functools.partial(jax.jit, static_argnums=1)
def logprobs_of_replay(params, cfg, tokens, routed_experts):
    """The log-probability of each next token `[n - 1]`."""
    logits = forward(params, cfg, tokens[None], routed_experts=routed_experts[None]).logits[0]
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), tokens[1:, None], axis=-1)[:, 0]


def replayed(tokens: list[int], ids: np.ndarray | None) -> np.ndarray:
    """Log-probabilities of all tokens but the first, with these experts, or with the router's own."""
    params, cfg = model("greedy")
    every = np.full((LONGEST, cfg.num_moe_layers, cfg.num_experts_per_tok), -1, np.int32)
    if ids is not None:
        every[: len(ids)] = ids
    padded = np.pad(np.array(tokens, np.int32), (0, LONGEST - len(tokens)))
    return np.asarray(logprobs_of_replay(params, cfg, padded, every))[: len(tokens) - 1]


def check(prompt: list[int], got: Gathered) -> np.ndarray:
    """The experts of all tokens but the last are the forward pass's own, to the bit of its log-probabilities."""
    cfg, text = model("greedy")[1], [*prompt, *got.tokens]
    parts = [output.routed_experts for output in got.outputs if output.routed_experts is not None]
    assert [part.start for part in parts] == np.cumsum([0, *(len(part.array()) for part in parts)])[:-1].tolist()
    ids = join_routed_experts(parts, LONGEST)
    assert ids.shape == (len(text) - 1, cfg.num_moe_layers, cfg.num_experts_per_tok) and ids.dtype == np.uint8
    again = replayed(text, ids)
    np.testing.assert_array_equal(again, replayed(text, None))
    own = [entry.logprob for output in got.outputs for entry in output.logprobs or []]
    np.testing.assert_allclose(again[len(prompt) - 1 :], own, atol=1e-4)
    return ids


def test_prompts_and_answers_with_drafts_beside_others(engine: Engine) -> None:
    """Chunks, decode steps, accepted and rejected drafts; who does not ask gets nothing."""
    prompts = {"a": PROMPT * 2, "b": PROMPT[:1], "c": PROMPT[:64]}
    items = [asked(name, prompt, max_tokens=40) for name, prompt in prompts.items()]
    gathered = run(engine, *items, request("plain", PROMPT[:70], max_tokens=40))
    for name, prompt in prompts.items():
        check(prompt, gathered[name])
    assert all(output.routed_experts is None for output in gathered["plain"].outputs)
    drafts = engine.stats().jobs["draft"]
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


def test_cached_pages_are_used_where_their_experts_are_known(engine: Engine) -> None:
    """Also by sequences that wait for the first to compute their common prompt; a flush forgets."""
    engine.flush()
    prompt = PROMPT[::-1] * 2
    run(engine, request("fills", prompt, max_tokens=2))
    first = run(engine, asked("first", prompt, max_tokens=30, n=4, temperature=1.0, seed=3))
    found = [check(prompt, got)[: len(prompt) - 1] for got in first.values()]
    assert all(np.array_equal(ids, found[0]) for ids in found)
    tokens = sorted(max(output.num_cached_tokens for output in got.outputs) for got in first.values())
    assert tokens[0] == 0 and tokens[-1] == 128, "the page of who did not ask is computed again, by one per rank"
    longer = [*prompt, *first["first"].tokens[:20]]
    more = run(engine, asked("more", longer, max_tokens=5))["more"]
    check(longer, more)
    assert max(output.num_cached_tokens for output in more.outputs) >= 128
    engine.flush()
    again = run(engine, asked("again", prompt, max_tokens=1))["again"]
    assert max(output.num_cached_tokens for output in again.outputs) == 0


def test_pages_of_another_instance_have_the_experts_that_the_request_brings(engine: Engine) -> None:
    """Nothing travels here, because its page is in the cache already; other requests do not get what it has brought."""
    engine.flush()
    prompt, cfg = PROMPT[3:] + PROMPT[:60], model("greedy")[1]
    got = run(engine, asked("first", prompt, max_tokens=1))["first"]
    ids = check(prompt, got)
    engine.flush()
    run(engine, request("fills", prompt, max_tokens=2), request("fills too", prompt, max_tokens=2))
    brought = (ids + 1) % cfg.n_routed_experts
    shape = cfg.num_moe_layers, cfg.num_experts_per_tok, "|u1"
    one = msgspec.structs.replace(
        asked("brings", prompt, max_tokens=4), prompt_experts=ExpertIds(0, *shape, brought.tobytes())
    )
    assert engine.rules.routed_experts == shape
    outputs = run(engine, one)["brings"].outputs
    cached = max(output.num_cached_tokens for output in outputs)
    assert cached == 128
    found = join_routed_experts([each.routed_experts for each in outputs if each.routed_experts], LONGEST)
    assert np.array_equal(found[:cached], brought[:cached]) and len(found) == len(prompt) + 3
    assert np.array_equal(found[cached : len(prompt)], ids[cached : len(prompt)])
    again = run(engine, asked("again", prompt, max_tokens=1))["again"]
    assert max(output.num_cached_tokens for output in again.outputs) == 0
    check(prompt, again)


def test_pre_empted_requests_keep_what_they_were_sampled_with(engine: Engine) -> None:
    before = engine.stats().preemptions
    prompts = [PROMPT[i : i + 40] for i in range(8)]
    for i, prompt in enumerate(prompts):
        engine.add(asked(str(i), prompt, max_tokens=140))
    gathered = drain(engine)
    assert engine.stats().preemptions > before
    for i, prompt in enumerate(prompts):
        check(prompt, gathered[str(i)])


def test_an_aborted_answer_has_the_experts_of_its_tokens(engine: Engine) -> None:
    """A partial rollout: of one request in the middle of its answer, and of one in the middle of its prompt."""
    gathered: dict[str, Gathered] = {}
    engine.add(asked("part", PROMPT, max_tokens=100))
    while len(gathered.get("part", Gathered()).tokens) < 9:
        take(engine.step(), gathered)
    engine.add(asked("prompt", PROMPT[::-1] * 2, max_tokens=9))
    take(engine.step(), gathered)
    for operation in (PauseGeneration("abort"), ContinueGeneration()):
        engine.operate(operation)
    drain(engine, gathered)
    assert {got.finish_reason for got in gathered.values()} == {"abort"} and not gathered["prompt"].tokens
    check(PROMPT, gathered["part"])


def test_experts_that_older_weights_chose_are_for_their_own_request_alone(engine: Engine, monkeypatch) -> None:
    """The request computes its pages again, under the new weights' keys; its first page was chosen by the old ones."""
    monkeypatch.setattr(engine.executor, "plan_weights", lambda _: lambda: None)
    monkeypatch.setattr(engine.executor, "replace_weights", lambda _: None)
    prompt, gathered = PROMPT[5:85], {}
    engine.add(asked("early", prompt, max_tokens=80))
    while len(gathered.get("early", Gathered()).tokens) < 9:
        take(engine.step(), gathered)
    done = begin_update(engine, UpdateWeights({}, "new", "retract"), gathered)
    drain(engine, gathered)
    assert done.result(0) is None
    check(prompt, gathered["early"])
    cached = {}
    for item in (asked("asks", prompt, max_tokens=1), request("plain", prompt, max_tokens=1)):
        [got] = run(engine, item).values()
        cached[item.sampling.return_routed_experts] = max(output.num_cached_tokens for output in got.outputs)
    assert cached == {True: 0, False: 64}


def test_a_replay_uses_the_experts_that_it_is_given(engine: Engine) -> None:
    """A trainer whose router has moved a little chooses others; with the rollout's it stays closer."""
    got = run(engine, asked("a", PROMPT, max_tokens=100))["a"]
    ids, text = check(PROMPT, got), [*PROMPT, *got.tokens]
    params, cfg = model("greedy")
    noise = np.random.default_rng(0).normal(0, 0.02, params.moe.moe.router.shape).astype(np.float32)
    moe = dataclasses.replace(params.moe, moe=dataclasses.replace(params.moe.moe, router=params.moe.moe.router + noise))
    moved = dataclasses.replace(params, moe=moe)
    padded = np.pad(np.array(text, np.int32), (0, LONGEST - len(text)))
    every = np.full((LONGEST, *ids.shape[1:]), -1, np.int32)
    rollout = replayed(text, ids)
    own = np.asarray(logprobs_of_replay(moved, cfg, padded, every))[: len(text) - 1]
    every[: len(ids)] = ids
    replay = np.asarray(logprobs_of_replay(moved, cfg, padded, every))[: len(text) - 1]
    assert np.abs(replay - rollout).mean() < 0.5 * np.abs(own - rollout).mean()


def test_what_is_refused() -> None:
    rules = RequestRules(vocab_size=toy.VOCAB, max_model_len=64)

    def prepared(**changes: object) -> PreparedRequest:
        given = {"request_id": 0, "prompt_token_ids": [1], "sampling": asked("a", [1]).sampling}
        on = RequestRules(vocab_size=toy.VOCAB, max_model_len=64, routed_experts=SHAPE)
        return prepare(EngineRequest(**(given | changes)), on)

    with pytest.raises(InvalidRequest, match="start it with --enable_return_routed_experts"):
        prepare(asked("a", [1]), rules)
    assert prepared().sampling.return_routed_experts
    for change in ({"pages_from": "host:1"}, {"bootstrap_room": 1}):
        with pytest.raises(InvalidRequest, match="would come from another instance"):
            prepared(**change)
    with pytest.raises(InvalidRequest, match="those of another model"):
        prepared(prompt_experts=ExpertIds(0, *SHAPE[:2], "<u2", b""))
    assert prepared(prompt_experts=ExpertIds(0, *SHAPE, b""), pages_from="host:1").prompt_experts is not None
    dense = dataclasses.replace(model("greedy")[1], first_k_dense_replace=3)
    with pytest.raises(ValueError, match="no routed experts"):
        served(dense, EngineOptions(enable_return_routed_experts=True))
