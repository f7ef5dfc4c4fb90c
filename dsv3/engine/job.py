"""A kind of work in a step: what one file of `dsv3/engine/jobs/` provides.

A step is a list of jobs. Each kind has four parts, in this order through a step:

    plan      the planner looks at the scheduler's state and says what the devices shall do     leader
    command   that, as host arrays: what every process of an instance executes                  all
    program   the worker launches compiled programs with it                                     all
    result    the planner takes in what came back, one step late                                leader

`docs/extending.md` walks through a new kind.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self

import msgspec
import numpy as np

from dsv3.engine.components import EngineComponents
from dsv3.engine.device.devices import Devices
from dsv3.engine.device.layout import Layout, Watch
from dsv3.engine.device.programs import ProgramSpec
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.structured_output import Masks

Tell = Callable[[bytes], None]
"""Sends the planner of a kind a message. It waits for nobody, and any thread may call it."""
Hear = Callable[[int, bytes], None]
"""Takes a message from the process of this id; the thread that receives from this process calls it."""


class FollowerHandler(Protocol):
    """A follower's half of a kind whose commands ask for more than programs."""

    def prepared(self, command: Any) -> Any:
        """Begins what a command asks for; returns the command to launch. The launching thread calls it."""

    def take(self, command: Any, results: Any) -> None:
        """Takes in what came back of a job. The thread that reads results calls it, step after step."""


class WorkEvents:
    """What followers tell planners, by kind. What comes before a planner listens is kept for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, Hear] = {}
        self._kept: dict[str, list[tuple[int, bytes]]] = {}

    def put(self, kind: str, process_id: int, body: bytes) -> None:
        """Hands a message to the planner of `kind`."""
        with self._lock:
            if kind in self._listeners:
                self._listeners[kind](process_id, body)
            else:
                self._kept.setdefault(kind, []).append((process_id, body))

    def listen(self, kind: str, hear: Hear) -> None:
        """Has `hear` called with each message for the planner of `kind`, one at a time and in their order."""
        with self._lock:
            for process_id, body in self._kept.pop(kind, []):
                hear(process_id, body)
            self._listeners[kind] = hear


class Command(msgspec.Struct, frozen=True):
    """What the devices do for one job: numbers and numpy arrays, encodable by `dsv3.engine.cluster.messages`."""

    def part(self, ranks: range) -> Self:
        """Returns what a process with `ranks` needs of it, ranks counted from its first one. Here: everything."""
        return self

    @property
    def amount(self) -> int:
        """Rows or tokens that the devices compute, for people; 0 where that means nothing."""
        return 0


@dataclasses.dataclass(frozen=True, slots=True)
class StepCommand:
    """One step: jobs in the order in which they are launched, each the name of its kind and the kind's command."""

    number: int
    jobs: tuple[tuple[str, Command], ...]

    def part(self, ranks: range) -> "StepCommand":
        """Returns what a process with `ranks` needs of it."""
        return StepCommand(self.number, tuple((kind, command.part(ranks)) for kind, command in self.jobs))


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A job of a step under way: its command, and what `collect` needs beside the results.

    Where a part of it needs the results of the step before, `later` makes the command of that part, its rest, from that
    step's outputs. The jobs up to this one are launched at once, its rest and those behind it once these are in.
    """

    kind: str
    command: Command
    context: Any = None
    later: Callable[[StepOutputs], Command] | None = None
    is_rest: bool = False

    def rest(self, outputs: StepOutputs) -> list["Planned"]:
        """Returns the rest of a job that has one, made now."""
        return [] if self.later is None else [Planned(self.kind, self.later(outputs), self.context, is_rest=True)]


@dataclasses.dataclass(frozen=True)
class EngineView:
    """What planners see of the engine: the scheduler, which they change, and its parts, which they do not.

    `work_events` are what followers tell; None in an instance of one process. `masks` are there where requests can be
    held to a grammar.
    """

    scheduler: Scheduler
    parts: EngineComponents
    work_events: WorkEvents | None = None
    masks: Masks | None = None


class Planner(Protocol):
    """The host's half of a kind, in the process that schedules. One thread calls it."""

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Returns what this kind adds to a step that holds `step` so far; empty if nothing."""

    def collect(self, planned: Planned, results: Any, outputs: StepOutputs) -> None:
        """Takes in the results of one of its jobs, and adds to `outputs` what requests have got.

        They are what its worker has returned, as numpy arrays; a job with a rest has results of both.
        """

    def stats(self) -> object | None:
        """Returns a record of numbers for `EngineStats`, None if there are none. Any thread may ask."""


class Worker(Protocol):
    """The devices' half of a kind, in every process."""

    def launch(self, command: Any) -> Any:
        """Starts a job without waiting for a device.

        Returns the arrays that `collect` will see, in a tuple, named or not; their copies to the host are under way.
        """


def _no_watch(parts: EngineComponents) -> Watch | None:
    return None


def _always(parts: EngineComponents) -> bool:
    return True


def _nothing(results: Any) -> Iterable[np.ndarray]:
    return ()


@dataclasses.dataclass(frozen=True)
class JobKind:
    """A kind of work, as it is registered in `dsv3.engine.jobs.registry`.

    Attributes:
      name: how jobs name their kind.
      command: the type of its commands, or several as a union.
      planner: makes the host's half.
      programs: yields every program that serving can need of this kind.
      worker: makes the devices' half.
      applies: whether an engine of these parts has this kind.
      watch: the counters that it keeps, None if it keeps none.
      aside: makes what a follower does for it beside running programs; None where that is nothing.
      agreed: gives of a job's results those that are the same in every process of an instance, which compare them.
    """

    name: str
    command: Any
    planner: Callable[[EngineView], Planner]
    programs: Callable[[Layout], Iterable[ProgramSpec]]
    worker: Callable[[Devices], Worker]
    applies: Callable[[EngineComponents], bool] = _always
    watch: Callable[[EngineComponents], Watch | None] = _no_watch
    agreed: Callable[[Any], Iterable[np.ndarray]] = _nothing
    follower_handler: Callable[[EngineComponents, Tell], FollowerHandler] | None = None
