"""The process that owns the engine: steps it on the main thread, while two threads carry frames in and out.

Started by `dsv3.api.engine_client` as `python -m dsv3.api.engine_process FD`, FD being one end of a Unix socket pair.

Outgoing frames are buffered without being dropped, since a lost token is a lost text; the buffer is bounded by what the
running requests can still produce, and past `_MAX_BUFFERED_BYTES` (an HTTP process that has stopped reading) the
process ends itself. When the HTTP process goes away, this one ends at once, whatever it is doing.
"""

import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import msgspec

from dsv3.api import frames
from dsv3.engine.errors import public_text
from dsv3.prepare import PreparedRequest
from dsv3.request import InvalidRequest, QueueFull, StepOutputs

_MAX_BUFFERED_BYTES = 512 * 2**20
_STATS_S = 0.1  # between two frames with statistics: making them takes longer than a step's columns
_log = logging.getLogger("dsv3.engine")


class EngineLike(Protocol):
    """What this process needs of an engine; `dsv3.engine.engine.Engine` is one."""

    failure: BaseException | None

    @property
    def has_work(self) -> bool: ...
    def submit(self, request: PreparedRequest) -> None: ...
    def abort(self, request_id: int) -> None: ...
    def step(self) -> StepOutputs: ...
    def stats(self) -> Any: ...


class EngineFailed(Exception):
    """The engine has ended every request after an exception; it takes no more."""


class Outbox:
    """Frames on their way to the HTTP process; `send` never waits for it."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._buffered = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def send(self, message: frames.FromEngine) -> None:
        frame = frames.encode(message)
        with self._lock:
            self._buffered += len(frame)
            full = self._buffered > _MAX_BUFFERED_BYTES
        if full:
            _log.error("the HTTP process does not read: %d bytes wait for it; ending", self._buffered)
            os._exit(1)
        self._frames.put(frame)

    def close(self, timeout_s: float = 5.0) -> None:
        """Sends what is left, for at most `timeout_s`."""
        self._frames.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                self._connection.sendall(frame)
            except OSError:
                return  # the inbox sees the end of the connection and ends the process
            with self._lock:
                self._buffered -= len(frame)


class Host:
    """This process, as an engine's factory sees it: whom to tell, and how the process ends."""

    def __init__(self, outbox: Outbox):
        self._outbox = outbox
        self._at_end: list[Callable[[str | None], None]] = []
        self._failing = threading.Lock()

    def progress(self, text: str, done: int = 0, total: int = 0) -> None:
        """Tells what the engine does while it starts."""
        self._outbox.send(frames.Progress(text, done, total))

    def drain(self, reason: str) -> None:
        """Asks the HTTP process to drain and stop."""
        self._outbox.send(frames.Drain(reason))

    def at_end(self, callback: Callable[[str | None], None]) -> None:
        """Has `callback` called before the process ends: with the reason of a failure, None for an orderly end."""
        self._at_end.append(callback)

    def end(self, status: int, failure: str | None) -> NoReturn:
        """Ends the process at once: the main thread may be compiling or inside of a step."""
        for callback in self._at_end:
            callback(failure)
        os._exit(status)

    def fail(self, reason: str) -> NoReturn:
        """Ends the process, the HTTP process being told why. Any thread may call it; only the first reason counts."""
        self._failing.acquire()  # for good
        for callback in self._at_end:
            callback(reason)
        self._outbox.send(frames.Failed(reason))
        self._outbox.close()
        os._exit(1)


class Inbox:
    """Messages from the HTTP process, read by a thread as they come."""

    def __init__(self, connection: socket.socket, host: Host):
        self._host = host
        self._stream = frames.stream_of(connection)
        self._messages: deque[frames.ToEngine] = deque()
        self._arrived = threading.Event()

    def first(self) -> frames.ToEngine | None:
        """The first message, read on this thread; None if the peer has gone."""
        body = frames.read_frame(self._stream)
        return None if body is None else frames.to_engine.decode(body)

    def start(self) -> None:
        threading.Thread(target=self._run, name="inbox", daemon=True).start()

    def take(self) -> list[frames.ToEngine]:
        """Everything that has arrived; empty if nothing has."""
        self._arrived.clear()
        taken = []
        while self._messages:
            taken.append(self._messages.popleft())
        return taken

    def wait(self) -> None:
        self._arrived.wait()

    def _run(self) -> None:
        try:
            while (body := frames.read_frame(self._stream)) is not None:
                message = frames.to_engine.decode(body)
                if isinstance(message, frames.Stop):
                    self._host.end(0, None)
                self._messages.append(message)
                self._arrived.set()
        except (OSError, frames.FrameError, msgspec.MsgspecError) as error:
            _log.error("connection to the HTTP process: %s", error)
        self._host.end(0, "the HTTP process of the leader has gone")


