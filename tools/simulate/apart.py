"""Instances that are simulated apart from the fleet, a step ahead of it: the same figures on two processors.

What a step gives depends on nothing that is submitted while it runs: a request waits in the queue until a step has
ended. So when a step ends, the other side is told what has been submitted meanwhile. It plans the step after the next
and computes what the next one will give. The fleet simulates what happens until then, and finds the results.

The other side is another process, or this one while it waits for that (`Later`). The fleet meets the other process at
the end of each step that decodes, every 70 ms of virtual time. A step of prompts takes 200 ms and more, so that its
work can wait for a moment in which nothing else is to be done. With all of it done when it came, one process waited
for the other for a quarter of the time.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.engine.job import EngineView
from dsv3.kv_cache.keys import Key
from dsv3.scheduler.request import StepOutputs, Tokens
from tools.simulate.clock import Clock
from tools.simulate.instance import Instance, State
from tools.simulate.pages import Handed
from tools.simulate.prompts import Asked, keys_of
from tools.simulate.times import InstanceTimes

_NOTHING = np.empty(0, np.int64)


class Order(NamedTuple):
    """A step has ended, or there was none: what has been submitted since the last order. The reply is `due` then."""

    now: float
    due: float
    submitted: list[Asked]


class Reply(NamedTuple):
    """How an instance stands after an order, when the steps under way end, and what the first of them gives."""

    state: State
    ends: tuple[float, ...]
    outputs: StepOutputs | None


class Channel(Protocol):
    """A way to a `Worker`: each order has one reply."""

    def send(self, order: Order) -> None:
        """Gives an order without waiting for the reply."""

    def receive(self) -> Reply:
        """Waits for the reply to the last order."""


class Elsewhere(Protocol):
    """A place with a `Worker` for each instance that is opened there."""

    def open(self, times: InstanceTimes, cfg: EngineConfig) -> Channel:
        """Begins an instance."""

    def close(self) -> None:
        """Ends all of them."""


class Here:
    """Workers in this process; `work` is called while it waits for the other one."""

    def __init__(self) -> None:
        self._lines: list[Later] = []

    def open(self, times: InstanceTimes, cfg: EngineConfig) -> "Later":
        """Begins an instance."""
        self._lines.append(Later(times, cfg))
        return self._lines[-1]

    def work(self) -> bool:
        """Obeys the order whose reply is due first; returns whether there was one."""
        first = min((line for line in self._lines if line.order is not None), key=_due, default=None)
        if first is None:
            return False
        first.obey()
        return True


class Later:
    """A channel to a worker that obeys when somebody has time, or waits for its reply."""

    def __init__(self, times: InstanceTimes, cfg: EngineConfig) -> None:
        self._worker = Worker(times, cfg)
        self.order: Order | None = None
        self._reply: Reply | None = None

    def send(self, order: Order) -> None:
        """Keeps an order."""
        self.order = order

    def obey(self) -> None:
        """Has the order obeyed."""
        assert self.order is not None
        self._reply, self.order = self._worker.obey(self.order), None

    def receive(self) -> Reply:
        """Returns the reply to the last order."""
        if self.order is not None:
            self.obey()
        assert self._reply is not None  # each order has one
        return self._reply


def _due(line: Later) -> float:
    assert line.order is not None
    return line.order.due


class Worker:
    """The instance itself. Where it decodes, what a prefill instance has computed is there at once (`Handed`)."""

    def __init__(self, times: InstanceTimes, cfg: EngineConfig) -> None:
        self._clock = Clock()

        def make_pages(view: EngineView, wake: Callable[[], None]) -> Handed | None:
            return Handed(view.scheduler) if times.role == "decode" else None

        self._instance = Instance(times, cfg, self._clock, lambda instance, outputs: None, make_pages)

    def obey(self, order: Order) -> Reply:
        """Takes in what was submitted, plans, and computes what the next step gives."""
        self._clock.now = order.now
        for asked in order.submitted:
            self._instance.take_in(asked, keys_of(asked.content))
        self._instance.launch()
        state, ends = self._instance.state(), self._instance.ends
        return Reply(state, ends, _for_fleet(self._instance.collect()) if ends else None)


def _for_fleet(outputs: StepOutputs) -> StepOutputs:
    """Returns outputs without the tokens of the columns: a fleet only looks at whose they are."""
    return StepOutputs([Tokens(rows.ids, _NOTHING, _NOTHING) for rows in outputs.columns], outputs.details)


class Apart(Instance):
    """Stands for an instance that a `Worker` has."""

    def __init__(
        self,
        times: InstanceTimes,
        cfg: EngineConfig,
        clock: Clock,
        hear: Callable[[Instance, StepOutputs], None],
        channel: Channel,
    ) -> None:
        self.times, self.cfg, self._clock, self._hear = times, cfg, clock, hear
        self._channel = channel
        self._submitted: list[Asked] = []
        self._reply, self._waits = Reply(State(), (), None), False
        self._ends: tuple[float, ...] = ()  # of the steps under way, as far as replies have told

    def submit(self, asked: Asked, keys: Sequence[Key]) -> None:
        """Queues a request, whose keys are made anew elsewhere; where nothing is under way it begins."""
        self._submitted.append(asked)
        if not self._ends:
            self._order()
            self._await()

    def state(self) -> State:
        """Returns how it stands, with what has been submitted since."""
        state, tokens = self._told().state, sum(asked.tokens for asked in self._submitted)
        requests, queued = state.requests + len(self._submitted), state.queued_tokens + tokens
        return dataclasses.replace(state, requests=requests, queued_tokens=queued)

    def found(self, keys: Sequence[Key]) -> int:
        """Returns 0: what decodes has no prefix cache, and what prefills is apart only where nobody asks."""
        return 0

    def _order(self) -> None:
        now = self._clock.now
        self._channel.send(Order(now, self._ends[0] if self._ends else now, self._submitted))
        self._submitted, self._waits = [], True

    def _told(self) -> Reply:
        """Returns the reply to the last order."""
        if self._waits:
            self._reply, self._waits = self._channel.receive(), False
        return self._reply

    def _await(self) -> None:
        """Has the end of the next step heard of; whether there is one may be known only from the reply."""
        if not self._ends:
            self._ends = self._told().ends
        if self._ends:
            self._clock.at(self._ends[0], self._ended)

    def _ended(self) -> None:
        """Passes on what the step has given that has just ended."""
        _, ends, outputs = self._told()
        assert outputs is not None  # the step was under way
        self._ends = ends[1:]
        self._order()
        self._await()
        self._hear(self, outputs)
