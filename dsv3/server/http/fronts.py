"""The other fronts, as the first one runs them: starts them, passes on what all must do, replaces one that dies.

They inherit the first front's listener, all the same one. So a connection is accepted by a front that runs, whatever
has become of the others; with SO_REUSEPORT and a socket each, the system would give every front its share of the
connections, to one that hangs too, and lose those that wait for one that ends.
"""

import asyncio
import dataclasses
import functools
import logging
import socket
import sys
from collections.abc import Callable

import msgspec

from dsv3.processes import frames
from dsv3.server.answers.metrics import SharedNumbers
from dsv3.server.config import ServerConfig
from dsv3.server.engine.ferry import hand_over
from dsv3.server.engine.keeper import EngineKeeper
from dsv3.server.engine.messages import Dropped
from dsv3.server.http import messages
from dsv3.server.tenants import Tenant

_RESTART_S = 1.0
_END_S = 10.0  # closing connections takes a front a few seconds
_log = logging.getLogger("dsv3.server")


class OtherFronts:
    """All fronts of an instance but the first; there are none where `api_server_count` is 1.

    `created` is the time of the instance's start that all fronts tell. `on_failure` is called with a reason when the
    instance cannot go on.
    """

    def __init__(
        self,
        config: ServerConfig,
        created: int,
        listener: socket.socket,
        numbers: SharedNumbers,
        engine: EngineKeeper,
        on_failure: Callable[[str], None],
    ):
        self._fronts = [
            _OtherFront(_start_message(config, number, created), listener, numbers, engine, on_failure)
            for number in range(1, config.options.api_server_count)
        ]
        self._running = [asyncio.create_task(front.run()) for front in self._fronts]

    async def ready(self) -> None:
        """Waits until every front answers HTTP."""
        for front in self._fronts:
            await front.is_ready.wait()

    def drain(self) -> None:
        """Has every front finish what it does, and end."""
        self._end(messages.FrontDrain())

    def abort(self) -> None:
        """Has every front abort what it does, and end."""
        self._end(messages.FrontAbort())

    def reload(self, tenants: tuple[Tenant, ...]) -> None:
        """Has every front read the certificate anew, and let these tenants in."""
        for front in self._fronts:
            front.reload(tenants)

    def fail(self, reason: str) -> None:
        """Tells every front that the engine has failed; they end with this process."""
        self._end(messages.EngineFailed(reason))

    def lose(self, number: int, reason: str) -> None:
        """Tells every front that the engine with that number has died and another one follows."""
        for front in self._fronts:
            front.send(messages.EngineLost(number, reason))

    def drop(self, dropped: Dropped) -> None:
        """Ends a front that the engine has given up; a new one takes its place."""
        for front in self._fronts:
            if front.sender == dropped.sender:
                _log.error("front %d: %s", front.number, dropped.reason)
                front.kill()

    async def wait(self, timeout_s: float) -> None:
        """Waits until all have ended, for at most `timeout_s` seconds."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    async def close(self) -> None:
        """Ends them, by force if they do not end by themselves."""
        for front in self._fronts:
            front.hang_up()
        await self.wait(_END_S)
        for front in self._fronts:
            front.kill()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _end(self, message: messages.ToFront) -> None:
        for front in self._fronts:
            front.end(message)


class _OtherFront:
    """One front's process, replaced when it dies until it is told to end."""

    def __init__(
        self,
        start: messages.FrontStart,
        listener: socket.socket,
        numbers: SharedNumbers,
        engine: EngineKeeper,
        on_failure: Callable[[str], None],
    ):
        self.number = start.front
        self.sender = -1
        self.is_ready = asyncio.Event()
        self._start, self._listener, self._numbers = start, listener, numbers
        self._engine, self._on_failure = engine, on_failure
        self._process: asyncio.subprocess.Process | None = None
        self._ferry: socket.socket | None = None
        self._last_words: list[messages.ToFront] = []

    async def run(self) -> None:
        """Keeps a process running until it is told to end."""
        while not self._last_words:
            self.is_ready.clear()
            try:
                self._process = await self._launch()
            except OSError as error:
                self._on_failure(f"an HTTP process could not start ({error.strerror})")
                return
            status = await self._listen(self._process)
            self._part()
            if self._last_words:
                return
            _log.error("front %d has ended with status %d", self.number, status)
            if not self.is_ready.is_set():
                self._on_failure(f"an HTTP process could not start (exit status {status})")
                return
            await asyncio.sleep(_RESTART_S)

    def end(self, message: messages.ToFront) -> None:
        """Tells the process to end, and starts no other one."""
        self._last_words.append(message)
        self.send(message)

    def reload(self, tenants: tuple[Tenant, ...]) -> None:
        """Tells the process, and whichever takes its place, who is let in."""
        self._start = msgspec.structs.replace(self._start, tenants=tenants)
        self.send(messages.FrontReload(tenants))

    def hang_up(self) -> None:
        """Has the process end at once."""
        self._last_words.append(messages.FrontAbort())
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """Ends the process by force."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _launch(self) -> asyncio.subprocess.Process:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            inherited = [self._listener.fileno(), theirs.fileno(), self._numbers.descriptor]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dsv3.server.http.front",
                *map(str, inherited),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=inherited,
                start_new_session=True,  # a terminal's ^C is the first front's to handle
            )
        self._ferry, self.sender = ours, self._engine.join(functools.partial(hand_over, ours))
        assert process.stdin is not None
        for message in (self._start, *self._last_words):
            process.stdin.write(frames.encode(message))
        return process

    def _part(self) -> None:
        """Lets go of what belonged to a process that has ended."""
        self._engine.leave(self.sender)
        if self._ferry is not None:
            self._ferry.close()

    async def _listen(self, process: asyncio.subprocess.Process) -> int:
        """Takes the process's messages until it ends; returns its exit status."""
        assert process.stdout is not None
        while (body := await frames.read_frame_async(process.stdout)) is not None:
            match messages.from_front.decode(body):
                case messages.FrontReady():
                    self.is_ready.set()
                case messages.EngineSilent(number, reason):
                    self._engine.lose(number, reason)
        return await process.wait()

    def send(self, message: messages.ToFront) -> None:
        """Tells the process, if there is one."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(frames.encode(message))


def _start_message(config: ServerConfig, front: int, created: int) -> messages.FrontStart:
    return messages.FrontStart(
        front=front,
        created=created,
        model_dir=str(config.model_dir),
        model_names=config.model_names,
        tenants=config.tenants,
        options=dataclasses.replace(config.options, max_request_restarts=config.max_restarts),
        engine=config.engine,
        watchdog_s=config.watchdog_s,
        template_deadline_s=config.template_deadline_s,
        deadlines=config.deadlines,
    )
