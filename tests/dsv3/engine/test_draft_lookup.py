"""Prompt lookup: which drafts it proposes, and that texts are those without drafts."""

import jax
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.config.engine import EngineConfig
from dsv3.engine.build import account_for
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.state import NO_DRAFT
from dsv3.engine.engine import Engine
from dsv3.engine.executor import lay_out
from dsv3.engine.jobs import JOB_KINDS
from dsv3.engine.jobs.draft import continuation
from dsv3.engine.memory import DeviceMemory
from tests.dsv3.engine import toy
from tests.dsv3.engine.conftest import LIMITS
from tests.dsv3.engine.driving import request, run, timing_of
from tests.dsv3.engine.fewer import one_bucket

WIDTH, DRAFTS, LOW, HIGH = 24, 3, 2, 3
_continuation = jax.jit(lambda text, length: continuation(text, length, DRAFTS, LOW, HIGH))


def expected(text: list[int]) -> list[int]:
    """The same in plain Python."""
    for size in range(HIGH, LOW - 1, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        if ends:
            end = max(ends, key=lambda end: (min(len(text) - end, DRAFTS), end))
            found = text[end : end + DRAFTS]
            return found + [NO_DRAFT] * (DRAFTS - len(found))
    return [NO_DRAFT] * DRAFTS


@settings(deadline=None, max_examples=200)
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), rest=st.integers(0, 2))
def test_the_longest_and_latest_match_goes_on(text: list[int], rest: int) -> None:
    padded = np.array(text + [rest] * (WIDTH - len(text)), np.int32)
    got = _continuation(padded, np.int32(len(text)))
    assert got.tolist() == expected(text)


@pytest.fixture(scope="module")
def engine() -> Engine:
    given = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
    cfg = EngineConfig(**(LIMITS | {"max_num_batched_tokens": 64, "speculative_config": given, "tokens_per_row": 3}))
    with one_bucket():
        return Engine(EngineComponents.on_devices(toy.FUNCTIONS, toy.PARAMS, toy.toy_config(), cfg))


def test_texts_are_in_the_account_of_memory(engine: Engine) -> None:
    cfg = engine.cfg
    without = EngineConfig(**(LIMITS | {"max_num_batched_tokens": 64, "tokens_per_row": 3}))
    plain, _ = lay_out(EngineComponents.on_devices(toy.FUNCTIONS, toy.PARAMS, toy.toy_config(), without), JOB_KINDS)
    layouts = engine.executor.devices.layout, plain
    found, less = (account_for(layout, DeviceMemory(2**30, 2**30), 0.9, working=0).state for layout in layouts)
    assert found - less == 4 * cfg.max_num_seqs * cfg.max_model_len


def test_a_prompt_that_holds_its_answer_is_followed(engine: Engine) -> None:
    """The prompt contains the greedy answer behind the token that it ends with; also from the cache."""
    start = [(11 * i) % 60 + 1 for i in range(10)]
    for _ in range(20):  # until the text repeats itself: a prompt whose continuation stands in it
        start += toy.expected_tokens(start, 8, ())
    prompt = start[:150]
    answer = toy.expected_tokens(prompt, 40, ())
    for name in ("a", "b"):
        got = run(engine, request(name, prompt, max_tokens=40, ignore_eos=True))[name]
        assert got.tokens == answer
    assert got.outputs[0].num_cached_tokens == 128
    assert engine.stats().jobs["draft"].num_drafts > 0 and engine.stats().pages_in_use == 0


def test_repetition_is_found_and_saves_steps(engine: Engine) -> None:
    """A bias makes one token win always: after two of them each draft is right."""
    before = engine.stats()
    item = request("a", [5, 6, 7], max_tokens=60, ignore_eos=True, logit_bias={9: 100.0})
    got = run(engine, msgspec.structs.replace(item, return_timing=True))["a"]
    after = engine.stats()
    assert got.tokens == [9] * 60
    assert after.steps - before.steps < 30
    drafts = [stats.jobs["draft"] for stats in (before, after)]
    proposed, right = np.diff([(each.num_draft_tokens, each.num_accepted_tokens) for each in drafts], axis=0)[0]
    timing = timing_of(got)
    assert (timing.drafts_proposed, timing.drafts_accepted) == (proposed, right)
    assert right >= 36 and proposed - right <= 4  # what found no match has proposed nothing


def test_many_requests_keep_their_own_texts(engine: Engine) -> None:
    prompts = [[(k * i) % 60 + 1 for i in range(20 + 9 * k)] for k in range(1, 9)]
    got = run(engine, *(request(str(k), p, max_tokens=25, ignore_eos=True) for k, p in enumerate(prompts)))
    for k, prompt in enumerate(prompts):
        assert got[str(k)].tokens == toy.expected_tokens(prompt, 25, ())
    assert engine.stats().pages_in_use == 0
