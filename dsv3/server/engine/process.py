"""The process that owns the engine: steps it on the main thread, while other threads carry frames in and out.

`supervisor.py` starts it as `python -m dsv3.server.engine.process LISTENER [MODULE ...]`. Its link leads to the first
front; others connect to the socket with that descriptor. When the first front goes away, this process ends at once,
whatever it is doing. When another one goes away, its requests are aborted.
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
from itertools import chain, islice
from typing import Any, NoReturn, Protocol

import msgspec

from dsv3.engine.errors import public_text
from dsv3.engine.step_log import EngineSnapshot, StepLog
from dsv3.logs import configure_logging
from dsv3.processes.child import link_to_parent
from dsv3.scheduler.request import InvalidRequest, PreparedRequest, QueueFull, StepOutputs, fan_out
from dsv3.server.engine import messages
from dsv3.server.engine.api_servers import ApiServerConnection, ApiServerConnections

# Sequences taken between two steps: 30 us each, whatever their prompt's length. The rest waits in its frame.
SLICE = 128


class EngineLike(Protocol):
    """What the engine's process needs of an engine; `dsv3.engine.engine.Engine` is one."""

    failure: BaseException | None
    log: StepLog

    @property
    def has_work(self) -> bool: ...
    @property
    def room(self) -> int: ...
    def submit(self, request: PreparedRequest) -> None: ...
    def abort(self, request_id: int) -> None: ...
    def flush(self) -> None: ...
    def step(self) -> StepOutputs: ...
    def stats(self) -> Any: ...
    def snapshot(self) -> EngineSnapshot: ...


class RequestReceiver:
    """Does what fronts ask for, in the order in which it has come."""

    def __init__(self, engine: EngineLike, api_servers: ApiServerConnections):
        self._engine, self._api_servers = engine, api_servers
        # Requests of which a part has been taken: whose they are, the ids of all sequences, and those that are left.
        self._adding: tuple[ApiServerConnection, list[int], Iterator[PreparedRequest]] | None = None

    @property
    def has_work(self) -> bool:
        """Whether `take` has something to do."""
        return self._adding is not None or self._api_servers.has_messages

    def take(self) -> bool:
        """Does what has come, up to `SLICE` new sequences; returns whether there was anything."""
        left, changed = SLICE, self._adding is not None
        left -= self._go_on(left)
        if left <= 0:
            return True
        for api_server, message in self._api_servers.take():
            changed = True
            if isinstance(message, messages.Add):
                self._begin(api_server, message.requests)
                left -= self._go_on(left)
            elif isinstance(message, messages.Flush):
                self._engine.flush()
            elif isinstance(message, messages.Inspect):
                api_server.send(show(self._engine, message))
            else:
                self._abort(api_server, message)
            if left <= 0:
                break
        return changed

    def _begin(self, api_server: ApiServerConnection, requests: list[PreparedRequest]) -> None:
        """Notes requests to take, all or none: nobody else is given the room that they find now."""
        ids = [request.request_id + i for request in requests for i in range(request.sampling.n)]
        if len(ids) > self._engine.room:
            api_server.send(messages.Rejected(ids, "queue_full", "the queue is full"))
            return
        api_server.live.update(ids)
        self._adding = api_server, ids, chain.from_iterable(map(fan_out, requests))

    def _go_on(self, count: int) -> int:
        """Takes up to `count` of the sequences begun with; returns how many it has looked at."""
        if self._adding is None:
            return 0
        (api_server, ids, left), done = self._adding, 0
        for request in islice(left, count):
            done += 1
            if (rejection := self._submit(request, ids)) is not None:
                api_server.live.difference_update(ids)
                api_server.send(rejection)
                self._adding = None
                return done
        if done < count:
            self._adding = None
        return done

    def _submit(self, request: PreparedRequest, ids: list[int]) -> messages.Rejected | None:
        """Hands one sequence to the engine; where it is refused, takes back the others of `ids`."""
        try:
            self._engine.submit(request)
            return None
        except QueueFull as error:
            kind, text = "queue_full", str(error)
        except InvalidRequest as error:
            kind, text = "invalid", str(error)
        except Exception:  # one request may fail only itself
            _log.error("request %d was not taken:\n%s", request.request_id, traceback.format_exc())
            kind, text = "internal", "the engine could not take the request"
        for taken in ids[: ids.index(request.request_id)]:
            self._engine.abort(taken)
        return messages.Rejected(ids, kind, text)

    def _abort(self, api_server: ApiServerConnection, message: messages.Abort | None) -> None:
        """Aborts what a front asks for; all of its requests if it has gone."""
        ended = list(api_server.live) if message is None else message.request_ids
        api_server.live.difference_update(ended)
        for request_id in ended:
            self._engine.abort(request_id)
        if message is None:
            self._api_servers.remove(api_server)


def show(engine: EngineLike, message: messages.Inspect) -> messages.Seen | messages.Profile:
    """Returns what a front has asked to see."""
    if message.what == "look":
        return messages.Seen(engine.snapshot())
    if message.what == "start_profile":
        engine.log.start_profile()
        return messages.Profile([])
    return messages.Profile(engine.log.stop_profile())


