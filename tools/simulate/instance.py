"""One engine without devices: the real scheduler and planners, in virtual time.

As in `dsv3.engine.engine`, a step is planned while the one before it runs, and its results come when it has ended.
What is the model's: a step takes what the table of its deployment says, and every sampled token is 1.
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
from dsv3.scheduler.sequence import sequence_of
from tools.simulate.pages import Handed, Pages, copy_seconds
from tools.simulate.prompts import VOCAB, SimulatedRequest, request_of
from tools.simulate.times import InstanceTimes, VirtualClock

_AHEAD = 2  # steps launched: one runs, one is next


@dataclasses.dataclass(frozen=True)
class Totals:
    """What an instance has done since its start, or several together. `decode_s` are the decode programs' seconds."""

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
    """Serves what is submitted; `hear` is told what each step has given, after the next one has been planned."""

    def __init__(
        self,
        times: InstanceTimes,
        cfg: EngineConfig,
        clock: VirtualClock,
        hear: "Callable[[SimulatedInstance, StepOutputs], None]",
        make_pages: Callable[[EngineView, Callable[[], None]], Pages | Handed | None] = lambda view, wake: None,
    ) -> None:
        self.times, self.cfg, self._clock, self._hear = times, cfg, clock, hear
        self.scheduler = Scheduler(cfg, VOCAB, times.keys)
        view = EngineView(self.scheduler, None)  # type: ignore[arg-type]  # these planners do not look at the parts
        made = {
            "decode": decode.KIND,
            "pages": make_pages(view, self.wake),
            "prefill": prefill.KIND,
        }
        self._planners: dict[str, Any] = {
            name: kind.planner(view) if isinstance(kind, JobKind) else kind
            for name, kind in made.items()
            if kind is not None and (name != "decode" or cfg.role != "prefill")
        }
        self._flying: deque[_StepInFlight] = deque()
        self._ones = np.ones((cfg.num_ranks, max(cfg.decode_buckets), 1), np.int32)
        self._steps = self._decode_steps = 0
        self._busy_s = self._decode_s = 0.0

    def submit(self, asked: SimulatedRequest, keys: Sequence[Key]) -> None:
        """Queues a request with its prefix keys; an engine at work takes it in when its step has ended."""
        self.scheduler.add(sequence_of(request_of(asked), keys))
        self.wake()

    def wake(self) -> None:
        """Begins to work where nothing is under way."""
        if not self._flying:
            self._launch()
            self._await()

    @property
    def totals(self) -> Totals:
        """What it has done so far."""
        found, ours = self.scheduler.admission, (self._steps, self._busy_s, self._decode_steps, self._decode_s)
        return Totals(*ours, self.scheduler.num_preemptions, found.prefix_queries, found.prefix_hits)

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self.scheduler.sequences

    @property
    def waiting_tokens(self) -> float:
        """Prompt tokens to compute, with attention: what is admitted, and what waits without looking for hits."""
        return float(self.scheduler.balancer.backlog.sum()) + self._queued_tokens

    @property
    def use(self) -> tuple[float, float]:
        """The shares in use of the pages, those included that who waits needs, and of the slots."""
        scheduler, cfg = self.scheduler, self.cfg
        pages = (scheduler.pages.in_use + self._queued_tokens / cfg.page_size) / (cfg.num_pages * cfg.num_ranks)
        return pages, len(scheduler.sequences) / (cfg.max_num_seqs * cfg.num_ranks)

    @property
    def _queued_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.scheduler.queue)

    def _await(self) -> None:
        if self._flying:
            self._clock.at(self._flying[0].end, self._ended)

    def _launch(self) -> None:
        """Plans steps until one runs and one is next."""
        while len(self._flying) < _AHEAD:
            jobs = self._plan() or self._plan()  # an engine that has launched nothing looks again at once
            if not jobs:
                return
            number = self.scheduler.pages.begin_step()
            start = self._flying[-1].end if self._flying else self._clock.now
            seconds = self._seconds(jobs)
            self._flying.append(_StepInFlight(number, jobs, start + seconds, seconds))

    def _plan(self) -> list[Planned]:
        self.scheduler.begin_step()
        jobs: list[Planned] = []
        for planner in self._planners.values():
            jobs += planner.plan(jobs)
        return jobs

    def _ended(self) -> None:
        """Takes in the results of the step that has just ended, and plans the one after the next."""
        outputs = self._collect()
        self._launch()
        self._await()
        self._hear(self, outputs)

    def _collect(self) -> StepOutputs:
        """Takes in the results of the step that ends next, and returns them."""
        step, outputs = self._flying.popleft(), StepOutputs([], [])
        self._steps, self._busy_s = self._steps + 1, self._busy_s + step.seconds
        for job in step.jobs:
            sampled = (self._ones,) if getattr(job.command, "sample", None) is not None else ()
            results = () if job.kind == "pages" else ForwardResults(sampled=sampled)
            self._planners[job.kind].collect(job, results, outputs)
        self.scheduler.pages.collect(step.number)
        return outputs

    def _seconds(self, jobs: list[Planned]) -> float:
        """Returns how long the devices take: the sum of the programs, the host once."""
        seconds, programs = 0.0, 0
        for job in jobs:
            if isinstance(job.command, DecodeCommand):
                mine = self._decode_seconds(job.command, job.context.rows)
                self._decode_steps, self._decode_s = self._decode_steps + 1, self._decode_s + mine
            elif isinstance(job.command, PrefillCommand):
                mine = self._prefill_seconds(job.command)
            elif isinstance(job.command, PagesCommand):
                mine = copy_seconds(job.command, self.times) + self.times.host
            else:
                continue
            seconds, programs = seconds + mine, programs + 1
        return max(seconds - (programs - 1) * self.times.host, self.times.host)

    def _decode_seconds(self, command: DecodeCommand, rows: BatchRows) -> float:
        """Returns the time of a batch, in which the rank with the most tokens is the last."""
        bucket = command.rows.shape[1]
        keys = self.scheduler.slots.planned[rows.slots] - command.width  # the token to come has none yet
        ends = rows.rank.searchsorted(np.arange(self.cfg.num_ranks), "right")  # rows are in the order of the ranks
        held = np.diff(keys.cumsum()[ends - 1] * (ends > 0), prepend=0)
        return self.times.seconds("decode", bucket, float(held.max()) / bucket)

    def _prefill_seconds(self, command: PrefillCommand) -> float:
        """Returns the time of a batch, in which the rank with the most pairs of token and key is the last."""
        rank, count, start = (command.header[:, i].astype(np.int64) for i in (0, 3, 4))
        pairs = np.bincount(rank, count * (2 * start + count) / 2).max()
        return self.times.seconds("prefill", command.bucket, float(pairs) / command.bucket)
