"""Executes an operator's operations between two steps: pause and resume, other weights, sleep and wake.

The engine calls `advance` before a step while operations wait. One that lets requests finish first returns at once, and
is tried again before the next step; the engine keeps requests back meanwhile that are submitted later. So does an
update that is planned: files are read and shapes compared on a thread of its own, while steps run.
"""

import contextlib
import hashlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from dsv3.checkpoint.identity import known_identity
from dsv3.engine.errors import ClusterError, public_text
from dsv3.engine.executor import LocalExecutor
from dsv3.engine.operations import (
    ContinueGeneration,
    OperatedState,
    Operation,
    OperationRefused,
    PauseGeneration,
    Sleep,
    UpdateWeights,
    Wake,
    WeightsLost,
)
from dsv3.scheduler.request import EngineOutput, FinishReason, StepOutputs
from dsv3.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)
_DROPPED = "the weights were dropped by sleep level 2; update them"
_EXPECTED = (ValueError, TypeError, OSError)  # of what reads and plans, for a source that does not suit
_IDLE_S = 0.05  # of waiting for a plan, where no step could run meanwhile


class Controlled(Protocol):
    """The engine, as operations use it."""

    scheduler: Scheduler
    executor: LocalExecutor

    @property
    def has_requests(self) -> bool:
        """Whether there is a request, but for those kept back."""

    def collect_in_flight(self, outputs: StepOutputs) -> None:
        """Waits for the steps in flight, and processes their results."""

    def end_requests(self, reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        """Ends every request, and returns their last outputs."""


class _Submitted(NamedTuple):
    operation: Operation
    future: Future[None]
    on_progress: Callable[[], None]


class Control:
    """The operations of one engine, and the state that they have led to. The thread that steps calls `advance`."""

    def __init__(self, engine: Controlled) -> None:
        self.state = OperatedState()
        self.is_draining = False
        self._engine: Controlled = weakref.proxy(engine)  # a cycle would keep an engine's arrays until it is collected
        self._waiting: deque[_Submitted] = deque()
        self._planning: tuple[UpdateWeights, Future[None]] | None = None
        self._num_updates = 0

    @property
    def has_waiting(self) -> bool:
        """Whether operations wait."""
        return bool(self._waiting)

    @property
    def is_stopped(self) -> bool:
        """Whether no step may be launched."""
        return bool(self.state.is_paused or self.state.why_not_serving)

    def submit(self, operation: Operation, on_progress: Callable[[], None] = lambda: None) -> Future[None]:
        """Queues an operation; any thread may call it.

        The result raises `OperationRefused` where nothing was begun, `WeightsLost` for an update that has failed in the
        middle. `on_progress` is called now and then while an update replaces weights.
        """
        future: Future[None] = Future()
        self._waiting.append(_Submitted(operation, future, on_progress))
        return future

    def fail(self, error: BaseException) -> None:
        """Fails the operations that wait: the engine has failed."""
        self.is_draining = False
        while self._waiting:
            self._waiting.popleft().future.set_exception(error)

    def advance(self, outputs: StepOutputs) -> None:
        """Executes operations, up to one that waits for requests; adds to `outputs` what requests get.

        Raises ClusterError where the instance has failed.
        """
        while self._waiting:
            submitted = self._waiting[0]
            try:
                is_done = self._execute(submitted, outputs)
            except BaseException as error:  # an interrupt, too, drops the operation
                self.is_draining = False
                if isinstance(error, ClusterError):
                    raise  # `fail` reports it
                self._end(submitted).set_exception(error)
                if not isinstance(error, OperationRefused | WeightsLost):
                    raise
                continue
            if not is_done:
                return
            self.is_draining = False
            self._end(submitted).set_result(None)

    def _end(self, submitted: _Submitted) -> Future[None]:
        """Removes an operation and its plan; one that a thread still makes, the next update waits for."""
        if self._planning is not None and self._planning[1].done():
            self._planning = None
        self._waiting.popleft()
        return submitted.future

    def _execute(self, submitted: _Submitted, outputs: StepOutputs) -> bool:
        """Returns whether the operation is done; it is not while requests finish first."""
        match submitted.operation:
            case ContinueGeneration():
                self._change(is_paused=False)
            case PauseGeneration(mode):
                if not self._settle(mode, outputs):
                    return False
                self._change(is_paused=True)
            case UpdateWeights() as update:
                return self._update(update, submitted.on_progress, outputs)
            case Sleep() as sleep:
                return self._sleep(sleep, outputs)
            case Wake() if self.state.sleep_level:
                self._engine.executor.wake()
                self._change(sleep_level=0)
        return True

    def _change(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)

    def _settle(self, mode: str, outputs: StepOutputs) -> bool:
        """Does with the requests what a mode says, and waits for the steps in flight; False while some finish first."""
        engine = self._engine
        if mode == "wait" and engine.has_requests:
            if self.state.is_paused:
                raise OperationRefused("mode: 'wait', but the engine is paused and has requests; resume it first")
            self.is_draining = True
            return False
        engine.collect_in_flight(outputs)
        if mode == "abort":
            outputs.details.extend(engine.end_requests("abort"))
        elif mode == "retract":
            engine.scheduler.retract_all()
        return True

    def _update(self, update: UpdateWeights, on_progress: Callable[[], None], outputs: StepOutputs) -> bool:
        if self.state.sleep_level:
            raise OperationRefused("the engine sleeps; wake it, then update its weights")
        if not self._is_planned(update, on_progress):
            return False
        if not self._settle("keep" if self.state.is_paused else update.mode, outputs):
            return False
        version = update.version or str(self._num_updates + 1)
        with _refusing():
            self._engine.executor.plan_weights(update.source)()  # at once, unless something has changed since
            weights = _weights_key(update.source, version)
        try:
            self._engine.executor.replace_weights(on_progress)
        except BaseException as error:  # an interrupt, too, leaves leaves of two versions
            self._lose(f"an update of the weights has failed ({public_text(error)}); update them again", outputs)
            if isinstance(error, ClusterError) or not isinstance(error, Exception):
                raise
            raise WeightsLost(self.state.missing) from error
        self._num_updates += 1
        self._change(weight_version=version, weights=weights, missing="")
        for sequence in self._engine.scheduler.change_weights(weights, version):
            outputs.details.append(EngineOutput(request_id=sequence.id, token_ids=[], weight_version=version))
        _log.info("serving the weights %r from now on", version)
        return True

    def _is_planned(self, update: UpdateWeights, on_progress: Callable[[], None]) -> bool:
        """Returns whether an update is planned, which begins with the first call; refuses one that cannot be."""
        if self._planning is None:
            with _refusing():
                self._planning = update, _in_thread(self._engine.executor.plan_weights(update.source), update.source)
        planned, future = self._planning
        if not (self._engine.has_requests and not self.is_stopped):
            wait([future], _IDLE_S)
        if not future.done():
            on_progress()
            return False
        if planned is not update:  # that of an operation that an interrupt has dropped
            self._planning = None
            return False
        with _refusing():
            future.result()
        return True

    def _sleep(self, sleep: Sleep, outputs: StepOutputs) -> bool:
        if self.state.sleep_level == sleep.level:
            return True
        if self.state.sleep_level:
            raise OperationRefused(
                f"level: {sleep.level}, but the engine sleeps at level {self.state.sleep_level}; wake it first"
            )
        if self.state.missing and sleep.level == 1:
            raise OperationRefused(f"level: 1 keeps weights, but {self.state.missing}")
        if not self._settle(sleep.mode, outputs):
            return False
        self._engine.scheduler.flush()
        self._engine.executor.sleep(sleep.level)
        self._change(sleep_level=sleep.level, missing=_DROPPED if sleep.level > 1 else self.state.missing)
        return True

    def _lose(self, why: str, outputs: StepOutputs) -> None:
        """Ends all requests: part of the weights is of one version, part of another, or gone."""
        _log.error("%s", why)
        self._change(missing=why)
        outputs.details.extend(self._engine.end_requests("error", why))


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raises OperationRefused for every error but that of an instance that has failed: planning changes nothing."""
    try:
        yield
    except ClusterError:
        raise
    except _EXPECTED as error:
        raise OperationRefused(str(error)) from error
    except Exception as error:
        _log.exception("an update cannot be planned")
        raise OperationRefused(f"source: {type(error).__name__}: {error}") from error


def _in_thread(plan: Callable[[], None], source: Any) -> Future[None]:
    """Returns the future of a plan that a thread makes; it computes the identity of a directory's files too."""
    future: Future[None] = Future()

    def work() -> None:
        try:
            plan()
            if isinstance(source, str | os.PathLike):
                known_identity(Path(source))
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=work, name="plan", daemon=True).start()
    return future


def _weights_key(source: Any, version: str) -> str:
    """Returns what prefix keys depend on: equal for instances that have read equal files under one version."""
    is_directory = isinstance(source, str | os.PathLike)
    content = known_identity(Path(source)) if is_directory else os.urandom(32).hex()
    return hashlib.sha256(f"{version}\0{content}".encode()).hexdigest()
