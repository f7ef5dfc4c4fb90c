"""Steps whose exchange overflows: repeated with more capacity per row, until all fit, and then with less again."""

import numpy as np
import pytest

from dsv3.config.engine import EngineConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.engine import Engine
from dsv3.scheduler.results import CALM_STEPS, CapacityFactor
from tests.dsv3.engine import toy
from tests.dsv3.engine.conftest import LIMITS
from tests.dsv3.engine.driving import request, run
from tests.dsv3.engine.test_scheduler import Driver, Step


class Cramped(Driver):
    """A driver whose decode steps overflow with more than `rows` rows, its prefill steps with more than `tokens`."""

    def __init__(self, rows: int = 8, tokens: int = 128, **limits) -> None:
        super().__init__(**limits)
        self.rows, self.tokens = rows, tokens

    def _results(self, job):
        if job.kind == "decode":
            live = (job.command.rows[..., 0] < self.cfg.max_num_seqs).sum(axis=1).max()
            overflowed = live > self.rows
        else:
            overflowed = max(sum(c.stop - c.start for c in mine) for mine in job.context.chunks) > self.tokens
        slots, results = np.full((1, 4), self.cfg.max_num_seqs + overflowed, np.int32), super()._results(job)
        sampled = tuple(np.full_like(tokens, -2) if overflowed else tokens for tokens in results.sampled)
        return results._replace(slots=slots, sampled=sampled)


def live_rows(driver: Driver, step: Step) -> list[int]:
    """Rows of each rank in the decode step."""
    return (step.decode.command.rows[..., 0] < driver.cfg.max_num_seqs).sum(axis=1).tolist() if step.decode else []


def test_capacity_doubles_until_a_step_fits_and_halves_after_calm() -> None:
    room = CapacityFactor(most=8)
    room.update(1, overflowed=True)
    assert room.factor == 2
    room.update(1, overflowed=True)
    assert room.factor == 2, "that step was in flight already"
    room.update(2, overflowed=True)
    for _ in range(CALM_STEPS - 1):
        room.update(4, overflowed=False)
    assert room.factor == 4
    room.update(4, overflowed=False)
    assert room.factor == 2
    room.update(2, overflowed=True)
    room.update(4, overflowed=True)
    with pytest.raises(RuntimeError, match="8 times the capacity per row"):
        room.update(8, overflowed=True)


def test_rows_take_a_larger_bucket_and_then_micro_steps() -> None:
    """Three rows in the bucket of 4; then in that of 8; then two of the three at a time; at last each alone."""
    driver = Cramped(rows=1, max_num_seqs=8)
    for name in "abc":
        driver.add(name, 5, max_tokens=30)
    shapes, turns, ended = [], [], []
    for _ in range(200):
        step, outputs = driver.step()
        ended += [output.finish_reason for output in outputs if output.finish_reason]
        if step.decode:
            shapes.append((step.decode.command.rows.shape[1], *live_rows(driver, step)))
            turns.append(step.sampled("decode"))
    assert list(dict.fromkeys(shapes)) == [(4, 3), (8, 3), (8, 1), (8, 2)]
    alone = [names for (_, live), names in zip(shapes, turns, strict=True) if live == 1]
    assert {name for names in alone[3:6] for name in names} == {"a", "b", "c"}, "no request is left out"
    assert ended == ["length"] * 3
    assert driver.scheduler.slots.total_running == 0 and not driver.scheduler.pages.in_use


def test_ranks_use_micro_steps_too_where_a_row_of_each_is_too_much() -> None:
    driver = Cramped(rows=0, num_ranks=2, max_num_seqs=1)
    driver.add("a", 5, max_tokens=4)
    driver.add("b", 5, max_tokens=4)
    with pytest.raises(RuntimeError, match="times the capacity per row"):
        for _ in range(20):
            step, _ = driver.step()
            seen = live_rows(driver, step)
    assert sorted(seen) == [0, 1]


def test_prompts_are_computed_again_in_smaller_chunks() -> None:
    """Two chunks are invalid, the overflowed one and that in flight behind it; their request keeps slot and pages."""
    driver = Cramped(tokens=64)
    long = driver.add("long", 300, max_tokens=3)
    spans, pages, tokens = [], None, 0
    for _ in range(40):
        step, outputs = driver.step()
        tokens += sum(len(output.token_ids) for output in outputs)
        if step.prefill:
            spans += [(c.start, c.stop) for mine in step.prefill.context.chunks for c in mine]
            assert step.prefill.command.has_context == (spans[-1][0] > 0)
            pages = pages or list(long.pages)
            assert long.pages[: len(pages)] == pages
    assert spans[:4] == [(0, 128), (128, 256), (0, 64), (64, 128)]
    assert spans[-1] == (256, 300) and tokens == 3
    assert driver.scheduler.num_preemptions == 0


def test_a_prompt_whose_first_token_was_void_gets_another_one() -> None:
    """It decodes already when the result of its prefill arrives: that step's tokens are dropped too."""
    driver = Cramped(tokens=32)
    driver.add("short", 40, max_tokens=5)
    chunks, tokens = [], []
    for _ in range(20):
        step, outputs = driver.step()
        chunks += [(c.start, c.stop) for mine in step.prefill.context.chunks for c in mine] if step.prefill else []
        tokens += [token for output in outputs for token in output.token_ids]
    assert chunks == [(0, 40), (0, 40), (0, 32), (32, 40)]
    assert tokens == [1] * 5


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The toy behind small buffers, on two ranks; its programs are compiled as they are needed."""
    limits = LIMITS | {"num_pages": 8, "max_num_batched_tokens": 64}  # those of `test_engine_invariants`
    return Engine(EngineComponents.on_devices(toy.cramped(), toy.PARAMS, toy.toy_config(), EngineConfig(**limits)))


@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 0.5, "logprobs": 2, "prompt_logprobs": 0}])
def test_texts_are_those_without_overflow(engine: Engine, make_engine, sampling: dict) -> None:
    """All tokens of these prompts select one device. Penalties' counts and log-probabilities are not doubled."""
    prompts = [[2 * i + 2, 4, 6, 8] * 12 for i in range(6)]
    asked = [request(str(i), p, max_tokens=40, ignore_eos=True, **sampling) for i, p in enumerate(prompts)]
    got, expected = (run(each, *asked) for each in (engine, make_engine()))
    for name, wanted in expected.items():
        assert got[name].tokens == wanted.tokens and len(wanted.tokens) == 40
        for field in ("logprobs", "prompt_logprobs"):
            columns = [[getattr(output, field) for output in each.outputs] for each in (got[name], wanted)]
            counts = [sum(len(part) for part in parts if part is not None) for parts in columns]
            assert counts[0] == counts[1] and (counts[0] > 0) == bool(sampling)
    assert engine.stats().pages_in_use == 0
    assert engine.planners["decode"]._capacity.factor > 1 and engine.planners["prefill"]._capacity.factor > 1