_STATS_S = 0.1  # between two frames with statistics: making them takes longer than a step's columns
_PULSE_S = 1.0  # between two frames of an idle engine: without them a front takes it for hanging
_log = logging.getLogger("dsv3.engine")


class StepFailed(Exception):
    """The engine has given up every request after an exception; it takes no more."""


class EngineHost:
    """This process, as an engine's factory sees it: whom to tell, and how the process ends."""

    def __init__(self, link: socket.socket, listener: socket.socket):
        self._at_end: list[Callable[[str | None], None]] = []
        self._failing = threading.Lock()
        self.api_servers = ApiServerConnections(link, listener, self._stop, self._first_api_server_gone)

    def progress(self, text: str, done: int = 0, total: int = 0) -> None:
        """Tells what the engine does while it starts."""
        self.api_servers.tell_first(messages.StartProgress(text, done, total))

    def drain(self, reason: str) -> None:
        """Asks the first front to have all fronts drain, and to stop."""
        self.api_servers.tell_first(messages.DrainServer(reason))

    def at_end(self, callback: Callable[[str | None], None]) -> None:
        """Has `callback` called before the process ends: with the reason of a failure, None for an orderly end."""
        self._at_end.append(callback)

    def end(self, status: int, failure: str | None) -> NoReturn:
        """Ends the process at once: the main thread may be compiling or inside of a step."""
        for callback in self._at_end:
            callback(failure)
        os._exit(status)

    def fail(self, reason: str) -> NoReturn:
        """Tells every front why, and ends the process. Any thread may call it; only the first reason counts."""
        self._failing.acquire()  # for good
        for callback in self._at_end:
            callback(reason)
        self.api_servers.tell(messages.EngineFailure(reason))
        self.api_servers.close()
        os._exit(1)

    def _stop(self) -> NoReturn:
        self.end(0, None)

    def _first_api_server_gone(self) -> NoReturn:
        self.end(0, "the HTTP process of the leader has gone")


def main(listener: int, imports: Sequence[str]) -> NoReturn:
    """Runs an engine for the first front, and for those that connect to the socket with the descriptor `listener`.

    The modules `imports` are imported before: so a process that waits for the end of another one has that behind it.
    """
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # the first front drains first and then says when to stop
    configure_logging()
    host = EngineHost(link_to_parent(), socket.socket(fileno=listener))
    for module in imports:
        importlib.import_module(module)
    try:
        start = host.api_servers.start()
        host.api_servers.beat()
        engine, info = _build(start, host)
        host.api_servers.announce(info)
        serve(engine, host.api_servers)
    except Exception as error:
        _report(error)
        kind = str(error) if isinstance(error, StepFailed) else public_text(error)
        host.fail(f"the engine stopped after an error ({kind})")


def serve(engine: EngineLike, api_servers: ApiServerConnections) -> NoReturn:
    """Steps the engine for ever; raises StepFailed, or what `engine.step` raises, when it cannot go on.

    Statistics go with the first frame after `_STATS_S`, and with the one before the engine falls idle. While it is idle
    they come every `_PULSE_S`. A frame without them says that its next step, which may take long, begins.
    """
    told, idle, receiver = 0.0, True, RequestReceiver(engine, api_servers)
    while True:
        changed = receiver.take()
        if idle and engine.has_work:
            api_servers.tell(messages.Outputs.from_outputs(StepOutputs(), None))
        outputs = engine.step() if engine.has_work else StepOutputs()
        idle = not (engine.has_work or receiver.has_work)
        if engine.failure is not None:  # what the step says of its requests counts no more: they go on elsewhere
            raise StepFailed(public_text(engine.failure))
        due = idle or time.monotonic() - told > _STATS_S
        if outputs or changed or idle:
            api_servers.deliver(outputs, _numbers(engine.stats()) if due else None)
            told = time.monotonic() if due else told
        if idle:
            api_servers.wait(_PULSE_S)


def _build(start: messages.Start, host: EngineHost) -> tuple[EngineLike, messages.EngineInfo]:
    module, _, name = start.factory.partition(":")
    factory = getattr(importlib.import_module(module), name)
    engine, info = factory(start, host)
    return engine, info


def _numbers(stats: Any) -> messages.Stats:
    """Returns the numbers and histograms among the fields; those of a job kind's record as `kind_name`."""
    fields = msgspec.to_builtins(stats)
    all_ = dict(_flattened("", fields | fields.pop("jobs", {})))
    numbers = {name: value for name, value in all_.items() if isinstance(value, int | float)}
    return numbers | {name: list(value) for name, value in all_.items() if isinstance(value, tuple | list)}


def _flattened(prefix: str, record: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields what a record of records holds, by names joined with "_"."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flattened(f"{prefix}{name}_", value)
        else:
            yield f"{prefix}{name}", value


def _report(error: Exception) -> None:
    """Logs everything; clients only hear the kind, since a text may carry a path or a part of a prompt."""
    if isinstance(error, ValueError | OSError | StepFailed):  # bad files and settings: their text says what to change
        _log.error("%s: %s", type(error).__name__, error)
        _log.debug("%s", traceback.format_exc())
    else:
        _log.error("the engine stopped:\n%s", traceback.format_exc())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