def main(fd: int) -> int:
    """Runs an engine for the peer of the socket `fd`; returns the exit status if that peer sends no `Start`."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # the HTTP process drains first and then says when to stop
    configure_logging()
    connection = socket.socket(fileno=fd)
    host = Host(outbox := Outbox(connection))
    inbox = Inbox(connection, host)
    start = inbox.first()
    if not isinstance(start, frames.Start):
        return 1
    inbox.start()
    try:
        engine, info = _build(start, host)
        outbox.send(info)
        serve(engine, inbox, outbox)
    except Exception as error:
        _report(error)
        kind = str(error) if isinstance(error, EngineFailed) else public_text(error)
        host.fail(f"the engine stopped after an error ({kind})")


def configure_logging() -> None:
    """jax warns only, through its own handler, and says in a line why a GPU plugin does not start.

    Told to use the CPU it does not say that at all.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("jax").setLevel(logging.WARNING)
    logging.getLogger("jax").propagate = False
    plugins = logging.getLogger("jax._src.xla_bridge")
    plugins.addFilter(_without_traceback)
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        plugins.setLevel(logging.CRITICAL)


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and record.exc_info[1] is not None:
        record.msg, record.args = f"{record.getMessage()}: {record.exc_info[1]}", ()
        record.exc_info = record.exc_text = None
    return True


def serve(engine: EngineLike, inbox: Inbox, outbox: Outbox) -> NoReturn:
    """Steps the engine for ever; raises EngineFailed, or what `engine.step` raises, when it cannot go on.

    Statistics go with the first frame after `_STATS_S`, and with the one before the engine falls idle.
    """
    told = 0.0
    while True:
        changed = False
        for message in inbox.take():
            _handle(engine, message, outbox)
            changed = True
        outputs = engine.step() if engine.has_work else StepOutputs()
        idle = not engine.has_work
        due = idle or time.monotonic() - told > _STATS_S
        if outputs or changed or idle:
            outbox.send(frames.Step.from_outputs(outputs, _numbers(engine.stats()) if due else None))
            told = time.monotonic() if due else told
        if engine.failure is not None:
            raise EngineFailed(public_text(engine.failure))
        if idle:
            inbox.wait()


def _build(start: frames.Start, host: Host) -> tuple[EngineLike, frames.EngineInfo]:
    module, _, name = start.factory.partition(":")
    factory = getattr(importlib.import_module(module), name)
    engine, info = factory(start, host)
    return engine, info


def _handle(engine: EngineLike, message: frames.ToEngine, outbox: Outbox) -> None:
    if isinstance(message, frames.Add):
        rejection = _add(engine, message.requests)
        if rejection is not None:
            outbox.send(rejection)
    elif isinstance(message, frames.Abort):
        for request_id in message.request_ids:
            engine.abort(request_id)


def _add(engine: EngineLike, requests: list[PreparedRequest]) -> frames.Rejected | None:
    """Adds all of `requests` or, after the first that is refused, none."""
    ids = [request.request_id for request in requests]
    for i, request in enumerate(requests):
        try:
            engine.submit(request)
            continue
        except QueueFull as error:
            kind, text = "queue_full", str(error)
        except InvalidRequest as error:
            kind, text = "invalid", str(error)
        except Exception:  # one request may fail only itself
            _log.error("request %d was not taken:\n%s", request.request_id, traceback.format_exc())
            kind, text = "internal", "the engine could not take the request"
        for taken in ids[:i]:
            engine.abort(taken)
        return frames.Rejected(ids, kind, text)
    return None


def _numbers(stats: Any) -> dict[str, float]:
    """Returns the numbers among the fields; those of a job kind's record as `kind_name`."""
    fields = msgspec.to_builtins(stats)
    by_job = {f"{kind}_{name}": v for kind, record in fields.get("jobs", {}).items() for name, v in record.items()}
    return {name: value for name, value in (fields | by_job).items() if isinstance(value, int | float)}


def _report(error: Exception) -> None:
    """The log has everything; clients only hear the kind, since a text may carry a path or a part of a prompt."""
    if isinstance(error, ValueError | OSError | EngineFailed):  # bad files and settings: their text says what to change
        _log.error("%s: %s", type(error).__name__, error)
        _log.debug("%s", traceback.format_exc())
    else:
        _log.error("the engine stopped:\n%s", traceback.format_exc())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
