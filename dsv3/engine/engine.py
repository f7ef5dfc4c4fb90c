"""The engine: requests in, tokens out, one step at a time.

`step` launches step n + 1 before it looks at the tokens of step n, so the device always has work queued while the host
reads, stops, streams and plans. Where a job of step n + 1 needs these tokens, it and those behind it are launched after
the look. One thread calls `step`; `add` and `abort` may come from any thread.
"""

import itertools
import logging
from collections import deque
from collections.abc import Sequence as Series
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.programs import Progress, Store
from dsv3.engine.errors import ClusterError, public_text
from dsv3.engine.executor import Executor, LocalExecutor
from dsv3.engine.job import EngineView, JobKind, Planned, StepCommand, WorkEvents
from dsv3.engine.jobs.experts import ExpertBalancer
from dsv3.engine.jobs.registry import JOB_KINDS
from dsv3.engine.step_log import EngineSnapshot, JobNote, StepLog
from dsv3.engine.step_metrics import StepNotes, StepPublisher
from dsv3.engine.stored import CompilationCounter
from dsv3.kv_cache.events import EventStats
from dsv3.scheduler.cost import keys_per_token
from dsv3.scheduler.request import (
    STEP_TOKENS_BOUNDS,
    EngineDead,
    EngineOutput,
    EngineRequest,
    EngineStats,
    Histogram,
    HostTime,
    InvalidRequest,
    PreparedRequest,
    QueueFull,
    RequestRules,
    StepOutputs,
    prepare,
)
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import Sequence, sequence_of
from dsv3.scheduler.structured_output import Grammars, Masks
from dsv3.text.matcher import GrammarError, GrammarVocabulary, VocabularyError
from pallas_kernels.backend import fallbacks

if TYPE_CHECKING:
    from dsv3.kv_cache.event_publisher import Publisher

_log = logging.getLogger(__name__)


# A part of a step under way: its jobs, their command, and what the executor wants back to fetch their results. Jobs
# that are launched later than the others are a part of their own, whose command has a number of its own.
_Part = tuple[list[Planned], StepCommand, Any]


