"""Notes what each step computes on each rank, and tells it with the step's time once its results are in."""

import dataclasses
from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.engine.job import Planned
from dsv3.engine.jobs import prefill
from dsv3.engine.jobs.decode import DecodeCommand
from dsv3.engine.step_reports import Queued, Scheduled, StepMetrics
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import Sequence

_QUEUE_S = 0.1  # the queue may hold a thousand requests: it is looked at so often and no more


class TakesSteps(Protocol):
    """Where steps go; `dsv3.engine.step_reports.StepPublisher` is one."""

    def publish(self, step: list[StepMetrics]) -> None:
        """Takes what one step did on each rank."""


class Moments(NamedTuple):
    """How many numbers, their sum and their variance, by rank."""

    number: list[int]
    total: list[int]
    variance: list[float]


def moments(ranks: np.ndarray, values: np.ndarray, num_ranks: int) -> Moments:
    """Returns the moments of `values` `[n]` by their `ranks` `[n]`, zeros for a rank without any."""
    count = np.bincount(ranks, minlength=num_ranks)
    total = np.bincount(ranks, values, num_ranks)
    some = np.maximum(count, 1)
    variance = np.bincount(ranks, (values - (total / some)[ranks]) ** 2, num_ranks) / some
    return Moments(count.tolist(), total.astype(np.int64).tolist(), variance.tolist())


@dataclasses.dataclass
class _Launched:
    """A step under way: of each chunk its rank, its prompt's length, its tokens and those before; of each row its rank
    and its tokens."""

    at: float
    chunks: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    rows: list[np.ndarray] = dataclasses.field(default_factory=list)  # [2, n] each

    def scheduled(self, num_ranks: int) -> list[Scheduled]:
        """Returns what each rank computes."""
        ranks, lengths, computed, before = np.array(self.chunks, np.int64).reshape(-1, 4).T
        held, tokens = np.concatenate([np.zeros((2, 0), np.int64), *self.rows], axis=1)
        prompts = moments(ranks, lengths, num_ranks)
        columns = (
            prompts.number,
            moments(ranks, computed, num_ranks).total,
            prompts.variance,
            moments(ranks, before, num_ranks).total,
            *moments(held, tokens, num_ranks),
        )
        return [Scheduled(*each) for each in zip(*columns, strict=True)]


class StepNotes:
    """Tells `publisher` what the steps of `scheduler` do, under the name `worker_id`; one thread calls it."""

    def __init__(self, scheduler: Scheduler, publisher: TakesSteps, worker_id: str) -> None:
        self._scheduler, self._publisher, self._worker_id = scheduler, publisher, worker_id
        self._cfg: EngineConfig = scheduler.cfg
        self._under_way: deque[_Launched] = deque()
        self._collected = 0.0
        self._queued: list[Queued] = []
        self._looked = float("-inf")

    def launched(self, jobs: list[Planned], *, is_more: bool) -> None:
        """Notes jobs that have just been launched: a step, or more of the step that was launched last."""
        if not is_more:
            self._under_way.append(_Launched(perf_counter()))
        step = self._under_way[-1]
        for job in jobs:
            if job.kind == prefill.NAME:
                step.chunks += [
                    (rank, chunk.sequence.prompt_length, chunk.stop - chunk.start, chunk.start)
                    for rank, mine in enumerate(job.context)
                    for chunk in mine
                ]
            elif isinstance(job.command, DecodeCommand):
                step.rows.append(self._rows(job.command))

    def collected(self) -> None:
        """Tells of the oldest step under way, whose results are in; nothing of one that ran no layers."""
        step, now = self._under_way.popleft(), perf_counter()
        seconds, self._collected = now - max(step.at, self._collected), now
        if not step.chunks and not step.rows:
            return
        if now - self._looked >= _QUEUE_S:
            self._queued, self._looked = self._waiting(), now
        scheduled = step.scheduled(self._cfg.num_ranks)
        self._publisher.publish(
            [
                StepMetrics(1, self._worker_id, rank, 0, seconds, *each)
                for rank, each in enumerate(zip(scheduled, self._queued, strict=True))
            ]
        )

    def _rows(self, command: DecodeCommand) -> np.ndarray:
        """Returns rank and tokens before this step of each row that is no padding, `[2, n]`."""
        rank, row = (command.rows[..., 0] < self._cfg.max_num_seqs).nonzero()
        slots = rank * self._cfg.max_num_seqs + command.rows[rank, row, 0]
        return np.stack([rank, self._scheduler.slots.planned[slots] - command.width])

    def _waiting(self) -> list[Queued]:
        """Returns what waits, dealt over the ranks in the order of turns: a request has none before it starts."""
        waiting = self._scheduler.waiting
        prompts = self._dealt(each for each in waiting if not each.started)
        answers = self._dealt(each for each in waiting if each.started)
        return [Queued(*each) for each in zip(*prompts, *answers, strict=True)]

    def _dealt(self, waiting: Iterable[Sequence]) -> Moments:
        lengths = np.array([len(sequence.tokens) for sequence in waiting], np.int64)
        return moments(np.arange(len(lengths)) % self._cfg.num_ranks, lengths, self._cfg.num_ranks)
