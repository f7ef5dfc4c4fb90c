"""The engine process: steps the engine on the main thread, while another thread sends and receives frames.

`supervisor.py` starts it as `python -m dsv3.server.engine.process LISTENER [MODULE ...]`. Its link is the connection to
API server 0; others connect to the listening socket with the descriptor LISTENER. When API server 0 disconnects, this
process exits at once. When another one disconnects, its requests are aborted.
"""

import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain, islice
from typing import Any, NoReturn, Protocol

import msgspec

from dsv3.engine.errors import public_text
from dsv3.engine.operations import OperatedState, Operation, OperationRefused
from dsv3.engine.step_log import EngineSnapshot, StepLog, StepRecord
from dsv3.logs import configure_logging
from dsv3.processes.child import import_uncollected, link_to_parent
from dsv3.scheduler.listing import RequestList
from dsv3.scheduler.request import InvalidRequest, NotServing, PreparedRequest, QueueFull, StepOutputs, fan_out
from dsv3.server.engine import messages
from dsv3.server.engine.api_servers import ApiServerConnection, ApiServerConnections

# New sequences submitted between two steps. The rest stays in its frame, so many requests do not delay a step.
SLICE = 128


class EngineLike(Protocol):
    """The interface of an engine that this process uses; `dsv3.engine.engine.Engine` implements it."""

    failure: BaseException | None
    log: StepLog

    @property
    def has_work(self) -> bool: ...
    @property
    def room(self) -> int: ...
    @property
    def state(self) -> OperatedState: ...
    def submit(self, request: PreparedRequest) -> None: ...
    def abort(self, request_id: int) -> None: ...
    def flush(self) -> None: ...
    def step(self) -> StepOutputs: ...
    def stats(self) -> Any: ...
    def snapshot(self) -> EngineSnapshot: ...
    def requests(self) -> RequestList: ...
    def operate(self, operation: Operation, on_progress: Callable[[], None]) -> Future[None]: ...


class RequestReceiver:
    """Processes the requests of API servers between two steps, in the order of arrival."""

    def __init__(self, engine: EngineLike, api_servers: ApiServerConnections):
        self._engine, self._api_servers = engine, api_servers
        # An `Add` that is submitted in part: its sender, the ids of all its sequences, and those left to submit.
        self._adding: tuple[ApiServerConnection, list[int], Iterator[PreparedRequest]] | None = None

    @property
    def has_work(self) -> bool:
        return self._adding is not None or self._api_servers.has_messages

    def receive(self) -> bool:
        """Processes messages, up to `SLICE` new sequences; returns whether there were any."""
        has_changed = self._adding is not None
        left = SLICE - self._submit_pending(SLICE)
        if left <= 0:
            return True
        for api_server, message in self._api_servers.receive():
            has_changed = True
            if isinstance(message, messages.Add):
                self._start_adding(api_server, message.requests)
                left -= self._submit_pending(left)
            elif isinstance(message, messages.Flush):
                self._engine.flush()
            elif isinstance(message, messages.Inspect):
                api_server.send(messages.EngineReply(message.number, inspect(self._engine, message.what)))
            elif isinstance(message, messages.OperateEngine):
                self._operate(api_server, message)
            else:
                self._abort(api_server, message)
            if left <= 0:
                break
        return has_changed

    def _operate(self, api_server: ApiServerConnection, message: messages.OperateEngine) -> None:
        """Executes an operation between two steps, and reports its end; frames meanwhile show that the engine lives."""

        def report(future: Future[None]) -> None:
            error = future.exception()
            self._api_servers.announce_state(self._engine.state)
            text = "" if error is None else str(error)
            refused = isinstance(error, OperationRefused)
            api_server.send(messages.EngineReply(message.number, error=text, refused=refused))

        self._engine.operate(message.operation, lambda: announce_step(self._api_servers)).add_done_callback(report)

    def _start_adding(self, api_server: ApiServerConnection, requests: list[PreparedRequest]) -> None:
        """Begins to submit the requests of an `Add`, or rejects all; no other `Add` is processed in between."""
        ids = [request.request_id + i for request in requests for i in range(request.sampling.n)]
        if len(ids) > self._engine.room:
            api_server.send(messages.Rejected(ids, "queue_full", "the queue is full"))
            return
        api_server.request_ids.update(ids)
        self._adding = api_server, ids, chain.from_iterable(map(fan_out, requests))

    def _submit_pending(self, count: int) -> int:
        """Submits up to `count` sequences of the current `Add`; returns how many."""
        if self._adding is None:
            return 0
        (api_server, ids, left), done = self._adding, 0
        for request in islice(left, count):
            done += 1
            if (rejection := self._submit(request, ids)) is not None:
                api_server.request_ids.difference_update(ids)
                api_server.send(rejection)
                self._adding = None
                return done
        if done < count:
            self._adding = None
        return done

    def _submit(self, request: PreparedRequest, ids: list[int]) -> messages.Rejected | None:
        """Submits one sequence; if the engine rejects it, aborts those of `ids` before it."""
        try:
            self._engine.submit(request)
            return None
        except QueueFull as error:
            kind, text = "queue_full", str(error)
        except InvalidRequest as error:
            kind, text = "invalid", str(error)
        except NotServing as error:
            kind, text = "not_serving", str(error)
        except Exception:  # must not end the engine
            _log.error("request %d could not be submitted:\n%s", request.request_id, traceback.format_exc())
            kind, text = "internal", "the engine could not accept the request"
        for submitted in ids[: ids.index(request.request_id)]:
            self._engine.abort(submitted)
        return messages.Rejected(ids, kind, text)

    def _abort(self, api_server: ApiServerConnection, message: messages.Abort | None) -> None:
        """Aborts requests of an API server: those of the message, or all if it has disconnected (None)."""
        aborted = list(api_server.request_ids) if message is None else message.request_ids
        api_server.request_ids.difference_update(aborted)
        for request_id in aborted:
            self._engine.abort(request_id)
        if message is None:
            self._api_servers.remove(api_server)


