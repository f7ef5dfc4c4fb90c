"""What an engine tells of its steps adds up to what it has computed."""

from collections.abc import Callable

import numpy as np

from dsv3.engine.engine import Engine
from dsv3.engine.step_metrics import StepNotes, moments
from dsv3.engine.step_reports import Queued, Scheduled, StepMetrics
from tests.dsv3.engine.driving import drain, request, run

MakeEngine = Callable[..., Engine]


def told_by(engine: Engine) -> list[list[StepMetrics]]:
    """Has an engine tell of its steps; returns the list that they come to."""

    class Sink(list):
        publish = list.append

    sink = Sink()
    engine._notes = StepNotes(engine.scheduler, sink, "w")
    return sink


def test_moments_are_those_of_each_rank():
    random = np.random.default_rng(0)
    ranks, values = random.integers(0, 3, 50), random.integers(0, 160_000, 50)
    found = moments(ranks, values, 4)
    for rank in range(3):
        mine = values[ranks == rank]
        assert (found.number[rank], found.total[rank]) == (len(mine), mine.sum())
        np.testing.assert_allclose(found.variance[rank], mine.var())
    assert (found.number[3], found.total[3], found.variance[3]) == (0, 0, 0.0)


def test_one_request_step_by_step(engine: Engine):
    steps = told_by(engine)
    run(engine, request("a", [1] * 150, max_tokens=4, ignore_eos=True))
    scheduled = [each.scheduled_requests for step in steps for each in step if each.scheduled_requests != Scheduled()]
    prompts = [each for each in scheduled if each.num_prefill_requests]
    assert [(p.sum_prefill_tokens, p.sum_prefill_kv_tokens) for p in prompts] == [(100, 0), (50, 100)]
    assert {p.var_prefill_length for p in prompts} == {0.0}
    assert [each.sum_decode_kv_tokens for each in scheduled if each.num_decode_requests] == [151, 152, 153]
    assert all((each.worker_id, each.dp_rank) == ("w", rank) for step in steps for rank, each in enumerate(step))
    assert all(each.wall_time > 0 for step in steps for each in step)


def test_all_steps_together_are_what_was_computed(engine: Engine):
    """Ten requests on eight slots: two wait, and nobody is told of twice."""
    steps = told_by(engine)
    for i in range(10):
        engine.add(request(f"r{i}", [i + 1] * (20 + 5 * i), max_tokens=5, ignore_eos=True))
    drain(engine)
    stats, scheduled = engine.stats(), [each.scheduled_requests for step in steps for each in step]
    assert sum(each.sum_prefill_tokens for each in scheduled) == stats.prompt_tokens
    rows = sum(each.num_decode_requests for each in scheduled)
    assert stats.generated_tokens - 10 <= rows <= stats.generated_tokens
    assert engine._step_tokens.total == stats.prompt_tokens + stats.generated_tokens
    assert 0 < sum(stats.step_tokens_counts) <= stats.steps
    assert all(0 <= each.var_prefill_length <= 25**2 for each in scheduled)
    first = [each.queued_requests for each in steps[0]]
    assert sum(each.num_prefill_requests for each in first) == 10 - engine.cfg.max_num_seqs * engine.cfg.num_ranks
    assert {each.num_decode_requests for each in first} == {0}


def test_the_queue_is_looked_at_again_once_it_is_stale(engine: Engine, monkeypatch):
    monkeypatch.setattr("dsv3.engine.step_metrics._QUEUE_S", 0.0)
    steps = told_by(engine)
    for i in range(10):
        engine.add(request(f"q{i}", [i + 1] * 20, max_tokens=5, ignore_eos=True))
    drain(engine)
    assert [each.queued_requests for each in steps[-1]] == [Queued()] * 2
    assert engine.stats().waiting == 0
