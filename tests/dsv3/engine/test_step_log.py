"""Steps are noted while somebody looks, and only then; profiles are bounded."""

import itertools

import pytest

from dsv3.engine import step_log
from dsv3.engine.step_log import JobNote, StepLog
from tests.dsv3.engine.driving import request, run


@pytest.fixture
def clock(monkeypatch):
    """Time that a test sets."""
    now = [0.0]
    monkeypatch.setattr(step_log, "perf_counter", lambda: now[0])
    return now


def step(log: StepLog, clock: list[float], number: int) -> None:
    """One step of three milliseconds."""
    log.begin(clock[0])
    for what in ("plan decode", "launch", "wait"):
        clock[0] += 0.001
        log.done(what)
    log.end(number, number - 1, [JobNote("decode", 4)], 2, 1)


def test_nothing_is_noted_where_nobody_looks(clock) -> None:
    log = StepLog()
    step(log, clock, 1)
    assert log.snapshot() == []


def test_steps_are_noted_after_a_look_and_for_a_while(clock) -> None:
    log = StepLog()
    log.snapshot()
    step(log, clock, 1)
    step(log, clock, 2)
    first, second = log.snapshot()
    assert (first.launched, second.launched, second.collected) == (1, 2, 1)
    assert [part.what for part in first.parts] == ["plan decode", "launch", "wait"]
    assert first.ended == second.began == pytest.approx(0.003)
    clock[0] += step_log.LOOK_S
    step(log, clock, 3)
    assert not log.is_on and log.snapshot() == []


def test_an_idle_engine_shows_no_old_steps(clock) -> None:
    log = StepLog()
    log.snapshot()
    step(log, clock, 1)
    assert log.snapshot()
    clock[0] += step_log.LOOK_S
    assert log.snapshot() == []


def test_a_look_within_a_step_begins_with_the_next_one(clock) -> None:
    log = StepLog()
    log.begin(0.0)
    log.snapshot()
    log.end(1, 0, [], 0, 0)
    step(log, clock, 2)
    assert [note.launched for note in log.snapshot()] == [2]


def test_the_last_steps_are_shown(clock) -> None:
    log = StepLog()
    log.snapshot()
    for number in range(1, step_log.STEPS_SHOWN + 10):
        step(log, clock, number)
    assert [note.launched for note in log.snapshot()] == list(range(10, step_log.STEPS_SHOWN + 10))


def test_a_profile_ends_by_itself(clock, monkeypatch) -> None:
    """After so many steps or so much time; what was noted until then waits for whoever stops it."""
    monkeypatch.setattr(step_log, "MAX_PROFILE_STEPS", 5)
    for most_steps, pause in ((5, 0.0), (2, step_log.MAX_PROFILE_S / 2 + 1)):
        log, numbers = StepLog(), itertools.count(1)
        log.start_profile()
        for _ in range(9):
            step(log, clock, next(numbers))
            clock[0] += pause
        assert not log.is_on
        assert [note.launched for note in log.stop_profile()] == list(range(1, most_steps + 1))
        assert log.stop_profile() == []


def test_a_profile_goes_on_while_somebody_looks(clock) -> None:
    log = StepLog()
    log.start_profile()
    step(log, clock, 1)
    log.snapshot()
    step(log, clock, 2)
    clock[0] += step_log.LOOK_S + 1
    step(log, clock, 3)
    assert log.is_on and len(log.stop_profile()) == 3


def test_an_engine_shows_its_steps(engine) -> None:
    """Parts of a step follow each other, and the results that a step takes are those of the one before."""
    assert engine.snapshot() == step_log.EngineSnapshot([], None)
    run(engine, request("a", list(range(1, 40)), max_tokens=6, ignore_eos=True))
    steps = engine.snapshot().steps
    assert [job.kind for job in steps[0].jobs] == ["prefill"] and steps[0].jobs[0].amount == 39
    assert [job.kind for job in steps[1].jobs] == ["decode"]
    for before, step in itertools.pairwise(steps):
        assert step.collected == before.launched
        assert before.ended <= step.began <= step.parts[0].at
        assert [part.at for part in step.parts] == sorted(part.at for part in step.parts)
    parts = [part.what for part in steps[1].parts]
    assert parts.index("take requests") < parts.index("plan decode") < parts.index("launch") < parts.index("wait")
    assert "collect prefill" in parts[parts.index("wait") :]


def test_looking_changes_no_token(make_engine) -> None:
    answers = []
    for looks in (False, True):
        engine = make_engine()
        if looks:
            engine.snapshot()
            engine.log.start_profile()
        found = run(engine, request("a", list(range(1, 40)), max_tokens=20, ignore_eos=True))
        answers.append(found["a"].tokens)
    assert answers[0] == answers[1] and len(engine.log.stop_profile()) > 10
