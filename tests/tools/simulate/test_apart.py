"""Instances that are simulated elsewhere: the figures of one process, to the bit, and an end that is told of."""

import dataclasses
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.config.engine import EngineConfig
from tests.tools.simulate.tables import table
from tools.simulate import worker
from tools.simulate.apart import Order, Reply, Worker
from tools.simulate.clock import Clock
from tools.simulate.fleet import Fleet, Group, Setting, SettingError, replay
from tools.simulate.prompts import Asked
from tools.simulate.record import Record
from tools.simulate.series import Series
from tools.simulate.times import InstanceTimes
from tools.simulate.traffic import Ask, Run, Session
from tools.simulate.worker import Process, WorkerLost


class Direct:
    """A worker in this process."""

    def __init__(self, times: InstanceTimes, cfg: EngineConfig, meanwhile: Callable[[], bool]) -> None:
        self._worker, self._replies = Worker(times, cfg), list[Reply]()
        self._meanwhile = meanwhile

    def send(self, order: Order) -> None:
        assert not self._replies, "an order must wait for the reply to the one before"
        self._replies.append(self._worker.obey(order))

    def receive(self) -> Reply:
        self._meanwhile()
        return self._replies.pop()


class Elsewhere:
    """Has workers in this process."""

    def __init__(self, meanwhile: Callable[[], bool]) -> None:
        self._meanwhile = meanwhile

    def open(self, times: InstanceTimes, cfg: EngineConfig) -> Direct:
        return Direct(times, cfg, self._meanwhile)

    def close(self) -> None:
        pass


def played(setting: Setting, sessions: list[Session], until: float | None, elsewhere=Elsewhere) -> tuple:
    """Returns all that a simulation tells: columns, looks, totals."""
    fleet = Fleet(setting, Clock(), Record(), elsewhere)
    try:
        series = Series(fleet, 0.3)
        replay(fleet, sessions, until)
        fleet.clock.run(until, lambda: fleet.is_over)
        count, record = fleet.record.count, fleet.record
        columns = [getattr(record, name)[:count].tolist() for name in ("prompt", "cached", "tokens")]
        times = [repr(getattr(record, name)[:count].tolist()) for name in ("arrived", "first", "last", "ended")]
        return columns, times, record.ends, series.looks, [fleet.done(pool) for pool, _ in fleet.pools]
    finally:
        fleet.close()


@st.composite
def pairs(draw) -> Setting:
    few = {"ranks": draw(st.integers(1, 3)), "seqs": draw(st.sampled_from([1, 4])), "pages": draw(st.integers(17, 24))}
    routing = draw(st.sampled_from(["cost", "events", "round_robin"]))
    return Setting(
        Group(table("decode", **few), 1), Group(table("prefill", **few), draw(st.integers(1, 4))), None, routing
    )


RUNS = st.builds(Run, st.integers(0, 3), st.integers(1, 400))
ASKS = st.builds(
    lambda runs, answer: Ask(tuple(runs), answer), st.lists(RUNS, min_size=1, max_size=2), st.integers(1, 90)
)
SESSIONS = st.lists(st.builds(Session, st.floats(0, 3), st.lists(ASKS, min_size=1, max_size=3).map(tuple)), max_size=16)


@settings(max_examples=20, deadline=None)
@given(pairs(), SESSIONS, st.sampled_from([None, 2.0]))
def test_an_instance_apart_changes_no_figure(setting, sessions, until) -> None:
    """Pages are few, so some requests are pre-empted; sessions leave the instance idle and wake it again."""
    sessions = sorted(sessions, key=lambda session: session.at)
    apart = dataclasses.replace(setting, two_processes=True)
    assert played(apart, sessions, until) == played(setting, sessions, until)


SMALL = Setting(Group(table("decode"), 1), Group(table("prefill"), 1))
BURST = [Session(0.1 * i, (Ask((Run(i % 3, 90 + i),), 5 + i),)) for i in range(30)]


def test_a_process_of_its_own_changes_no_figure() -> None:
    apart = dataclasses.replace(SMALL, two_processes=True)
    assert played(apart, BURST, None, Process) == played(SMALL, BURST, None)


def test_a_process_that_dies_is_told_of() -> None:
    times = table("decode")
    process = Process()
    line = process.open(times, SMALL.limits(times))
    process._process.kill()
    with pytest.raises(WorkerLost, match="ended with status -9"):
        line.receive()
    with pytest.raises(WorkerLost, match="Leave out --two_processes"):
        line.send(Order(0.0, 0.0, []))
    process.close()


def test_orders_and_replies_that_no_pipe_holds(monkeypatch) -> None:
    """Both processes write more than a pipe takes; replies come in the order of those who wait for them."""
    monkeypatch.setattr(worker, "_PIPE_BYTES", 2**12)
    times = table("prefill", ranks=4, seqs=64, batched=4096, pages=256)
    process = Process()
    lines = [process.open(times, SMALL.limits(times)) for _ in range(3)]
    many = [Asked(i, (Run(-1 - i, 70),), 70, 71) for i in range(600)]
    for line in lines:
        line.send(Order(0.0, 0.0, many))
    replies = [line.receive() for line in reversed(lines)]
    assert [reply.state.requests for reply in replies] == [len(many)] * 3
    assert sum(len(pickle.dumps(reply)) for reply in replies[1:]) > 2**12  # before the last order
    process.close()


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (Setting(Group(table(), 1)), "only decodes"),
        (Setting(Group(table("decode"), 2), Group(table("prefill"), 1)), "--num_decode"),
    ],
)
def test_what_has_no_instance_for_a_second_process(setting, says) -> None:
    with pytest.raises(SettingError, match=says):
        dataclasses.replace(setting, two_processes=True)