class Engine:
    """Serves one model.

    Args:
      parts: the model, its limits and its devices; the engine's from then on.
      executor: launches the steps; the devices of this process if not given.
      kinds: the kinds of work a step may hold.
      store: programs of earlier starts.
      news: what the followers tell, where this process leads an instance of several.
    """

    def __init__(
        self,
        parts: EngineComponents,
        executor: Executor | None = None,
        kinds: Series[JobKind] = JOB_KINDS,
        store: Store | None = None,
        work_events: WorkEvents | None = None,
    ) -> None:
        self.cfg, self.model_cfg, self.description = parts.cfg, parts.model_cfg, parts.description
        self.kernel_fallbacks = {operation: backend.value for operation, backend in fallbacks().items()}
        self.failure: BaseException | None = None
        self.executor, self.store = executor or LocalExecutor(parts, kinds), store
        self.scheduler = Scheduler(self.cfg, self.model_cfg.vocab_size, keys_per_token(self.model_cfg))
        self.events = _publisher(self.cfg)
        if self.events is not None:
            self.scheduler.tell_events_to(self.events.record)
        self.grammars = _grammars(parts)
        self.masks = None if self.grammars is None else Masks(self.scheduler, self.grammars.vocabulary)
        view = EngineView(self.scheduler, parts, work_events, self.masks)
        self.planners = {kind.name: kind.planner(view) for kind in kinds if kind.applies(parts)}
        self._commands: deque[Sequence | int | None] = deque()  # a new request, the id of one to abort, or: flush
        self._handed_in: set[int] = set()  # ids among the commands; the scheduler knows the others
        self._in_flight: list[_Part] = []
        self._notes = _step_notes(self.cfg, self.scheduler)
        self._compilations = CompilationCounter()
        self._warm = False
        self._seeds = np.random.SeedSequence(self.cfg.seed)
        self._seed_counter = itertools.count()
        self.host_time, self._step_tokens = HostTime(), Histogram(STEP_TOKENS_BOUNDS)
        self.log = StepLog()
        self._steps = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        compiles = bool(self.grammars)
        return bool(self._commands) or compiles or bool(self._in_flight) or self.scheduler.has_work

    @property
    def room(self) -> int:
        """How many requests `submit` would take now."""
        return self.cfg.max_num_queued_reqs + self.scheduler.slots.num_free - self._num_waiting

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles every program that no earlier start has kept, and launches each on padding where that pays.

        From then on a compilation is counted and logged. Raises RuntimeError for a program that does not run.
        """
        self.executor.compile_all(progress, self.store)
        self.executor.launch_all()
        self._warm = True

    @property
    def rules(self) -> RequestRules:
        """What this engine takes; whoever sends it requests prepares them by these."""
        cfg = self.cfg
        return RequestRules(
            vocab_size=self.model_cfg.vocab_size,
            max_model_len=cfg.max_model_len,
            eos_token_ids=self.model_cfg.eos_token_ids,
            enable_prefix_caching=cfg.enable_prefix_caching,
            fingerprint=cfg.fingerprint,
            page_size=cfg.page_size,
            prefills_only=cfg.role == "prefill",
            num_ranks=cfg.num_ranks,
            takes_grammars=self.grammars is not None and not (cfg.speculative and cfg.speculative.synthetic_chances),
        )

    def _holds(self, request_id: int) -> bool:
        compiling = self.grammars is not None and request_id in self.grammars
        return compiling or request_id in self.scheduler.sequences

    @property
    def _num_waiting(self) -> int:
        compiling = 0 if self.grammars is None else len(self.grammars)
        return len(self._commands) + compiling + len(self.scheduler.queue)

    def add(self, request: EngineRequest) -> None:
        """Prepares a request on the caller's thread and queues it; raises InvalidRequest, and what `submit` raises."""
        self.submit(prepare(request, self.rules))

    def check_grammar(self, grammar: str) -> None:
        """Compiles what an answer is to be held to, and waits for that; raises InvalidRequest where it cannot be."""
        if not grammar or self.grammars is None:
            return
        try:
            self.grammars.check(grammar)
        except GrammarError as error:
            raise InvalidRequest(f"structured_outputs: {error}") from None

    def submit(self, request: PreparedRequest) -> None:
        """Queues a request; its outputs come from `step`, the last with a finish_reason.

        Raises:
          InvalidRequest: its id is in use.
          QueueFull: too many requests wait already. Half of the queue is for those with a priority of 0 or lower.
          EngineDead: the engine has failed; a new one must be built.
        """
        if self.failure is not None:
            raise EngineDead("the engine has stopped after an error") from self.failure
        if (n := request.sampling.n) != 1:
            raise InvalidRequest(f"n: {n} must be 1 in the engine; hand in {n} requests (see fan_out)")
        queued = self.cfg.max_num_queued_reqs
        if self.room <= (queued // 2 if request.priority > 0 else 0):
            raise QueueFull(f"{queued} requests are waiting already, or {queued // 2} where the priority is above 0")
        if request.request_id in self._handed_in or self._holds(request.request_id):
            raise InvalidRequest(f"request_id {request.request_id} is in use")
        sequence = sequence_of(request)
        if request.sampling.seed is None:
            sequence.seed = self._next_seed()
        self._handed_in.add(request.request_id)
        self._commands.append(sequence)

    def abort(self, request_id: int) -> None:
        """Ends a request wherever it is; its last output has finish_reason "abort". Unknown ids are ignored."""
        self._commands.append(request_id)

    def flush(self) -> None:
        """Empties the prefix cache before the next step, on the devices and in the host's memory."""
        self._commands.append(None)

    def step(self) -> StepOutputs:
        """Launches one step and returns the outputs of the one before it, and of requests that ended otherwise.

        An exception on the way ends every request with finish_reason "error" and the engine with `failure` set.
        """
        try:
            if self.failure is not None:
                return self._end_all(self.failure)
            if not self._warm:
                return self._step()
            with self._compilations.watch():
                return self._step()
        except Exception as error:
            _log.error("the engine has failed; every request ends", exc_info=not isinstance(error, ClusterError))
            self.failure = error
            return self._end_all(error)

    def stats(self) -> EngineStats:
        """Returns a snapshot of the engine's counters; any thread may ask."""
        scheduler, pages = self.scheduler, self.scheduler.pages
        by_job = {name: planner.stats() for name, planner in self.planners.items()}
        if self.events is not None:
            by_job["kv_events"] = EventStats(self.events.record.dropped)
        if self.grammars is not None:
            by_job["grammars"] = self.grammars.stats()
        if self.masks is not None:
            by_job["mask"] = self.masks.stats()
        return EngineStats(
            running=scheduler.slots.total_running,
            waiting=self._num_waiting,
            pages_in_use=pages.in_use,
            cache_usage=pages.in_use / (self.cfg.num_pages * self.cfg.num_ranks),
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.admission.prefix_queries,
            prefix_hits=scheduler.admission.prefix_hits,
            recompilations=self._compilations.count,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=scheduler.generated_tokens,
            steps=self._steps,
            host_time_sum=self.host_time.total,
            host_time_counts=tuple(self.host_time.counts),
            step_tokens_counts=tuple(self._step_tokens.counts),
            jobs={name: record for name, record in by_job.items() if record is not None},
        )

    def snapshot(self) -> EngineSnapshot:
        """Returns what somebody sees who looks; the thread that steps asks, between two steps."""
        seen = (planner.snapshot() for planner in self.planners.values() if isinstance(planner, ExpertBalancer))
        return EngineSnapshot(self.log.snapshot(), next(seen, None))

    def _step(self) -> StepOutputs:
        started, log = perf_counter(), self.log
        log.begin(started)
        outputs = StepOutputs([], self._ingest() if self._commands else [])
        if self.grammars:
            self._take_compiled(self.grammars, outputs)
        log.done("take requests")
        jobs = self._plan()
        before, self._in_flight = self._in_flight, []
        at_once, later = _split(jobs)
        if at_once:
            self._launch(at_once)
        waited = self._collect(before, outputs) if before else 0.0
        if later:
            self._launch(_made(later, outputs))
        if self.grammars and not jobs and not before:
            self.grammars.wait()
        if self.events is not None:
            self.events.record.close()
        self.host_time.observe(perf_counter() - started - waited)
        if tokens := int(self.scheduler.prompt_tokens + self.scheduler.generated_tokens - self._step_tokens.total):
            self._step_tokens.observe(tokens)
        if log.is_on:
            self._note(before)
        return outputs

    def _note(self, collected: list[_Part]) -> None:
        """Ends the notes about a step that took the results of `collected`."""
        scheduler = self.scheduler
        self.log.end(
            _number(self._in_flight),
            _number(collected),
            [JobNote(job.kind, job.command.amount) for jobs, *_ in self._in_flight for job in jobs if not job.is_rest],
            scheduler.slots.total_running,
            len(scheduler.queue),
        )

    def _plan(self) -> list[Planned]:
        """Asks each kind, in the order of registration, what it adds to the step."""
        self.scheduler.begin_step()
        jobs: list[Planned] = []
        for name, planner in self.planners.items():
            jobs += planner.plan(jobs)
            if self.log.is_on:
                self.log.done(f"plan {name}")
        return jobs

    def _launch(self, jobs: list[Planned]) -> None:
        """Launches jobs of the step, behind those of it that have been launched already."""
        number = self.scheduler.pages.begin_step()
        command = StepCommand(number, tuple((planned.kind, planned.command) for planned in jobs))
        is_more = bool(self._in_flight)
        self._in_flight.append((jobs, command, self.executor.launch(command)))
        if self._notes is not None:
            self._notes.launched(jobs, is_more=is_more)
        self.log.done("launch")

    def _collect(self, parts: list[_Part], outputs: StepOutputs) -> float:
        """Takes in the results of a step; returns the seconds that were waited for them."""
        waited = 0.0
        for jobs, command, launched in parts:
            waiting = perf_counter()
            results = self.executor.fetch(command, launched)
            waited += perf_counter() - waiting
            self.log.done("wait")
            for planned, arrays in zip(jobs, results, strict=True):
                self.planners[planned.kind].collect(planned, arrays, outputs)
                if self.log.is_on:
                    self.log.done(f"collect {planned.kind}")
        self.scheduler.pages.collect(_number(parts))
        if self._notes is not None:
            self._notes.collected()
        self._steps += 1
        return waited

    def _take_compiled(self, grammars: Grammars, outputs: StepOutputs) -> None:
        """Queues the requests whose grammars are compiled, and ends those whose grammars cannot be."""
        ready, failed = grammars.take()
        for sequence in ready:
            self.scheduler.add(sequence)
        for sequence, error in failed:
            outputs.details.append(
                EngineOutput(request_id=sequence.id, token_ids=[], finish_reason="error", error=error)
            )

    def _ingest(self) -> list[EngineOutput]:
        """Takes over what other threads have handed in."""
        outputs = []
        for _ in range(len(self._commands)):
            command = self._commands.popleft()
            if isinstance(command, Sequence):
                self._take_in(command)
                self._handed_in.discard(command.id)
            elif command is None:
                self.scheduler.flush()
            elif self.grammars is not None and self.grammars.drop(command):
                outputs.append(EngineOutput(request_id=command, token_ids=[], finish_reason="abort"))
            elif (sequence := self.scheduler.sequences.get(command)) is not None:
                self.scheduler.remove(sequence)
                outputs.append(EngineOutput(request_id=command, token_ids=[], finish_reason="abort"))
        return outputs

    def _take_in(self, sequence: Sequence) -> None:
        """Queues a request, once what it is held to is compiled."""
        if sequence.request.grammar and self.grammars is not None:
            self.grammars.begin(sequence)
        else:
            self.scheduler.add(sequence)

    def _end_all(self, error: BaseException) -> StepOutputs:
        """Ends every request after a failure; nothing of the device's state can be trusted any more."""
        self._in_flight = []
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Sequence):
                self.scheduler.add(command)
        for sequence in [] if self.grammars is None else self.grammars.drop_all():
            self.scheduler.add(sequence)
        ended = list(self.scheduler.sequences.values())
        for sequence in ended:
            self.scheduler.remove(sequence)
        self.scheduler.abandon()
        self._handed_in.clear()
        text = f"the engine has failed: {public_text(error)}"
        return StepOutputs(
            [], [EngineOutput(request_id=s.id, token_ids=[], finish_reason="error", error=text) for s in ended]
        )

    def _next_seed(self) -> int:
        """Returns a 64-bit seed for a request that brings none.

        Another one each time, the same series for the same engine.
        """
        state = np.random.SeedSequence(entropy=self._seeds.entropy, spawn_key=(next(self._seed_counter),))
        return int(state.generate_state(1, np.uint64).view(np.int64)[0])