def inspect(engine: EngineLike, what: messages.Inspection) -> EngineSnapshot | RequestList | list[StepRecord]:
    match what:
        case "requests":
            return engine.requests()
        case "snapshot":
            return engine.snapshot()
        case "start_profile":
            engine.log.start_profile()
            return []
        case "stop_profile":
            return engine.log.stop_profile()


_STATS_S = 0.1  # between two frames with statistics, which cost more than a step's columns
_HEARTBEAT_S = 1.0  # between two frames of an idle engine; the API servers' watchdogs expect them
_log = logging.getLogger("dsv3.engine")


class StepFailed(Exception):
    """The engine has failed during a step and accepts no more requests."""


class EngineHost:
    """The engine process, as an engine's factory sees it: reports progress and failures, and exits."""

    def __init__(self, link: socket.socket, listener: socket.socket):
        self._on_exit: list[Callable[[str | None], None]] = []
        self._failing = threading.Lock()
        lost = "API server 0 of the leader has ended"
        self.api_servers = ApiServerConnections(link, listener, lambda: self.exit(0, None), lambda: self.exit(0, lost))

    def progress(self, text: str, done: int = 0, total: int = 0) -> None:
        self.api_servers.send_to_server_0(messages.StartProgress(text, done, total))

    def drain(self, reason: str) -> None:
        """Requests API server 0 to drain all API servers and to stop the instance."""
        self.api_servers.send_to_server_0(messages.DrainServer(reason))

    def on_exit(self, callback: Callable[[str | None], None]) -> None:
        """Registers a callback for the end of the process; it gets the reason of a failure, or None."""
        self._on_exit.append(callback)

    def exit(self, status: int, failure: str | None) -> NoReturn:
        """Ends the process at once, although the main thread may be compiling or inside a step."""
        for callback in self._on_exit:
            callback(failure)
        os._exit(status)

    def fail(self, reason: str) -> NoReturn:
        """Broadcasts the reason and ends the process. Any thread may call it; the first call wins."""
        self._failing.acquire()  # never released
        for callback in self._on_exit:
            callback(reason)
        self.api_servers.broadcast(messages.EngineFailure(reason))
        self.api_servers.close()
        os._exit(1)


def main(listener: int, imports: Sequence[str]) -> NoReturn:
    """Runs an engine for API server 0, and for those that connect to the socket with the descriptor `listener`.

    A spare process imports the modules `imports` before it waits for `Start`.
    """
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # API server 0 drains and then sends StopEngine
    configure_logging()
    host = EngineHost(link_to_parent(), socket.socket(fileno=listener))
    import_uncollected(*imports)
    try:
        start = host.api_servers.start()
        module, _, factory = start.factory.partition(":")
        engine, info = getattr(importlib.import_module(module), factory)(start, host)
        host.api_servers.announce(info)
        serve(engine, host.api_servers)
    except Exception as error:
        _report(error)
        kind = str(error) if isinstance(error, StepFailed) else public_text(error)
        host.fail(f"the engine stopped after an error ({kind})")


def serve(engine: EngineLike, api_servers: ApiServerConnections) -> NoReturn:
    """Steps the engine until it fails; then raises StepFailed or the exception of `engine.step`.

    Statistics are sent at most every `_STATS_S`, with the last frame before the engine is idle, and every
    `_HEARTBEAT_S` while it is. An empty frame without them announces a step after an idle time, which may take long.
    """
    stats_sent_at, idle, receiver = 0.0, True, RequestReceiver(engine, api_servers)
    while True:
        has_changed = receiver.receive()
        if idle and engine.has_work:
            announce_step(api_servers)
        outputs = engine.step() if engine.has_work else StepOutputs()
        idle = not (engine.has_work or receiver.has_work)
        if engine.failure is not None:  # drop the step's outputs: its requests resume in the next engine
            raise StepFailed(public_text(engine.failure))
        due = idle or time.monotonic() - stats_sent_at > _STATS_S
        if outputs or has_changed or idle:
            api_servers.deliver(outputs, numeric_stats(engine.stats()) if due else None)
            stats_sent_at = time.monotonic() if due else stats_sent_at
        if idle:
            api_servers.wait(_HEARTBEAT_S)


def announce_step(api_servers: ApiServerConnections) -> None:
    """Sends an empty frame: the engine lives, and what it does may take long."""
    api_servers.broadcast(messages.Outputs.from_outputs(StepOutputs(), None))


def numeric_stats(stats: Any) -> messages.Stats:
    """Returns the numbers and histograms of `EngineStats`; those of a kind of work as `KIND_NAME`."""
    fields = msgspec.to_builtins(stats)
    flat = _flatten("", fields | fields.pop("jobs", {}))
    found = ((name, list(value) if isinstance(value, tuple) else value) for name, value in flat)
    return {name: value for name, value in found if isinstance(value, int | float | list)}


def _flatten(prefix: str, record: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the values of nested dictionaries, with names joined by "_"."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flatten(f"{prefix}{name}_", value)
        else:
            yield f"{prefix}{name}", value


def _report(error: Exception) -> None:
    """Logs an error in full; clients get only its type, since its text may contain a path or a part of a prompt."""
    if isinstance(error, ValueError | OSError | StepFailed):  # bad files and settings: the text says what to change
        _log.error("%s: %s", type(error).__name__, error)
        _log.debug("%s", traceback.format_exc())
    else:
        _log.error("the engine stopped:\n%s", traceback.format_exc())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
