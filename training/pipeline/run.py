"""Runs a pipeline schedule: launches each operation's program on its rank, and copies its results to the next rank.

One process launches the programs of all ranks, in the order of their simulated starts. Launches are asynchronous, so
ranks compute concurrently; a rank's programs run in the order of its schedule.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharding import mesh, processes
from training.loss import target_counts
from training.pipeline.programs import StagePrograms
from training.pipeline.ranks import SPLIT
from training.pipeline.schedules import PassKind, PipelineSchedule
from training.pipeline.simulator import TimedOperation, simulate
from training.pipeline.stages import StageParams

RankStage = tuple[int, int]
"""A rank, and a stage whose weights it holds."""
Chunk = tuple[int, int]
"""A stage, and a micro-batch of the step."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The results of a step's operations.

    `gradients` are float32 sums over a rank's micro-batches, on its devices. `reports` has for each stage those of its
    micro-batches; each value has a leading axis of the rank's devices. `events` are the operations in the order of
    their launch, with simulated times; `in_flight` has for each rank the most micro-batches with kept activations.
    """

    gradients: Mapping[RankStage, StageParams]
    reports: Sequence[list[dict[str, Any]]]
    events: tuple[TimedOperation, ...]
    in_flight: tuple[int, ...]


class PipelineRunner:
    """Runs the steps of one schedule over `meshes`, one per rank."""

    def __init__(self, schedule: PipelineSchedule, programs: StagePrograms, meshes: Sequence[Mesh], mtp_modules: int):
        self.schedule, self.programs, self.meshes = schedule, programs, meshes
        self._events = simulate(schedule).events
        self._mtp_modules = mtp_modules

    @property
    def rank_stages(self) -> list[RankStage]:
        """All pairs of a rank and a stage that it holds."""
        schedule = self.schedule
        return [(rank, schedule.stage(rank, d)) for rank in range(schedule.ranks) for d in range(schedule.directions)]

    def place_weights(self, weights: Sequence[StageParams]) -> dict[RankStage, StageParams]:
        """Copies the weights of every stage to the ranks that hold it."""
        shardings = {
            (rank, stage): mesh.shardings(self.programs.stages[stage].weight_partitions, self.meshes[rank])
            for rank, stage in self.rank_stages
        }
        return {place: processes.move(weights[place[1]], where) for place, where in shardings.items()}

    def run(self, weights: Mapping[RankStage, StageParams], tokens: np.ndarray) -> StepResult:
        """Computes the gradients of `tokens` `[B, S]`; the schedule's micro-batches must divide B.

        `weights` are those of `place_weights`.
        """
        batches = np.split(tokens, self.schedule.micro_batches)
        step = _PipelineStep(self, weights, batches, target_counts(tokens, self._mtp_modules))
        for event in self._events:
            step.launch(event)
        gradients = {place: self.programs.gradient[place[1]](total) for place, total in step.totals.items()}
        return StepResult(gradients, step.reports, tuple(step.events), tuple(step.peak_in_flight))


class _PipelineStep:
    """The values of a running step: received, saved for backwards, and kept for weight gradients, by rank."""

    def __init__(
        self, runner: PipelineRunner, weights: Mapping[RankStage, StageParams], batches: list[np.ndarray], counts: Any
    ):
        self.schedule, self.programs, self.meshes = runner.schedule, runner.programs, runner.meshes
        self.weights, self.batches, self.counts = weights, batches, counts
        self.totals = {place: self.programs.zeros[place[1]](tree) for place, tree in weights.items()}
        self.reports: list[list[dict[str, Any]]] = [[] for _ in range(self.schedule.stages)]
        self.events: list[TimedOperation] = []
        ranks = range(self.schedule.ranks)
        self.peak_in_flight = [0 for _ in ranks]
        self._received: dict[tuple[PassKind, Chunk], jax.Array] = {}
        self._saved: list[dict[Chunk, list[jax.Array]]] = [{} for _ in ranks]
        self._kept: list[dict[Chunk, list[jax.Array]]] = [{} for _ in ranks]

    def launch(self, event: TimedOperation) -> None:
        """Launches one operation and sends its results to the next ranks."""
        rank = event.rank
        chunks = [(self.schedule.stage(rank, part.direction), self.schedule.batch(part)) for part in event.operation]
        if len(chunks) == 2:
            (forward, backward), pair = chunks, self.programs.pair(chunks[0][0], chunks[1][0])
            results = pair(*self._forward_inputs(rank, forward), *self._backward_inputs(rank, backward))
            self._after_forward(rank, forward, *results[0])
            self._after_backward(rank, backward, *results[1])
        else:
            _SINGLE[event.operation[0].kind](self, rank, chunks[0])
        self.events.append(event)

    def forward(self, rank: int, chunk: Chunk) -> None:
        program = self.programs.forward[chunk[0]]
        self._after_forward(rank, chunk, *program(*self._forward_inputs(rank, chunk)))

    def backward(self, rank: int, chunk: Chunk) -> None:
        program = self.programs.backward[chunk[0]]
        self._after_backward(rank, chunk, *program(*self._backward_inputs(rank, chunk)))

    def input_gradient(self, rank: int, chunk: Chunk) -> None:
        stage = chunk[0]
        weights, _, saved, dy = self._backward_inputs(rank, chunk)
        dx, made = self.programs.input_gradient[stage](weights, saved, dy)
        self._kept[rank][chunk] = self.programs.stages[stage].keep(self._saved[rank].pop(chunk), made)
        self._send_back(chunk, dx)

    def weight_gradient(self, rank: int, chunk: Chunk) -> None:
        place = rank, chunk[0]
        program, kept = self.programs.weight_gradient[chunk[0]], self._kept[rank].pop(chunk)
        self.totals[place] = program(self.weights[place], self.totals[place], kept)

    def _forward_inputs(self, rank: int, chunk: Chunk) -> tuple[Any, ...]:
        stage, batch = chunk
        last = stage == self.schedule.stages - 1
        entry = self._received.pop((PassKind.FORWARD, chunk)) if stage else self._tokens(rank, batch)
        return self.weights[rank, stage], entry, (self._tokens(rank, batch), self.counts) if last else ()

    def _tokens(self, rank: int, batch: int) -> jax.Array:
        return processes.place(self.batches[batch], self._rows_of(rank))

    def _after_forward(self, rank: int, chunk: Chunk, y: jax.Array, report: Any, saved: list[jax.Array]) -> None:
        stage, batch = chunk
        self.reports[stage].append(report)
        self._saved[rank][chunk] = saved
        self.peak_in_flight[rank] = max(self.peak_in_flight[rank], len(self._saved[rank]) + len(self._kept[rank]))
        if stage < self.schedule.stages - 1:
            self._send(PassKind.FORWARD, (stage + 1, batch), y)

    def _backward_inputs(self, rank: int, chunk: Chunk) -> tuple[Any, ...]:
        stage, place = chunk[0], (rank, chunk[0])
        last = stage == self.schedule.stages - 1
        dy = _ONE if last else self._received.pop((PassKind.INPUT, chunk))
        return self.weights[place], self.totals[place], self._saved[rank][chunk], dy

    def _after_backward(self, rank: int, chunk: Chunk, dx: jax.Array | None, total: StageParams) -> None:
        self.totals[rank, chunk[0]] = total
        del self._saved[rank][chunk]
        self._send_back(chunk, dx)

    def _send_back(self, chunk: Chunk, dx: jax.Array | None) -> None:
        if dx is not None:
            self._send(PassKind.INPUT, (chunk[0] - 1, chunk[1]), dx)

    def _send(self, kind: PassKind, chunk: Chunk, value: jax.Array) -> None:
        rank = self.schedule.rank(*chunk)
        self._received[kind, chunk] = processes.move(value, self._rows_of(rank))

    def _rows_of(self, rank: int) -> NamedSharding:
        return NamedSharding(self.meshes[rank], SPLIT)


_ONE = np.float32(1)
"""The gradient of the objective with respect to itself."""
_SINGLE = {
    PassKind.FORWARD: _PipelineStep.forward,
    PassKind.BACKWARD: _PipelineStep.backward,
    PassKind.INPUT: _PipelineStep.input_gradient,
    PassKind.WEIGHT: _PipelineStep.weight_gradient,
}
