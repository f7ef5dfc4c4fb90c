"""Drafts by a module, on the toy: whatever is proposed, each text is the one without drafts.

One module is always right and one always wrong, so acceptance is known exactly. The right one reads its own cache
layer, so it stays right only while that layer keeps step with the main model's.
"""

import contextlib
from collections.abc import Iterator

import jax.numpy as jnp
import msgspec
import pytest

from dsv3.config.engine import EngineConfig
from dsv3.config.speculative import SpeculativeConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.programs import Programs
from dsv3.engine.engine import Engine
from tests.dsv3.engine import toy
from tests.dsv3.engine.conftest import LIMITS
from tests.dsv3.engine.driving import drain, request, run, run_out_of_pages
from tests.dsv3.engine.fewer import one_bucket

PROMPT = [(11 * i) % 60 + 1 for i in range(40)]
ANSWER = toy.expected_tokens(PROMPT, 216, ())


_DRAFTING = toy.drafting(None)
_programs: dict[str, Programs] = {}


def make(right_of: int, *, all_buckets: bool = False, **config) -> Engine:
    """An engine of the toy with a module, whose programs are compiled as they are needed, and shared."""
    given = {"method": "mtp", **config}
    width = 1 + SpeculativeConfig.from_json(given).most_drafts
    limits = LIMITS | {"max_num_batched_tokens": 64, "speculative_config": given, "tokens_per_row": width}
    cfg = EngineConfig(**limits)
    with contextlib.nullcontext() if all_buckets else one_bucket():
        model = toy.toy_config(num_nextn_predict_layers=1)
        engine = Engine(EngineComponents.on_devices(_DRAFTING, jnp.int32(right_of), model, cfg))
    programs = _programs.setdefault(f"{cfg} {cfg.decode_buckets}", engine.executor.devices.programs)
    engine.executor.devices.programs = programs
    return engine


@pytest.fixture(scope="module")
def right() -> Engine:
    return make(0, num_speculative_tokens=2)


@pytest.fixture(scope="module")
def wrong() -> Engine:
    return make(1, num_speculative_tokens=2)


@pytest.fixture(autouse=True)
def nothing_is_left(request) -> Iterator[None]:
    yield
    for name in {"right", "wrong"} & set(request.fixturenames):
        engine = request.getfixturevalue(name)
        assert engine.failure is None and engine.stats().pages_in_use == 0


def test_right_drafts_are_all_accepted(right: Engine) -> None:
    """A prompt of one chunk, then its answer: each step but the first gives as many tokens as a row has."""
    before = right.stats()
    got = run(right, request("a", PROMPT, max_tokens=121, ignore_eos=True))["a"]
    after, width = right.stats(), right.cfg.tokens_per_row
    assert got.tokens == ANSWER[:121]
    drafts, earlier = after.jobs["draft"], before.jobs["draft"]
    assert (
        drafts.num_accepted_tokens - earlier.num_accepted_tokens == drafts.num_draft_tokens - earlier.num_draft_tokens
    )
    assert after.steps - before.steps == 1 + -(-120 // width)


def test_wrong_drafts_are_never_accepted_and_change_nothing(wrong: Engine) -> None:
    got = run(wrong, request("a", PROMPT, max_tokens=100, ignore_eos=True))["a"]
    assert got.tokens == ANSWER[:100]
    stats = wrong.stats().jobs["draft"]
    assert (stats.num_accepted_tokens, stats.num_accepted_tokens_per_pos) == (0, (0, 0))
    assert stats.num_draft_tokens == 2 * stats.num_drafts > 0


def test_chunks_of_a_prompt_and_cached_prefixes_keep_the_module_in_step(right: Engine) -> None:
    """The prompt has four chunks. Of its second use only the last page is computed."""
    prompt = [(7 * i) % 60 + 1 for i in range(200)]
    answer = toy.expected_tokens(prompt, 40, ())
    for name in ("a", "b"):
        got = run(right, request(name, prompt, max_tokens=40, ignore_eos=True))[name]
        assert got.tokens == answer
    assert got.outputs[0].num_cached_tokens == 192
    stats = right.stats().jobs["draft"]
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_an_answer_fills_the_model_length(right: Engine) -> None:
    got = run(right, request("a", PROMPT, ignore_eos=True))["a"]
    assert got.tokens == ANSWER and len(PROMPT) + len(ANSWER) == 256


@pytest.mark.parametrize("count", range(1, 6))
def test_limits_and_stop_tokens_inside_a_row(right: Engine, count: int) -> None:
    got = run(right, request("a", PROMPT, max_tokens=count, ignore_eos=True))["a"]
    assert got.tokens == ANSWER[:count]
    stop = ANSWER[count + 2]
    got = run(right, request("b", PROMPT, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,)))["b"]
    assert got.tokens == ANSWER[: ANSWER.index(stop) + 1] and got.last.stop_token_id == stop


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.05, "seed": 5},
        {"frequency_penalty": 2.0, "presence_penalty": 0.5, "repetition_penalty": 1.3, "logit_bias": {7: 9.0}},
        {"min_tokens": 9},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 3, "n": 2},
    ],
    ids=["sampled", "penalties", "min_tokens", "filters"],
)
def test_sampling_is_the_same_as_without_drafts(right: Engine, make_engine, sampling: dict) -> None:
    wanted = {"max_tokens": 30, "ignore_eos": True, **{k: v for k, v in sampling.items() if k != "n"}}
    alone = run(make_engine(), request("a", PROMPT, **wanted))["a"].tokens
    assert run(right, request("a", PROMPT, **wanted))["a"].tokens == alone


def test_each_token_has_its_log_probabilities(right: Engine) -> None:
    got = run(right, request("a", PROMPT, max_tokens=12, logprobs=2, ignore_eos=True))["a"]
    entries = [entry for output in got.outputs for entry in output.logprobs]
    assert [entry.top_ids[0] for entry in entries] == got.tokens == ANSWER[:12]


def test_many_requests_share_few_pages(right: Engine) -> None:
    run_out_of_pages(right)


def test_many_requests_share_few_pages_with_wrong_drafts(wrong: Engine) -> None:
    run_out_of_pages(wrong)


def test_a_request_that_fails_leaves_the_others_alone(right: Engine) -> None:
    got = run(right, request("a", [*PROMPT, toy.POISON]), request("b", PROMPT, max_tokens=20, ignore_eos=True))
    assert got["a"].finish_reason == "error" and got["b"].tokens == ANSWER[:20]


@pytest.mark.parametrize("fewer", [0, 1])
def test_large_steps_take_fewer_drafts_and_small_ones_go_on_with_theirs(fewer: int) -> None:
    """Steps of one request have two drafts, larger ones one or none; the module misses no token meanwhile.

    So the drafts after that are right too. A step that gets fewer than it could verify counts those that it got.
    """
    engine = make(0, all_buckets=True, num_speculative_tokens_per_batch_size=[[1, 1, 2], [2, 4, fewer]])
    assert [engine.cfg.width(size) for size in engine.cfg.decode_buckets] == [3, 1 + fewer]
    for name, prompt, count in (("long", PROMPT, 160), ("short", PROMPT[:20], 10)):
        engine.add(msgspec.structs.replace(request(name, prompt, max_tokens=count, ignore_eos=True), rank=0))
    gathered = drain(engine)
    assert gathered["long"].tokens == ANSWER[:160]
    assert gathered["short"].tokens == toy.expected_tokens(PROMPT[:20], 10, ())
    assert max(len(output.token_ids) for output in gathered["short"].outputs) == 1 + fewer
    stats = engine.stats().jobs["draft"]
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 90
