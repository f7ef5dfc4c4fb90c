"""A new kind of work, added without changing the engine: drafts, so that rows get several tokens per step.

The drafter knows the greedy answer to one prompt, and is wrong in every third step. Whatever it proposes, every text is
the one without drafts: scheduling, pages, limits and results must support several tokens per row.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.config.engine import EngineConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.devices import Devices
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.state import DecodeState
from dsv3.engine.engine import Engine
from dsv3.engine.job import Command, EngineView, JobKind, Planned
from dsv3.engine.jobs import JOB_KINDS
from dsv3.scheduler.request import StepOutputs
from tests.dsv3.engine import toy
from tests.dsv3.engine.conftest import LIMITS
from tests.dsv3.engine.driving import request, run, run_out_of_pages
from tests.dsv3.engine.fewer import one_bucket

WIDTH = 3
PROMPT = [(11 * i) % 60 + 1 for i in range(40)]
ANSWER = toy.expected_tokens(PROMPT, 216, ())
KNOWN = np.array([*PROMPT, *ANSWER, *[0] * 64], np.int32)


class DraftCommand(Command, frozen=True):
    """Writes drafts behind the last token of every slot, wrong ones if `wrong`."""

    wrong: bool


class DraftPlanner:
    """Adds drafts to every step that samples."""

    def __init__(self, view: EngineView) -> None:
        self._planned, self._collected = 0, 0

    def plan(self, step: list[Planned]) -> list[Planned]:
        if not any(getattr(job.command, "sample", None) for job in step):
            return []
        self._planned += 1
        return [Planned("own_draft", DraftCommand(self._planned % 3 == 0))]

    def on_results(self, planned: Planned, results: tuple[()], outputs: StepOutputs) -> None:
        self._collected += 1

    def stats(self) -> dict[str, int]:
        return {"collected": self._collected}


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    def propose(state: DecodeState, wrong: jax.Array) -> DecodeState:
        drafts = jnp.asarray(KNOWN)[state.lengths[:, None] + jnp.arange(WIDTH - 1)]
        drafts = (drafts + wrong) % toy.POISON
        return dataclasses.replace(state, tokens=state.tokens.at[:, 1:].set(drafts))

    yield layout.per_rank(Key("own_draft"), propose, (layout.state, layout.array()), donated=(0,))


def launch(devices: Devices, command: DraftCommand) -> tuple[jax.Array, ...]:
    wrong = np.full(devices.layout.num_local_ranks, command.wrong, np.int32)
    devices.state = devices.programs.get(Key("own_draft"))(devices.state, devices.put(wrong))
    return ()


DRAFT = JobKind("own_draft", DraftCommand, DraftPlanner, programs, launch)


@pytest.fixture(scope="module")
def parts() -> EngineComponents:
    cfg = EngineConfig(**(LIMITS | {"tokens_per_row": WIDTH, "max_num_batched_tokens": 64}))
    return EngineComponents.on_devices(toy.FUNCTIONS, toy.PARAMS, toy.toy_config(), cfg)


@pytest.fixture(scope="module")
def engine(parts: EngineComponents) -> Engine:
    """One engine for all tests here, whose programs are compiled at their first use."""
    with one_bucket():
        return Engine(parts, kinds=(*JOB_KINDS, DRAFT))


@pytest.fixture(autouse=True)
def no_page_is_left(engine: Engine) -> Iterator[None]:
    yield
    assert engine.failure is None
    assert engine.stats().pages_in_use == 0


def test_right_drafts_save_steps_and_change_no_token(engine: Engine) -> None:
    before = engine.stats()
    got = run(engine, request("a", PROMPT, max_tokens=150, ignore_eos=True))["a"]
    after = engine.stats()
    assert got.tokens == ANSWER[:150] and got.finish_reason == "length"
    assert after.steps - before.steps < 100, "rows of three tokens, of which a third is wrong"
    assert after.jobs["own_draft"]["collected"] > before.jobs["own_draft"]["collected"]
    assert max(len(output.token_ids) for output in got.outputs) == WIDTH


@pytest.mark.parametrize("count", range(1, 8))
def test_a_limit_in_the_middle_of_a_row(engine: Engine, count: int) -> None:
    got = run(engine, request("a", PROMPT, max_tokens=count, ignore_eos=True))["a"]
    assert got.tokens == ANSWER[:count]


def test_an_answer_fills_the_model_length(engine: Engine) -> None:
    got = run(engine, request("a", PROMPT, ignore_eos=True))["a"]
    assert got.tokens == ANSWER and len(PROMPT) + len(ANSWER) == 256


def test_a_stop_token_in_the_middle_of_a_row(engine: Engine) -> None:
    for index in range(4, 10):
        stop = ANSWER[index]
        first = ANSWER.index(stop)
        got = run(engine, request("a", PROMPT, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,)))["a"]
        assert got.tokens == ANSWER[: first + 1]
        assert (got.finish_reason, got.last.stop_token_id) == ("stop", stop)


def test_each_token_has_its_log_probabilities(engine: Engine) -> None:
    got = run(engine, request("a", PROMPT, max_tokens=12, logprobs=2, ignore_eos=True))["a"]
    entries = [entry for output in got.outputs for entry in output.logprobs]
    assert [entry.top_ids[0] for entry in entries] == got.tokens == ANSWER[:12]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.05, "seed": 5}, {"frequency_penalty": 2.0, "logit_bias": {7: 9.0}}, {"min_tokens": 9}],
    ids=["sampled", "penalties", "min_tokens"],
)
def test_sampling_is_the_same_as_with_one_token_per_row(engine: Engine, make_engine, sampling: dict) -> None:
    wanted = {"max_tokens": 30, "ignore_eos": True, **sampling}
    alone = run(make_engine(), request("a", PROMPT, **wanted))["a"].tokens
    assert run(engine, request("a", PROMPT, **wanted))["a"].tokens == alone


def test_many_requests_share_few_pages(engine: Engine) -> None:
    run_out_of_pages(engine)


def test_a_name_is_given_once(parts: EngineComponents) -> None:
    with pytest.raises(AssertionError, match="two programs"):
        Engine(parts, kinds=(*JOB_KINDS, DRAFT, DRAFT))
