"""What the dashboard shows of an engine besides its metrics: its last steps, and the load of its experts.

Steps are recorded only while a dashboard polls, or while a profile is taken; both end by themselves. No jax: API
servers import this module.
"""

from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import NamedTuple

import msgspec

RECORD_S = 5.0
"""How long steps are recorded after a snapshot, in seconds."""

STEPS_SHOWN = 240
MAX_PROFILE_STEPS = 10_000
MAX_PROFILE_S = 60.0


class StepPhase(NamedTuple):
    """The end of a phase of a step, by `time.perf_counter`: "take requests", "plan decode", "launch", "wait" ..."""

    what: str
    at: float


class JobRecord(NamedTuple):
    """A job of a step: its kind, and the rows or tokens of its batch (0 where that has no meaning)."""

    kind: str
    amount: int


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One call of `Engine.step`.

    It launched step `launched` with `jobs`, and processed the results of step `collected`; 0 where there was none.
    Times are seconds of `time.perf_counter`; each part begins where the one before ends, the first at `began`. "wait"
    is the host's wait for results. `running` and `waiting` count requests at the end.
    """

    launched: int
    collected: int
    began: float
    parts: list[StepPhase]
    jobs: list[JobRecord]
    running: int
    waiting: int

    @property
    def ended(self) -> float:
        """End of the last part."""
        return self.parts[-1].at if self.parts else self.began


class ExpertLoad(msgspec.Struct, frozen=True):
    """The load of routed experts on several devices, float32 little endian; its layers are the MoE layers.

    `load` `[layers, experts]` counts (token, expert) pairs of the last read-outs. `device_load` `[layers, devices]` is
    the devices' share of it under the present expert map. `before` and `after`, of the same shape, are their shares of
    the load that caused the last rebalance, under the map before it and under the present one; empty where nothing was
    moved. `version` changes with each read-out and each move.
    """

    version: int
    layers: int
    experts: int
    devices: int
    load: bytes
    device_load: bytes
    before: bytes = b""
    after: bytes = b""


class EngineSnapshot(msgspec.Struct, frozen=True, tag=True):
    """The last steps, oldest first, and the experts' load, None where devices share none."""

    steps: list[StepRecord]
    experts: ExpertLoad | None


class StepLog:
    """Records of the last steps, made by the thread that steps. While recording is off, `done` costs one call."""

    def __init__(self) -> None:
        self.is_on = False
        self._until = self._profile_until = float("-inf")
        self._last: deque[StepRecord] = deque(maxlen=STEPS_SHOWN)
        self._profile: list[StepRecord] = []
        self._began = 0.0
        self._parts: list[StepPhase] = []

    def snapshot(self) -> list[StepRecord]:
        """Returns the steps of the last `RECORD_S` seconds, and keeps recording on for as long again."""
        now = perf_counter()
        self._until, self.is_on = now + RECORD_S, True
        return [record for record in self._last if now - record.ended < RECORD_S]

    def start_profile(self) -> None:
        """Records steps from now on, up to `MAX_PROFILE_STEPS` and for `MAX_PROFILE_S`; drops an earlier profile."""
        self._profile = []
        self._profile_until, self.is_on = perf_counter() + MAX_PROFILE_S, True

    def stop_profile(self) -> list[StepRecord]:
        """Ends the profile and returns its steps."""
        self._profile_until = float("-inf")
        profile, self._profile = self._profile, []
        return profile

    def begin(self, at: float) -> None:
        """Begins a step."""
        if self.is_on:
            self._began, self._parts = at, []

    def done(self, what: str) -> None:
        """Records the end of a phase of the step."""
        if self.is_on:
            self._parts.append(StepPhase(what, perf_counter()))

    def end(self, launched: int, collected: int, jobs: Iterable[JobRecord], running: int, waiting: int) -> None:
        """Completes the step's record; turns recording off when it is no longer wanted."""
        if not self._parts:
            return  # recording was turned on within this step
        record = StepRecord(launched, collected, self._began, self._parts, list(jobs), running, waiting)
        self._parts = []
        self._last.append(record)
        profiling = self._began < self._profile_until and len(self._profile) < MAX_PROFILE_STEPS
        if profiling:
            self._profile.append(record)
        self.is_on = profiling or self._began < self._until
        if not self.is_on:
            self._last.clear()
