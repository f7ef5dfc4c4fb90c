"""What an engine shows to somebody who looks, beyond its numbers: its last steps, and the load of its experts.

Steps are noted only while somebody looks, or while a profile is taken; both end by themselves. No jax: fronts read it.
"""

from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import NamedTuple

import msgspec

LOOK_S = 5.0
"""How long steps are noted after a look, in seconds."""

STEPS_SHOWN = 240
MAX_PROFILE_STEPS = 10_000
MAX_PROFILE_S = 60.0


class StepPhase(NamedTuple):
    """The end of a part of a step, by `time.perf_counter`: "take requests", "plan decode", "launch", "wait" ..."""

    what: str
    at: float


class JobNote(NamedTuple):
    """A job of a step: its kind, and how many rows or tokens its batch has (0 where that means nothing)."""

    kind: str
    amount: int


class StepNote(msgspec.Struct, frozen=True, array_like=True):
    """One call of `Engine.step`.

    It launched step `launched` with `jobs`, and took the results of step `collected`; 0 where there was none. Times are
    seconds of `time.perf_counter`; each part begins where the one before ends, the first at `began`. "wait" is the
    host's wait for results. `running` and `waiting` count requests at the end.
    """

    launched: int
    collected: int
    began: float
    parts: list[StepPhase]
    jobs: list[JobNote]
    running: int
    waiting: int

    @property
    def ended(self) -> float:
        """When the last part ended."""
        return self.parts[-1].at if self.parts else self.began


class ExpertLoad(msgspec.Struct, frozen=True):
    """The load of routed experts on several devices, float32 little endian; its layers are the MoE layers.

    `load` `[layers, experts]` counts (token, expert) pairs of the last read-outs. `device_load` `[layers, devices]` is
    what the devices get of it where the experts stand now. `before` and `after`, of the same shape, are what they got
    of the load that decided the last move, where the experts stood before and where they stand now; empty where none
    were moved. `version` changes with each read-out and each move.
    """

    version: int
    layers: int
    experts: int
    devices: int
    load: bytes
    device_load: bytes
    before: bytes = b""
    after: bytes = b""


class EngineSnapshot(msgspec.Struct, frozen=True):
    """What somebody sees: the last steps, oldest first, and the experts' load, None where devices share none."""

    steps: list[StepNote]
    experts: ExpertLoad | None


class StepLog:
    """Notes of the last steps. One thread steps, looks, and takes profiles; `done` costs a call where nobody looks."""

    def __init__(self) -> None:
        self.is_on = False
        self._until = self._profile_until = float("-inf")
        self._last: deque[StepNote] = deque(maxlen=STEPS_SHOWN)
        self._profile: list[StepNote] = []
        self._began = 0.0
        self._parts: list[StepPhase] = []

    def snapshot(self) -> list[StepNote]:
        """Returns the steps that were noted in the last `LOOK_S` seconds, and has those of the next ones noted."""
        now = perf_counter()
        self._until, self.is_on = now + LOOK_S, True
        return [note for note in self._last if now - note.ended < LOOK_S]

    def start_profile(self) -> None:
        """Notes steps from now on, up to `MAX_PROFILE_STEPS` and for `MAX_PROFILE_S`; forgets an earlier profile."""
        self._profile = []
        self._profile_until, self.is_on = perf_counter() + MAX_PROFILE_S, True

    def stop_profile(self) -> list[StepNote]:
        """Returns the steps of the profile, which ends."""
        self._profile_until = float("-inf")
        profile, self._profile = self._profile, []
        return profile

    def begin(self, at: float) -> None:
        """Begins a step."""
        if self.is_on:
            self._began, self._parts = at, []

    def done(self, what: str) -> None:
        """Notes that a part of the step has ended."""
        if self.is_on:
            self._parts.append(StepPhase(what, perf_counter()))

    def end(self, launched: int, collected: int, jobs: Iterable[JobNote], running: int, waiting: int) -> None:
        """Notes the step, and goes off when nobody has looked for long enough."""
        if not self._parts:
            return  # somebody has begun to look within this step
        note = StepNote(launched, collected, self._began, self._parts, list(jobs), running, waiting)
        self._parts = []
        self._last.append(note)
        profiling = self._began < self._profile_until and len(self._profile) < MAX_PROFILE_STEPS
        if profiling:
            self._profile.append(note)
        self.is_on = profiling or self._began < self._until
        if not self.is_on:
            self._last.clear()
