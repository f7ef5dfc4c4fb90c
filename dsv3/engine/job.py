"""A kind of work in a step: the contract that each file of `dsv3/engine/jobs/` implements.

A step is a list of jobs. Each kind has four parts, in this order through a step:

    plan      the planner reads the scheduler's state and decides what the devices shall do    leader
    command   that decision as host arrays, which every process of an instance executes        all
    program   `launch` starts compiled programs with it                                        all
    result    the planner processes what came back, one step late                              leader

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
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import ProgramSpec
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.structured_output import Masks

PublishEvent = Callable[[bytes], None]
"""Sends an event to the planner of a kind. It does not block, and any thread may call it."""
OnEvent = Callable[[int, bytes], None]
"""Receives an event from the process of this id, on the thread that receives from that process."""


class FollowerHandler(Protocol):
    """A follower's half of a kind whose commands need more than programs."""

    def prepare(self, command: Any) -> Any:
        """Starts what a command needs; returns the command to launch. The launching thread calls it."""

    def on_results(self, command: Any, results: Any) -> None:
        """Processes the results of a job. The thread that reads results calls it, step after step."""


class WorkEvents:
    """Events from followers to planners, by kind of work. Events before a planner subscribes are kept for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscribers: dict[str, OnEvent] = {}
        self._kept: dict[str, list[tuple[int, bytes]]] = {}

    def publish(self, kind: str, process_id: int, body: bytes) -> None:
        """Delivers an event to the planner of `kind`."""
        with self._lock:
            if kind in self._subscribers:
                self._subscribers[kind](process_id, body)
            else:
                self._kept.setdefault(kind, []).append((process_id, body))

    def subscribe(self, kind: str, on_event: OnEvent) -> None:
        """Calls `on_event` with each event for the planner of `kind`, one at a time and in order."""
        with self._lock:
            for process_id, body in self._kept.pop(kind, []):
                on_event(process_id, body)
            self._subscribers[kind] = on_event


class Command(msgspec.Struct, frozen=True):
    """What the devices do for one job: numbers and numpy arrays, encoded by `dsv3.engine.cluster.messages`."""

    def part(self, ranks: range) -> Self:
        """Returns the part that a process with `ranks` needs, ranks counted from its first one. Here: everything."""
        return self

    @property
    def amount(self) -> int:
        """Rows or tokens that the devices compute, for the step log; 0 where that has no meaning."""
        return 0


@dataclasses.dataclass(frozen=True, slots=True)
class StepCommand:
    """One step: jobs in the order of their launches, each the name of its kind and the kind's command."""

    number: int
    jobs: tuple[tuple[str, Command], ...]

    def part(self, ranks: range) -> "StepCommand":
        """Returns the part that a process with `ranks` needs."""
        return StepCommand(self.number, tuple((kind, command.part(ranks)) for kind, command in self.jobs))


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A job of a step in flight: its command, and what `on_results` needs besides the results.

    Where a part of the job needs the results of the previous step, `deferred` makes the command of that part from that
    step's outputs. The jobs up to this one are launched at once, the deferred part and the jobs behind it once those
    results are in.
    """

    kind: str
    command: Command
    context: Any = None
    deferred: Callable[[StepOutputs], Command] | None = None
    is_deferred: bool = False

    def resolve(self, outputs: StepOutputs) -> list["Planned"]:
        """Returns the deferred part of the job, if it has one, with its command made from `outputs`."""
        if self.deferred is None:
            return []
        return [Planned(self.kind, self.deferred(outputs), self.context, is_deferred=True)]


@dataclasses.dataclass(frozen=True)
class EngineView:
    """What planners see of the engine: the scheduler, which they change, and its components, which they do not.

    `work_events` come from followers; None in an instance of one process. `masks` make token bitmasks; None where the
    model has no tokenizer.
    """

    scheduler: Scheduler
    components: EngineComponents
    work_events: WorkEvents | None = None
    masks: Masks | None = None


class Planner(Protocol):
    """The scheduling half of a kind, in the process that schedules. One thread calls it."""

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Returns the jobs that this kind adds to a step that holds `step` so far."""

    def on_results(self, planned: Planned, results: Any, outputs: StepOutputs) -> None:
        """Processes the results of one of its jobs, and adds to `outputs` what requests get.

        Results are what `launch` returned, as numpy arrays; a job with a deferred part has results of both.
        """

    def stats(self) -> object | None:
        """Returns a record of numbers for `EngineStats`, None if there are none. Any thread may call it."""


@dataclasses.dataclass(frozen=True)
class JobKind:
    """A kind of work, as registered in `dsv3.engine.jobs`.

    Attributes:
      name: how jobs name their kind.
      command: the type of its commands, or several as a union.
      planner: makes the scheduling half.
      programs: yields every program that serving can need of this kind.
      launch: starts a job in a process without waiting for a device. Returns a tuple, named or not, of the arrays that
        `on_results` gets; their copies to the host have been started.
      applies: whether an engine of these components has this kind.
      replicated: yields the results of a job that are equal in every process of an instance, which compare them.
      follower_handler: makes the follower's half of what is more than running programs; None without one.
    """

    name: str
    command: Any
    planner: Callable[[EngineView], Planner]
    programs: Callable[[Layout], Iterable[ProgramSpec]]
    launch: Callable[[Devices, Any], Any]
    applies: Callable[[EngineComponents], bool] = lambda _: True
    replicated: Callable[[Any], Iterable[np.ndarray]] = lambda _: ()
    follower_handler: Callable[[EngineComponents, PublishEvent], FollowerHandler] | None = None
