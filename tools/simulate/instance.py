"""One engine without devices: the real scheduler and planners, in virtual time.

As in `dsv3.engine.engine`, a step is planned while the previous one runs, and its results are processed at its end. A
step takes the time of its deployment's table, and every sampled token is 1.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.engine.job import EngineView, JobKind, Planned
from dsv3.engine.jobs import decode, prefill
from dsv3.engine.jobs.decode import DecodeCommand
from dsv3.engine.jobs.pages import PagesCommand
from dsv3.engine.jobs.prefill import PrefillCommand
from dsv3.engine.jobs.sample import ForwardResults
from dsv3.kv_cache.page_keys import Key
from dsv3.scheduler.batch_slots import BatchRows
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import make_sequence
from tools.simulate.pages import SimulatedPagesPlanner, TransferredPages, copy_seconds
from tools.simulate.prompts import VOCAB, SimulatedRequest, prepare_request
from tools.simulate.times import InstanceTimes, VirtualClock

_AHEAD = 2  # steps launched: one runs, one is next


@dataclasses.dataclass(frozen=True)
class Totals:
    """Work of one or several instances since their start; `decode_s` are the seconds of decode programs."""

    steps: int = 0
    busy_s: float = 0.0
    decode_steps: int = 0
    decode_s: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass(frozen=True, slots=True)
class _StepInFlight:
    number: int
    jobs: list[Planned]
    end: float
    seconds: float


class SimulatedInstance:
    """Serves submitted requests; `on_outputs` gets each step's outputs, after the next step has been planned."""

    def __init__(
        self,
        times: InstanceTimes,
        cfg: EngineConfig,
        clock: VirtualClock,
        on_outputs: "Callable[[SimulatedInstance, StepOutputs], None]",
        make_pages: Callable[[EngineView, Callable[[], None]], SimulatedPagesPlanner | TransferredPages | None],
    ) -> None:
        self.times, self.cfg, self._clock, self._on_outputs = times, cfg, clock, on_outputs
        self.scheduler = Scheduler(cfg, VOCAB, times.keys)
        view = EngineView(self.scheduler, None)  # type: ignore[arg-type]  # these planners do not use the components
        kinds = {
            "decode": decode.KIND,
            "pages": make_pages(view, self.wake),
            "prefill": prefill.KIND,
        }
        self._planners: dict[str, Any] = {
            name: kind.planner(view) if isinstance(kind, JobKind) else kind
            for name, kind in kinds.items()
            if kind is not None and (name != "decode" or cfg.role != "prefill")
        }
        self._in_flight: deque[_StepInFlight] = deque()
        self._ones = np.ones((cfg.num_ranks, max(cfg.decode_buckets), 1), np.int32)
        self._steps = self._decode_steps = 0
        self._busy_s = self._decode_s = 0.0

    def submit(self, request: SimulatedRequest, keys: Sequence[Key]) -> None:
        """Queues a request with its prefix keys; a running engine schedules it after its current step."""
        self.scheduler.add(make_sequence(prepare_request(request), keys))
        self.wake()

    def wake(self) -> None:
        """Launches steps if none is in flight."""
        if not self._in_flight:
            self._launch()
            self._schedule_end()

    @property
    def totals(self) -> Totals:
        """Work since the start."""
        admission, counts = self.scheduler.admission, (self._steps, self._busy_s, self._decode_steps, self._decode_s)
        return Totals(*counts, self.scheduler.num_preemptions, admission.prefix_queries, admission.prefix_hits)

    @property
    def is_idle(self) -> bool:
        """Whether the instance has no request."""
        return not self.scheduler.sequences

    @property
    def waiting_tokens(self) -> float:
        """Prompt tokens to compute, weighted by attention: admitted ones, and queued ones without prefix hits."""
        return float(self.scheduler.balancer.backlog.sum()) + self._queued_tokens

    @property
    def use(self) -> tuple[float, float]:
        """The used shares of pages, including those that queued requests need, and of batch slots."""
        scheduler, cfg = self.scheduler, self.cfg
        pages = (scheduler.pages.in_use + self._queued_tokens / cfg.page_size) / (cfg.num_pages * cfg.num_ranks)
        return pages, len(scheduler.sequences) / (cfg.max_num_seqs * cfg.num_ranks)

    @property
    def _queued_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.scheduler.queue)

    def _schedule_end(self) -> None:
        if self._in_flight:
            self._clock.call_at(self._in_flight[0].end, self._on_step_end)

    def _launch(self) -> None:
        """Plans steps until two are in flight."""
        while len(self._in_flight) < _AHEAD:
            jobs = self._plan() or self._plan()  # an engine that launched nothing plans again at once
            if not jobs:
                return
            number = self.scheduler.pages.begin_step()
            start = self._in_flight[-1].end if self._in_flight else self._clock.now
            seconds = self._seconds(jobs)
            self._in_flight.append(_StepInFlight(number, jobs, start + seconds, seconds))

    def _plan(self) -> list[Planned]:
        self.scheduler.admission.preempt_for_waiting()
        jobs: list[Planned] = []
        for planner in self._planners.values():
            jobs += planner.plan(jobs)
        return jobs

    def _on_step_end(self) -> None:
        """Processes the results of the step that has just ended, and plans the one after the next."""
        outputs = self._collect()
        self._launch()
        self._schedule_end()
        self._on_outputs(self, outputs)

    def _collect(self) -> StepOutputs:
        """Processes the results of the oldest step in flight, and returns its outputs."""
        step, outputs = self._in_flight.popleft(), StepOutputs([], [])
        self._steps, self._busy_s = self._steps + 1, self._busy_s + step.seconds
        for job in step.jobs:
            sampled = (self._ones,) if getattr(job.command, "sample", None) is not None else ()
            results = () if job.kind == "pages" else ForwardResults(sampled=sampled)
            self._planners[job.kind].on_results(job, results, outputs)
        self.scheduler.pages.collect(step.number)
        return outputs

    def _seconds(self, jobs: list[Planned]) -> float:
        """Returns the time of a step: the sum of its programs, with the host's time once."""
        seconds, programs = 0.0, 0
        for job in jobs:
            if isinstance(job.command, DecodeCommand):
                program_s = self._decode_seconds(job.command, job.context.rows)
                self._decode_steps, self._decode_s = self._decode_steps + 1, self._decode_s + program_s
            elif isinstance(job.command, PrefillCommand):
                program_s = self._prefill_seconds(job.command)
            elif isinstance(job.command, PagesCommand):
                program_s = copy_seconds(job.command, self.times) + self.times.host
            else:
                continue
            seconds, programs = seconds + program_s, programs + 1
        return max(seconds - (programs - 1) * self.times.host, self.times.host)

    def _decode_seconds(self, command: DecodeCommand, rows: BatchRows) -> float:
        """Returns the time of a batch on its slowest rank, the one with the most cached tokens."""
        bucket = command.rows.shape[1]
        keys = self.scheduler.slots.planned[rows.slots] - command.width  # the sampled token has no entry yet
        ends = rows.rank.searchsorted(np.arange(self.cfg.num_ranks), "right")  # rows are in the order of the ranks
        cached = np.diff(keys.cumsum()[ends - 1] * (ends > 0), prepend=0)
        return self.times.seconds("decode", bucket, float(cached.max()) / bucket)

    def _prefill_seconds(self, command: PrefillCommand) -> float:
        """Returns the time of a batch on its slowest rank, the one with the most pairs of token and key."""
        rank, count, start = (command.header[:, i].astype(np.int64) for i in (0, 3, 4))
        pairs = np.bincount(rank, count * (2 * start + count) / 2).max()
        return self.times.seconds("prefill", command.bucket, float(pairs) / command.bucket)
