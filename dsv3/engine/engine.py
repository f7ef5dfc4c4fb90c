"""The engine: requests in, tokens out, one step at a time.

`Engine.step` is the step loop's body. It launches step n + 1 before it reads the tokens of step n, so the devices
always have work queued while the host reads results, checks stops, streams and schedules. Where a job of step n + 1
needs those tokens, that job and the jobs behind it are launched after they have been read. One thread calls `step`;
`add` and `abort` may come from any thread.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Series
from concurrent.futures import Future
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.control import Control
from dsv3.engine.device.programs import Progress, Store
from dsv3.engine.errors import ClusterError, public_text
from dsv3.engine.executor import LocalExecutor
from dsv3.engine.job import EngineView, JobKind, Planned, StepCommand, WorkEvents
from dsv3.engine.jobs import JOB_KINDS
from dsv3.engine.jobs.experts import ExpertBalancer
from dsv3.engine.operations import OperatedState, Operation
from dsv3.engine.step_log import EngineSnapshot, JobRecord, StepLog
from dsv3.engine.step_metrics import StepMetricsRecorder, StepPublisher
from dsv3.engine.stored import COMPILE_EVENT, EventCounter
from dsv3.kv_cache.events import EventStats
from dsv3.model.layers.router import ids_per_token
from dsv3.scheduler.cost import keys_per_token
from dsv3.scheduler.listing import RequestList, list_requests
from dsv3.scheduler.request import (
    HOST_TIME_BOUNDS,
    STEP_TOKENS_BOUNDS,
    EngineDead,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
    Histogram,
    InvalidRequest,
    NotServing,
    PreparedRequest,
    QueueFull,
    RequestRules,
    StepOutputs,
    prepare,
)
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import Sequence, make_sequence
from dsv3.scheduler.structured_output import Grammars, Masks
from dsv3.text.matcher import GrammarError, GrammarVocabulary, VocabularyError
from pallas_kernels.backend import fallbacks

if TYPE_CHECKING:
    from dsv3.kv_cache.event_publisher import Publisher

_log = logging.getLogger(__name__)


# Jobs of a step in flight, their command, and what the executor needs to fetch their results. Jobs launched later than
# the others of their step have a command, and a number, of their own.
_LaunchedJobs = tuple[list[Planned], StepCommand, Any]


class Engine:
    """Serves one model.

    Args:
      components: the model, its limits and its devices; the engine owns them from then on.
      executor: launches the steps; the devices of this process if not given.
      kinds: the kinds of work a step may hold.
      store: programs of earlier starts.
      work_events: events from followers, where this process leads an instance of several.
    """

    def __init__(
        self,
        components: EngineComponents,
        executor: LocalExecutor | None = None,
        kinds: Series[JobKind] = JOB_KINDS,
        store: Store | None = None,
        work_events: WorkEvents | None = None,
    ) -> None:
        self.cfg, self.model_cfg, self.description = components.cfg, components.model_cfg, components.description
        self.kernel_fallbacks = {operation: backend.value for operation, backend in fallbacks().items()}
        self.failure: BaseException | None = None
        self.executor, self.store = executor or LocalExecutor(components, kinds), store
        self.scheduler = Scheduler(self.cfg, self.model_cfg.vocab_size, keys_per_token(self.model_cfg))
        self.events = _kv_event_publisher(self.cfg)
        if self.events is not None:
            self.scheduler.publish_events_to(self.events.queue)
        self.grammars = _grammars(components)
        self.masks = None if self.grammars is None else Masks(self.scheduler, self.grammars.vocabulary)
        view = EngineView(self.scheduler, components, work_events, self.masks)
        self.planners = {kind.name: kind.planner(view) for kind in kinds if kind.applies(components)}
        self._commands: deque[Sequence | int | None] = deque()  # a new request, the id of one to abort, or: flush
        self._submitted_ids: set[int] = set()  # requests among the commands, which the scheduler does not know yet
        self._kept_back: deque[Sequence] = deque()  # submitted while an operation lets earlier requests finish
        self.control = Control(self)
        self._in_flight: list[_LaunchedJobs] = []
        self._step_metrics = _step_metrics_recorder(self.cfg, self.scheduler)
        self._compilations = EventCounter(COMPILE_EVENT)
        self._warm = False
        self._seeds = np.random.SeedSequence(self.cfg.seed)
        self._seed_counter = itertools.count()
        self.host_time, self._step_tokens = Histogram(HOST_TIME_BOUNDS), Histogram(STEP_TOKENS_BOUNDS)
        self.log = StepLog()
        self._steps = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        if self.control.has_waiting or self._commands or self._in_flight:
            return True
        return not self.control.is_stopped and (bool(self.grammars) or self.scheduler.has_work)

    @property
    def has_requests(self) -> bool:
        """Whether there is a request that operations may wait for: any but those kept back while they do."""
        return bool(self.grammars or self._in_flight or self.scheduler.sequences)

    @property
    def state(self) -> OperatedState:
        """What operations have led to."""
        return self.control.state

    @property
    def room(self) -> int:
        """How many more requests `submit` accepts now."""
        return self.cfg.max_num_queued_reqs + self.scheduler.slots.num_free - self._num_waiting

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles every program that is not in the store, and launches each on padding where that saves time later.

        From then on every compilation is counted and logged. Raises RuntimeError for a program that fails.
        """
        self.executor.compile_all(progress, self.store)
        self.executor.launch_all()
        self._warm = True

    @property
    def rules(self) -> RequestRules:
        """What requests must satisfy; clients validate and prepare requests by these rules."""
        cfg = self.cfg
        return RequestRules(
            vocab_size=self.model_cfg.vocab_size,
            max_model_len=cfg.max_model_len,
            eos_token_ids=self.model_cfg.eos_token_ids,
            enable_prefix_caching=cfg.enable_prefix_caching,
            fingerprint=cfg.fingerprint,
            page_size=cfg.page_size,
            weights=self.state.weights,
            prefills_only=cfg.role == "prefill",
            num_ranks=cfg.num_ranks,
            routed_experts=ids_per_token(self.model_cfg) if cfg.enable_return_routed_experts else None,
            returns_sampling_masks=cfg.enable_return_sampling_mask,
            takes_grammars=self.grammars is not None and not (cfg.speculative and cfg.speculative.synthetic_chances),
        )

    @property
    def _num_waiting(self) -> int:
        compiling = 0 if self.grammars is None else len(self.grammars)
        return len(self._commands) + len(self._kept_back) + compiling + len(self.scheduler.queue)

    def add(self, request: EngineRequest) -> None:
        """Prepares a request on the caller's thread and queues it; raises InvalidRequest, and what `submit` raises."""
        self.submit(prepare(request, self.rules))

    def check_grammar(self, grammar: str) -> None:
        """Compiles a grammar and waits for the result; raises InvalidRequest for one that does not compile."""
        if not grammar or self.grammars is None:
            return
        try:
            self.grammars.check(grammar)
        except GrammarError as error:
            raise InvalidRequest(f"structured_outputs: {error}") from None

    def submit(self, request: PreparedRequest) -> None:
        """Queues a request; its outputs come from `step`, the last one with a finish_reason.

        Raises:
          InvalidRequest: its id is in use.
          QueueFull: too many requests are waiting. Half of the queue is reserved for priorities of 0 or lower.
          EngineDead: the engine has failed; build a new one.
          NotServing: it sleeps, or its weights are not complete.
        """
        if self.failure is not None:
            raise EngineDead("the engine has stopped after an error") from self.failure
        if why := self.state.why_not_serving:
            raise NotServing(why)
        if (n := request.sampling.n) != 1:
            raise InvalidRequest(f"n: {n} must be 1 in the engine; submit {n} requests (see fan_out)")
        queued = self.cfg.max_num_queued_reqs
        if self.room <= (queued // 2 if request.priority > 0 else 0):
            raise QueueFull(f"{queued} requests are waiting already, or {queued // 2} where the priority is above 0")
        compiling = self.grammars or ()
        if any(request.request_id in known for known in (self._submitted_ids, compiling, self.scheduler.sequences)):
            raise InvalidRequest(f"request_id {request.request_id} is in use")
        sequence = make_sequence(request)
        if request.sampling.seed is None:
            sequence.seed = self._next_seed()
        self._submitted_ids.add(request.request_id)
        self._commands.append(sequence)

    def abort(self, request_id: int) -> None:
        """Ends a request in any state; its last output has finish_reason "abort". Unknown ids are ignored."""
        self._commands.append(request_id)

    def flush(self) -> None:
        """Empties the prefix cache before the next step, on the devices and in the host's memory."""
        self._commands.append(None)

    def operate(self, operation: Operation, on_progress: Callable[[], None] = lambda: None) -> Future[None]:
        """Queues an operation (`dsv3.engine.operations`), which the next steps execute; see `Control.submit`."""
        if self.failure is not None:
            raise EngineDead("the engine has stopped after an error") from self.failure
        return self.control.submit(operation, on_progress)

    def step(self) -> StepOutputs:
        """Launches one step; returns the outputs of the previous one, and of requests that ended without one.

        Operations are executed first. An exception ends every request with finish_reason "error" and sets `failure`.
        """
        try:
            if self.failure is not None:
                return self._end_all(self.failure)
            if self.control.has_waiting or self.control.is_stopped:
                outputs = self._operate()
                if outputs or self.control.is_stopped:
                    return outputs
            if not self._warm:
                return self._step()
            with self._compilations:
                return self._step()
        except Exception as error:
            _log.error("the engine has failed; every request ends", exc_info=not isinstance(error, ClusterError))
            self.failure = error
            return self._end_all(error)

    def stats(self) -> EngineStats:
        """Returns a snapshot of the engine's counters; any thread may call it."""
        scheduler, pages = self.scheduler, self.scheduler.pages
        by_job = {name: planner.stats() for name, planner in self.planners.items()}
        if self.events is not None:
            by_job["kv_events"] = EventStats(self.events.queue.dropped)
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
        """Returns recent steps and expert load for the dashboard; the thread that steps calls it between steps."""
        seen = (planner.snapshot() for planner in self.planners.values() if isinstance(planner, ExpertBalancer))
        return EngineSnapshot(self.log.snapshot(), next(seen, None))

    def requests(self) -> RequestList:
        """Returns what runs and waits; the thread that steps calls it between steps."""
        compiling = [] if self.grammars is None else self.grammars.waiting
        return list_requests(self.scheduler, compiling, self._kept_back, is_paused=self.control.is_stopped)

    def _step(self) -> StepOutputs:
        started, log = perf_counter(), self.log
        log.begin(started)
        outputs = StepOutputs([], self._ingest() if self._commands else [])
        if self.grammars:
            self._enqueue_compiled(self.grammars, outputs)
        log.done("take requests")
        jobs = self._plan()
        before, self._in_flight = self._in_flight, []
        at_once, deferred = _split(jobs)
        if at_once:
            self._launch(at_once)
        waited = self._collect(before, outputs) if before else 0.0
        if deferred:
            self._launch(_resolve_deferred(deferred, outputs))
        if not jobs and not before:
            self.scheduler.pages.collect(self.scheduler.pages.launched)  # an interrupt may have lost the last results
            if self.grammars:
                self.grammars.wait()
        if self.events is not None:
            self.events.queue.end_batch()
        self.host_time.observe(perf_counter() - started - waited)
        if tokens := int(self.scheduler.prompt_tokens + self.scheduler.generated_tokens - self._step_tokens.total):
            self._step_tokens.observe(tokens)
        if log.is_on:
            self._record_step(before)
        return outputs

    def _operate(self) -> StepOutputs:
        """Executes operations between two steps; a stopped engine still takes requests, and ends those aborted."""
        outputs = StepOutputs([], self._ingest())
        self.control.advance(outputs)
        if not self.control.is_draining:
            while self._kept_back:
                self._take(self._kept_back.popleft())
        if self.control.is_stopped:
            self.collect_in_flight(outputs)
        return outputs

    def collect_in_flight(self, outputs: StepOutputs) -> None:
        """Waits for the steps in flight, and processes their results."""
        before, self._in_flight = self._in_flight, []
        if before:
            self._collect(before, outputs)

    def _record_step(self, collected: list[_LaunchedJobs]) -> None:
        """Completes the log's record of a step that read the results of `collected`."""
        launched = [job for jobs, *_ in self._in_flight for job in jobs if not job.is_deferred]
        records = [JobRecord(job.kind, job.command.amount) for job in launched]
        running, waiting = self.scheduler.slots.total_running, len(self.scheduler.queue)
        self.log.end(_number(self._in_flight), _number(collected), records, running, waiting)

    def _plan(self) -> list[Planned]:
        """Returns the jobs of the next step; planners are called in the order of registration."""
        self.scheduler.admission.preempt_for_waiting()
        jobs: list[Planned] = []
        for name, planner in self.planners.items():
            jobs += planner.plan(jobs)
            if self.log.is_on:
                self.log.done(f"plan {name}")
        return jobs

    def _launch(self, jobs: list[Planned]) -> None:
        """Launches jobs of the step, behind those already launched."""
        number = self.scheduler.pages.begin_step()
        command = StepCommand(number, tuple((planned.kind, planned.command) for planned in jobs))
        is_more = bool(self._in_flight)
        self._in_flight.append((jobs, command, self.executor.launch(command)))
        if self._step_metrics is not None:
            self._step_metrics.launched(jobs, is_more=is_more)
        self.log.done("launch")

    def _collect(self, launches: list[_LaunchedJobs], outputs: StepOutputs) -> float:
        """Processes the results of a step; returns the seconds spent waiting for them."""
        waited = 0.0
        for number, (jobs, command, launched) in enumerate(launches):
            waiting = perf_counter()
            try:
                results = self.executor.fetch(command, launched)
            except BaseException:  # after an interrupt the next step waits for them
                self._in_flight = launches[number:] + self._in_flight
                raise
            waited += perf_counter() - waiting
            self.log.done("wait")
            for planned, arrays in zip(jobs, results, strict=True):
                self.planners[planned.kind].on_results(planned, arrays, outputs)
                if self.log.is_on:
                    self.log.done(f"collect {planned.kind}")
        self.scheduler.pages.collect(_number(launches))
        if self._step_metrics is not None:
            self._step_metrics.collected()
        self._steps += 1
        return waited

    def _enqueue_compiled(self, grammars: Grammars, outputs: StepOutputs) -> None:
        """Queues requests whose grammars have compiled, and ends those whose grammars failed."""
        ready, failed = grammars.pop_compiled()
        for sequence in ready:
            self.scheduler.add(sequence)
        for sequence, error in failed:
            outputs.details.append(
                EngineOutput(request_id=sequence.id, token_ids=[], finish_reason="error", error=error)
            )

    def _ingest(self) -> list[EngineOutput]:
        """Applies the commands that other threads have queued: new requests, aborts, flushes."""
        outputs = []
        for _ in range(len(self._commands)):
            command = self._commands.popleft()
            if isinstance(command, Sequence):
                if self.control.is_draining:
                    self._kept_back.append(command)
                else:
                    self._take(command)
            elif command is None:
                self.scheduler.flush()
            elif (kept := next((s for s in self._kept_back if s.id == command), None)) is not None:
                self._kept_back.remove(kept)
                self._submitted_ids.discard(command)
                outputs.append(EngineOutput(request_id=command, token_ids=[], finish_reason="abort"))
            elif self.grammars is not None and self.grammars.cancel(command):
                outputs.append(EngineOutput(request_id=command, token_ids=[], finish_reason="abort"))
            elif (sequence := self.scheduler.sequences.get(command)) is not None:
                self.scheduler.finish(sequence)
                outputs.append(EngineOutput(request_id=command, token_ids=[], finish_reason="abort"))
        return outputs

    def _take(self, sequence: Sequence) -> None:
        """Queues a request; one with a grammar waits until that is compiled."""
        self._submitted_ids.discard(sequence.id)
        if sequence.request.grammar and self.grammars is not None:
            self.grammars.submit(sequence)
        else:
            self.scheduler.add(sequence)

    def _end_all(self, error: BaseException) -> StepOutputs:
        """Ends every request after a failure: the state on the devices is undefined."""
        self._in_flight = []
        self.control.fail(error)
        ended = self.end_requests("error", f"the engine has failed: {public_text(error)}")
        self.scheduler.pages.collect(self.scheduler.pages.launched)  # no results of launched steps will come
        return StepOutputs([], ended)

    def end_requests(self, reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        """Ends every request, in any state; returns their last outputs, of an abort with the experts not sent yet."""
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Sequence):
                self.scheduler.add(command)
        while self._kept_back:
            self.scheduler.add(self._kept_back.popleft())
        for sequence in [] if self.grammars is None else self.grammars.cancel_all():
            self.scheduler.add(sequence)
        ended = list(self.scheduler.sequences.values())
        for sequence in ended:
            self.scheduler.finish(sequence)
        self._submitted_ids.clear()
        left = (s.routed.take() if s.routed is not None and reason == "abort" else None for s in ended)
        return [
            EngineOutput(request_id=s.id, token_ids=[], finish_reason=reason, error=error, routed_experts=experts)
            for s, experts in zip(ended, left, strict=True)
        ]

    def _next_seed(self) -> int:
        """Returns a 64-bit seed for a request without one: a new one each time, the same series for each start."""
        state = np.random.SeedSequence(entropy=self._seeds.entropy, spawn_key=(next(self._seed_counter),))
        return int(state.generate_state(1, np.uint64).view(np.int64)[0])


def _number(launches: list[_LaunchedJobs]) -> int:
    """Returns the number of a step, which is that of its last launch; 0 where nothing was launched."""
    return launches[-1][1].number if launches else 0


def _split(jobs: list[Planned]) -> tuple[list[Planned], list[Planned]]:
    """Returns the jobs up to the first one with a deferred command, and the jobs to launch later: from that one on."""
    at = next((i for i, planned in enumerate(jobs) if planned.deferred is not None), len(jobs))
    return jobs[: at + 1], jobs[at:]


def _resolve_deferred(jobs: list[Planned], outputs: StepOutputs) -> list[Planned]:
    """Returns what is launched later: the deferred command of the first of `jobs`, then the others with theirs."""
    first, *others = jobs
    return [*first.resolve(outputs), *(each for job in others for each in (job, *job.resolve(outputs)))]


def _grammars(components: EngineComponents) -> Grammars | None:
    """Returns the grammar compiler; None without a tokenizer that it can use."""
    if components.tokenizer is None:
        return None
    try:
        vocabulary = GrammarVocabulary.from_file(
            components.tokenizer, components.model_cfg.vocab_size, components.model_cfg.eos_token_ids
        )
    except (VocabularyError, OSError) as error:
        _log.warning("structured outputs are off: no grammar can be compiled for this tokenizer: %s", error)
        return None
    return Grammars(vocabulary)


def _kv_event_publisher(cfg: EngineConfig) -> "Publisher | None":
    if cfg.kv_events is None or not cfg.kv_events.is_on:
        return None
    from dsv3.kv_cache.event_publisher import Publisher

    return Publisher(cfg.kv_events, cfg.num_ranks, cfg.page_size)


def _step_metrics_recorder(cfg: EngineConfig, scheduler: Scheduler) -> StepMetricsRecorder | None:
    if (config := cfg.step_metrics) is None:
        return None
    return StepMetricsRecorder(scheduler, StepPublisher(config, cfg.num_ranks), config.worker_id)
