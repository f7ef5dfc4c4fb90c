"""The engine: requests in, tokens out, one step at a time.

`step` launches step n + 1 before it looks at the tokens of step n, so the device always has work queued while the host
reads, stops, streams and plans. One thread calls `step`; `add` and `abort` may come from any thread.
"""

import itertools
import logging
import threading
from collections import deque
from time import perf_counter
from typing import Any

import jax
import numpy as np

from dsv3.config import ModelConfig
from dsv3.engine.balance import balancer_of
from dsv3.engine.cluster.membership import ClusterError, public_text
from dsv3.engine.compilation import CompilationCounter
from dsv3.engine.config import EngineConfig
from dsv3.engine.programs import Progress, Store
from dsv3.engine.results import collect
from dsv3.engine.runner import Launched, Link, Runner
from dsv3.engine.scheduler import Scheduler
from dsv3.engine.sequence import Sequence, sequence_of
from dsv3.engine.stats import EngineStats, HostTime
from dsv3.engine.step_bodies import StepFunctions
from dsv3.prepare import PreparedRequest, RequestRules, prepare
from dsv3.request import EngineDead, EngineOutput, EngineRequest, InvalidRequest, QueueFull, StepOutputs

_log = logging.getLogger(__name__)


class Engine:
    """Serves one model on `cfg.num_ranks` ranks of devices. `balancer` is None unless experts are spread over them.

    Args:
      functions: the model's step functions (`model_functions()`, or a stand-in with the same signatures).
      params: the model's parameters, as `functions` take them; the engine's from then on, since experts that it moves
        are written in place.
      model_cfg: the model's hyper-parameters; vocabulary, end tokens and cache layout are read from it.
      cfg: limits.
      devices: one for each rank; the first of the default backend if not given.
      link: the other processes, where the devices belong to several.
    """

    def __init__(
        self,
        functions: StepFunctions,
        params: Any,
        model_cfg: ModelConfig,
        cfg: EngineConfig,
        devices: list[jax.Device] | None = None,
        link: Link | None = None,
    ) -> None:
        self.cfg, self.model_cfg = cfg, model_cfg
        self.failure: BaseException | None = None
        self._runner = Runner(functions, params, model_cfg, cfg, devices or jax.devices()[: cfg.num_devices], link)
        self.balancer = balancer_of(functions, params, cfg)
        self._scheduler = Scheduler(cfg, model_cfg.vocab_size)
        self._commands: deque[Sequence | int] = deque()  # a new request, or the id of one to abort
        self._handed_in: set[int] = set()  # ids among the commands; the scheduler knows the others
        self._in_flight: Launched | None = None
        self._compilations = CompilationCounter()
        self._warm = False
        self._wake = threading.Event()
        self._seeds = np.random.SeedSequence(cfg.seed)
        self._seed_counter = itertools.count()
        self._host_time = HostTime()
        self._steps = self._prompt_tokens = self._generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._commands) or self._in_flight is not None or self._scheduler.has_work

    def warm_up(self, progress: Progress | None = None, store: Store | None = None) -> None:
        """Compiles every program that is not in `store`; from then on a compilation is counted and logged."""
        self._runner.programs.store = store
        self._runner.programs.compile_all(progress)
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
            model_id=cfg.model_id,
            cache_dtype=cfg.cache_dtype,
            tokenizer_id=cfg.tokenizer_id,
        )

    def add(self, request: EngineRequest) -> None:
        """Prepares a request on the caller's thread and queues it; raises InvalidRequest, and what `submit` raises."""
        self.submit(prepare(request, self.rules))

    def submit(self, request: PreparedRequest) -> None:
        """Queues a request; its outputs come from `step`, the last with a finish_reason.

        Raises:
          InvalidRequest: its id is in use.
          QueueFull: too many requests wait already.
          EngineDead: the engine has failed; a new one must be built.
        """
        if self.failure is not None:
            raise EngineDead("the engine has stopped after an error") from self.failure
        scheduler = self._scheduler
        if len(self._commands) + len(scheduler.waiting) >= self.cfg.max_num_queued_reqs + scheduler.slots.num_free:
            raise QueueFull(f"{self.cfg.max_num_queued_reqs} requests are waiting already")
        if request.request_id in self._handed_in or request.request_id in scheduler.sequences:
            raise InvalidRequest(f"request_id {request.request_id} is in use")
        sequence = sequence_of(request)
        if request.sampling.seed is None:
            sequence.seed = self._next_seed()
        self._handed_in.add(request.request_id)
        self._commands.append(sequence)
        self._wake.set()

    def abort(self, request_id: int) -> None:
        """Ends a request wherever it is; its last output has finish_reason "abort". Unknown ids are ignored."""
        self._commands.append(request_id)
        self._wake.set()

    def wait_for_work(self, timeout: float) -> bool:
        """Blocks until there is work or `timeout` seconds have passed; says whether there is."""
        if not self.has_work:
            self._wake.wait(timeout)
            self._wake.clear()
        return self.has_work

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
        """A snapshot of the engine's counters; any thread may ask."""
        scheduler = self._scheduler
        return EngineStats(
            running=scheduler.slots.total_running,
            waiting=len(scheduler.waiting) + len(self._commands),
            pages_in_use=scheduler.pages_in_use,
            cache_usage=scheduler.pages_in_use / (self.cfg.num_pages * self.cfg.num_ranks),
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            recompilations=self._compilations.count,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
            host_time_sum=self._host_time.total,
            host_time_counts=tuple(self._host_time.counts),
            experts=self.balancer.stats() if self.balancer is not None else None,
        )

    def _step(self) -> StepOutputs:
        started = perf_counter()
        outputs = StepOutputs([], self._ingest() if self._commands else [])
        plan = self._scheduler.plan()
        before, self._in_flight = self._in_flight, None
        if plan is not None:
            balance = self.balancer.command() if self.balancer is not None else None
            self._in_flight = self._runner.launch(plan, balance)
        waited = 0.0
        if before is not None:
            waiting = perf_counter()
            prefill, decode = self._runner.fetch(before.prefill), self._runner.fetch(before.decode)
            waited = perf_counter() - waiting
            self._note_balance(before)
            self._runner.agree(before, prefill, decode)
            collected = self._collect(before, prefill, decode)
            outputs = StepOutputs(collected.columns, collected.details + outputs.details)
        self._host_time.observe(perf_counter() - started - waited)
        return outputs

    def _collect(self, launched: Launched, prefill: Any, decode: Any) -> StepOutputs:
        outputs = collect(self._scheduler, launched.plan, prefill, decode)
        self._steps += 1
        self._generated_tokens += len(outputs)
        if launched.plan.prefill is not None:
            self._prompt_tokens += sum(c.stop - c.start for mine in launched.plan.prefill.chunks for c in mine)
        return outputs

    def _note_balance(self, launched: Launched) -> None:
        """Takes over the results of a step's balancing, which came before its tokens."""
        if self.balancer is not None and launched.balance is not None and launched.balanced is not None:
            self.balancer.note(launched.balance, self._runner.fetch_arrays(launched.balanced))

    def _ingest(self) -> list[EngineOutput]:
        """Takes over what other threads have handed in."""
        outputs = []
        for _ in range(len(self._commands)):
            command = self._commands.popleft()
            if isinstance(command, Sequence):
                self._scheduler.add(command)
                self._handed_in.discard(command.id)
            elif (sequence := self._scheduler.sequences.get(command)) is not None:
                self._scheduler.remove(sequence)
                outputs.append(EngineOutput(request_id=command, token_ids=[], finish_reason="abort"))
        return outputs

    def _end_all(self, error: BaseException) -> StepOutputs:
        """Ends every request after a failure; nothing of the device's state can be trusted any more."""
        self._in_flight = None
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Sequence):
                self._scheduler.add(command)
        ended = list(self._scheduler.sequences.values())
        for sequence in ended:
            self._scheduler.remove(sequence)
        self._scheduler.abandon()
        self._handed_in.clear()
        text = f"the engine has failed: {public_text(error)}"
        return StepOutputs(
            [], [EngineOutput(request_id=s.id, token_ids=[], finish_reason="error", error=text) for s in ended]
        )

    def _next_seed(self) -> int:
        """A 64-bit seed for a request that brings none; another one each time, the same series for the same engine."""
        state = np.random.SeedSequence(entropy=self._seeds.entropy, spawn_key=(next(self._seed_counter),))
        return int(state.generate_state(1, np.uint64).view(np.int64)[0])
