"""The HTTP process's side of the engine: starts its process, sends requests, hands each request its outputs."""

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from dsv3.api import frames
from dsv3.prepare import PreparedRequest
from dsv3.request import EngineOutput

# A step never takes this long; with requests running and no frame for so long the engine hangs.
WATCHDOG_S = 300.0
_log = logging.getLogger("dsv3.server")

State = Literal["starting", "ready", "failed", "closed"]


class EngineDead(Exception):
    """The engine's process has ended, or hangs; the message is fit for clients."""


class Busy(Exception):
    """The queue is full."""


class Refused(Exception):
    """The engine refuses this request; `invalid` tells whether the client is to blame."""

    def __init__(self, message: str, invalid: bool):
        super().__init__(message)
        self.invalid = invalid


class Subscription:
    """Outputs of the requests of one HTTP request, in the order in which they came.

    Iterating yields lists: everything that has come since the last one. Raises EngineDead, Busy or Refused.
    """

    def __init__(self, request_ids: Sequence[int]):
        self.live = set(request_ids)
        self._outputs: list[EngineOutput] = []
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, output: EngineOutput) -> None:
        self._outputs.append(output)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._arrived.set()

    async def get(self) -> list[EngineOutput]:
        """Waits for outputs; those that came before a failure are returned before it is raised."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        outputs, self._outputs = self._outputs, []
        return outputs


class EngineClient:
    """One engine process, which begins with the message `start`.

    `on_stats` is called with the engine's numbers after each step, `on_progress` while it starts.
    """

    def __init__(
        self,
        start: frames.Start,
        *,
        on_progress: Callable[[frames.Progress], None] = lambda _: None,
        watchdog_s: float = WATCHDOG_S,
    ):
        self.state: State = "starting"
        self.reason = "the engine is starting"
        self.info: frames.EngineInfo | None = None
        self.on_stats: Callable[[dict[str, float]], None] = lambda _: None
        self.ended = asyncio.Event()
        self.settled = asyncio.Event()
        self.asks_to_drain = asyncio.Event()
        self._start = start
        self._on_progress = on_progress
        self._watchdog_s = watchdog_s
        self._next_id = 0
        self._subscriptions: dict[int, Subscription] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._failure = ""
        self._last_frame = time.monotonic()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def num_live(self) -> int:
        """Sequences the engine has not finished."""
        return len(self._subscriptions)

    @property
    def capacity(self) -> int:
        """Sequences the engine holds at most, running and waiting; 0 before it is ready."""
        return 0 if self.info is None else self.info.max_num_seqs + self._start.engine.max_num_queued_reqs

    def new_ids(self, count: int) -> int:
        """Returns the first of `count` request ids that nobody has had."""
        self._next_id += count
        return self._next_id - count

    def has_room_for(self, count: int) -> bool:
        return self.num_live + count <= self.capacity

    async def start(self) -> None:
        """Starts the process; `state` tells when it is ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dsv3.api.engine_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's ^C is the HTTP process's to handle
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**20)
        self._writer.write(frames.encode(self._start))
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._watch())]

    def submit(self, requests: Sequence[PreparedRequest]) -> Subscription:
        """Sends requests, all or none; raises Busy without asking when there is no room, EngineDead without engine."""
        if self.state != "ready":
            raise EngineDead(self.reason)
        if not self.has_room_for(len(requests)):
            raise Busy(f"the queue is full: {self.num_live} requests are running or waiting")
        subscription = Subscription([request.request_id for request in requests])
        if not self._subscriptions:
            self._last_frame = time.monotonic()
        for request in requests:
            self._subscriptions[request.request_id] = subscription
        self._writer.write(frames.encode(frames.Add(list(requests))))
        return subscription

    def abort(self, request_ids: Sequence[int]) -> None:
        """Frees the given requests at once; finished ones are ignored."""
        live = [i for i in request_ids if self._subscriptions.pop(i, None) is not None]
        if live and self.state == "ready":
            self._writer.write(frames.encode(frames.Abort(live)))

    def abort_all(self, error: Exception) -> None:
        """Frees every request and fails whoever waits for one."""
        live = dict(self._subscriptions)
        self.abort(list(live))
        for subscription in set(live.values()):
            subscription.fail(error)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Ends the process, by force if it does not end by itself."""
        if self.state in ("starting", "ready"):
            self.state, self.reason = "closed", "the server is shutting down"
            self.abort_all(EngineDead(self.reason))
            self._writer.write(frames.encode(frames.Stop()))
        for task in self._tasks[1:]:
            task.cancel()
        try:
            async with asyncio.timeout(timeout_s):
                await self.ended.wait()
        except TimeoutError:
            self._kill()
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
        self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (body := await frames.read_frame_async(reader)) is not None:
                self._last_frame = time.monotonic()
                self._dispatch(frames.from_engine.decode(body))
            await self._fail()
        except (frames.FrameError, msgspec.MsgspecError, ValueError) as error:
            _log.error("connection to the engine: %s", error)
            self._failure = "the engine sent a malformed message"
            await self._fail()
        finally:
            self.ended.set()
            self.settled.set()

    async def _watch(self) -> None:
        """Declares the engine dead when it has work and says nothing for too long."""
        while True:
            await asyncio.sleep(self._watchdog_s / 10)
            silent = time.monotonic() - self._last_frame
            if self._subscriptions and silent > self._watchdog_s:
                self._failure = f"the engine has not answered for {silent:.0f} s"
                self._kill()
                return

    def _dispatch(self, message: frames.FromEngine) -> None:
        match message:
            case frames.Step():
                for output in (*message.columns(), *message.details):
                    self._deliver(output)
                if message.stats is not None:
                    self.on_stats(message.stats)
            case frames.Rejected():
                self._reject(message)
            case frames.Progress():
                self._on_progress(message)
            case frames.EngineInfo():
                self.info, self.state, self.reason = message, "ready", ""
                self.settled.set()
            case frames.Drain():
                _log.info("draining: %s", message.reason)
                self.asks_to_drain.set()
            case frames.Failed():
                self._failure = message.reason

    def _deliver(self, output: EngineOutput) -> None:
        subscription = self._subscriptions.get(output.request_id)
        if subscription is None:
            return  # aborted meanwhile
        if output.finish_reason is not None:
            del self._subscriptions[output.request_id]
        subscription.put(output)

    def _reject(self, message: frames.Rejected) -> None:
        error = Busy(message.message) if message.kind == "queue_full" else None
        for request_id in message.request_ids:
            subscription = self._subscriptions.pop(request_id, None)
            if subscription is not None:
                subscription.fail(error or Refused(message.message, message.kind == "invalid"))

    async def _fail(self) -> None:
        """Everyone who waits hears of it now; the process is reaped and its exit status named in the log."""
        if self.state == "closed":
            return
        started = self.state == "ready"
        self.reason = self._failure or ("the engine has died" if started else "the engine could not start")
        self.state = "failed"
        self.abort_all(EngineDead(self.reason))
        self._kill()
        if self._process is not None:
            status = await asyncio.to_thread(self._process.wait)
            _log.error("%s (engine process %d, exit status %d)", self.reason, self._process.pid, status)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