def _number(parts: list[_Part]) -> int:
    """Returns the number of a step, which is that of its last part; 0 where nothing was launched."""
    return parts[-1][1].number if parts else 0


def _split(jobs: list[Planned]) -> tuple[list[Planned], list[Planned]]:
    """Returns the jobs up to the first one that has a rest, and what is launched later: from that one on."""
    at = next((i for i, planned in enumerate(jobs) if planned.later is not None), len(jobs))
    return jobs[: at + 1], jobs[at:]


def _made(jobs: list[Planned], outputs: StepOutputs) -> list[Planned]:
    """Returns what is launched later: the rest of the first of `jobs`, then the others, each before its rest."""
    first, *others = jobs
    return [*first.rest(outputs), *(each for job in others for each in (job, *job.rest(outputs)))]


def _grammars(parts: EngineComponents) -> Grammars | None:
    """Returns what compiles grammars; None without a tokenizer that they can be run over."""
    if parts.tokenizer is None:
        return None
    try:
        vocabulary = GrammarVocabulary.from_file(
            parts.tokenizer, parts.model_cfg.vocab_size, parts.model_cfg.eos_token_ids
        )
    except (VocabularyError, OSError) as error:
        _log.warning("no answer can be held to a grammar: %s", error)
        return None
    return Grammars(vocabulary)


def _publisher(cfg: EngineConfig) -> "Publisher | None":
    """Returns what tells routers which pages can be found, None where nobody has asked for it."""
    if cfg.kv_events is None or not cfg.kv_events.is_on:
        return None
    from dsv3.kv_cache.event_publisher import Publisher

    return Publisher(cfg.kv_events, cfg.num_ranks, cfg.page_size)


def _step_notes(cfg: EngineConfig, scheduler: Scheduler) -> StepNotes | None:
    """Returns what tells planners of each step, if the limits ask for it."""
    if (config := cfg.step_metrics) is None:
        return None
    return StepNotes(scheduler, StepPublisher(config, cfg.num_ranks), config.worker_id)
