"""Simulates a pipeline schedule: start times, bubbles, and micro-batches in flight. Imports no jax."""

import dataclasses
from collections.abc import Iterable

from training.pipeline.schedules import Operation, Pass, PassKind, PipelineSchedule, text


@dataclasses.dataclass(frozen=True)
class Durations:
    """Time of each operation, in any unit. `backward` is the whole one, `weight` its half that can be deferred.

    With the defaults the published formulas hold exactly on every rank. Sends take no time.
    """

    forward: float = 1
    backward: float = 2
    weight: float = 1
    pair: float = 3

    def of(self, operation: Operation) -> float:
        """Returns the time of one operation."""
        if len(operation) == 2:
            return self.pair
        return {
            PassKind.FORWARD: self.forward,
            PassKind.BACKWARD: self.backward,
            PassKind.INPUT: self.backward - self.weight,
            PassKind.WEIGHT: self.weight,
        }[operation[0].kind]


UNITS = Durations()
"""Forward 1, input gradient 1, weight gradient 1: the durations of the published figures."""


@dataclasses.dataclass(frozen=True)
class TimedOperation:
    """An operation of a rank, from `start` to `end`."""

    rank: int
    operation: Operation
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class ScheduleTimeline:
    """All operations of a step, by start; those that start together by rank."""

    schedule: PipelineSchedule
    events: tuple[TimedOperation, ...]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(event.end for event in self.events)

    def bubbles(self) -> list[float]:
        """Returns the idle time of each rank."""
        busy = [0.0] * self.schedule.ranks
        for event in self.events:
            busy[event.rank] += event.end - event.start
        return [self.makespan - time for time in busy]

    def in_flight(self) -> list[int]:
        """Returns for each rank the most micro-batches whose activations it keeps at once, over all its stages.

        A forward allocates them at its start; the whole backward, or the weight gradient, frees them at its end.
        """
        return [_peak(e.operation for e in self.events if e.rank == rank) for rank in range(self.schedule.ranks)]


def _peak(operations: Iterable[Operation]) -> int:
    kept = peak = 0
    for operation in operations:
        kept += sum(part.kind is PassKind.FORWARD for part in operation)
        peak = max(peak, kept)
        kept -= sum(part.kind in (PassKind.BACKWARD, PassKind.WEIGHT) for part in operation)
    return peak


def simulate(schedule: PipelineSchedule, durations: Durations = UNITS) -> ScheduleTimeline:
    """Starts each operation as soon as its rank is free and its inputs are available.

    Raises ValueError for a deadlock, and for an operation that is missing or appears twice.
    """
    _check_complete(schedule)
    ended: dict[_Done, float] = {}
    free, positions = [0.0] * schedule.ranks, [0] * schedule.ranks
    events: list[TimedOperation] = []
    while len(events) < sum(map(len, schedule.orders)):
        ready = [_start(schedule, rank, positions[rank], free[rank], ended) for rank in range(schedule.ranks)]
        times = [(start, rank) for rank, start in enumerate(ready) if start is not None]
        if not times:
            raise ValueError(f"deadlock: every rank waits: {_next_operations(schedule, positions)}")
        start, rank = min(times)
        operation = schedule.orders[rank][positions[rank]]
        end = start + durations.of(operation)
        events.append(TimedOperation(rank, operation, start, end))
        free[rank], positions[rank] = end, positions[rank] + 1
        ended |= {_done(schedule, rank, part): end for part in operation}
    return ScheduleTimeline(schedule, tuple(events))


_Done = tuple[PassKind, int, int]
"""A completed pass: kind (`PassKind.INPUT` for every input gradient), stage, micro-batch of the step."""


def _done(schedule: PipelineSchedule, rank: int, part: Pass) -> _Done:
    kind = PassKind.INPUT if part.kind is PassKind.BACKWARD else part.kind
    return kind, schedule.stage(rank, part.direction), schedule.batch(part)


def _start(
    schedule: PipelineSchedule, rank: int, position: int, free: float, ended: dict[_Done, float]
) -> float | None:
    """Returns when the rank's next operation can start; None if it has none, or its inputs are not scheduled yet."""
    if position == len(schedule.orders[rank]):
        return None
    needed = [need for part in schedule.orders[rank][position] for need in _needs(schedule, rank, part)]
    if any(need not in ended for need in needed):
        return None
    return max([free, *(ended[need] for need in needed)])


def _needs(schedule: PipelineSchedule, rank: int, part: Pass) -> list[_Done]:
    kind, stage, batch = _done(schedule, rank, part)
    if kind is PassKind.FORWARD:
        return [(PassKind.FORWARD, stage - 1, batch)] if stage else []
    if kind is PassKind.WEIGHT:
        return [(PassKind.INPUT, stage, batch)]
    last = stage == schedule.stages - 1
    return [(PassKind.FORWARD, stage, batch)] + ([] if last else [(PassKind.INPUT, stage + 1, batch)])


def _check_complete(schedule: PipelineSchedule) -> None:
    """Raises ValueError unless each stage runs each micro-batch's forward, input and weight gradient once."""
    seen: dict[_Done, int] = {}
    for rank, order in enumerate(schedule.orders):
        for part in (part for operation in order for part in operation):
            _, stage, batch = done = _done(schedule, rank, part)
            both = part.kind is PassKind.BACKWARD
            for key in [done, (PassKind.WEIGHT, stage, batch)] if both else [done]:
                seen[key] = seen.get(key, 0) + 1
    for kind in (PassKind.FORWARD, PassKind.INPUT, PassKind.WEIGHT):
        for stage in range(schedule.stages):
            for batch in range(schedule.micro_batches):
                if (count := seen.get((kind, stage, batch), 0)) != 1:
                    what = f"{kind.value} of micro-batch {batch} in stage {stage}"
                    raise ValueError(f"{schedule.algorithm}: {what} appears {count} times, not once")


def _next_operations(schedule: PipelineSchedule, positions: list[int]) -> str:
    orders = enumerate(zip(schedule.orders, positions, strict=True))
    waiting = [(rank, order[position]) for rank, (order, position) in orders if position < len(order)]
    return ", ".join(f"rank {rank} for {text(operation)}" for rank, operation in waiting)
