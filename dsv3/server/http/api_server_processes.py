"""The other fronts, as the first one runs them: starts them, passes on what all must do, replaces one that dies.

They inherit the first front's listener, all the same one. So a connection is accepted by a front that runs, whatever
has become of the others; with SO_REUSEPORT and a socket each, the system would give every front its share of the
connections, to one that hangs too, and lose those that wait for one that ends.
"""

import asyncio
import dataclasses
import itertools
import logging
import socket
from collections.abc import Callable

import msgspec

from dsv3.processes import frames
from dsv3.processes.child import LinkedChild
from dsv3.server.config import ServerConfig
from dsv3.server.engine.messages import FIRST_SENDER, Dropped
from dsv3.server.engine.supervisor import EngineSupervisor
from dsv3.server.http import messages
from dsv3.server.serving.metrics import SharedNumbers
from dsv3.server.tenants import Tenant

_RESTART_S = 1.0
_END_S = 10.0  # closing connections takes a front a few seconds
_senders = itertools.count(FIRST_SENDER + 1)
_log = logging.getLogger("dsv3.server")


class ApiServerProcesses:
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
        engine: EngineSupervisor,
        on_failure: Callable[[str], None],
    ):
        self._api_servers = [
            _ApiServerProcess(_start_message(config, number, created), listener, numbers, engine, on_failure)
            for number in range(1, config.options.api_server_count)
        ]
        self._running = [asyncio.create_task(api_server.run()) for api_server in self._api_servers]
        engine.on_start = lambda number, address: self._tell(messages.EngineStarted(number, address))

    async def ready(self) -> None:
        """Waits until every front answers HTTP."""
        for api_server in self._api_servers:
            await api_server.is_ready.wait()

    def drain(self) -> None:
        """Has every front finish what it does, and end."""
        self._end(messages.DrainApiServer())

    def abort(self) -> None:
        """Has every front abort what it does, and end."""
        self._end(messages.AbortApiServer())

    def reload(self, tenants: tuple[Tenant, ...]) -> None:
        """Has every front read the certificate anew, and let these tenants in."""
        for api_server in self._api_servers:
            api_server.reload(tenants)

    def fail(self, reason: str) -> None:
        """Tells every front that the engine has failed; they end with this process."""
        self._end(messages.EngineFailed(reason))

    def lose(self, number: int, reason: str) -> None:
        """Tells every front that the engine with that number has died and another one follows."""
        self._tell(messages.EngineLost(number, reason))

    def drop(self, dropped: Dropped) -> None:
        """Ends a front that the engine has given up; a new one takes its place."""
        for api_server in self._api_servers:
            if api_server.sender == dropped.sender:
                _log.error("front %d: %s", api_server.number, dropped.reason)
                api_server.kill()

    async def wait(self, timeout_s: float) -> None:
        """Waits until all have ended, for at most `timeout_s` seconds."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    async def close(self) -> None:
        """Ends them, by force if they do not end by themselves."""
        for api_server in self._api_servers:
            api_server.hang_up()
        await self.wait(_END_S)
        for api_server in self._api_servers:
            api_server.kill()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _tell(self, message: messages.ToApiServer) -> None:
        for api_server in self._api_servers:
            api_server.send(message)

    def _end(self, message: messages.ToApiServer) -> None:
        for api_server in self._api_servers:
            api_server.end(message)


class _ApiServerProcess:
    """One front's process, replaced when it dies until it is told to end."""

    def __init__(
        self,
        start: messages.StartApiServer,
        listener: socket.socket,
        numbers: SharedNumbers,
        engine: EngineSupervisor,
        on_failure: Callable[[str], None],
    ):
        self.number = start.api_server
        self.sender = -1
        self.is_ready = asyncio.Event()
        self._start, self._listener, self._numbers = start, listener, numbers
        self._engine, self._on_failure = engine, on_failure
        self._process: LinkedChild | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._last_words: list[messages.ToApiServer] = []

    async def run(self) -> None:
        """Keeps a process running until it is told to end."""
        while not self._last_words:
            self.is_ready.clear()
            try:
                status = await self._live()
            except OSError as error:
                self._on_failure(f"an HTTP process could not start ({error.strerror})")
                return
            if self._last_words:
                return
            _log.error("front %d has ended with status %s", self.number, status)
            if not self.is_ready.is_set():
                self._on_failure(f"an HTTP process could not start (exit status {status})")
                return
            await asyncio.sleep(_RESTART_S)

    def end(self, message: messages.ToApiServer) -> None:
        """Tells the process to end, and starts no other one."""
        self._last_words.append(message)
        self.send(message)

    def reload(self, tenants: tuple[Tenant, ...]) -> None:
        """Tells the process, and whichever takes its place, who is let in."""
        self._start = msgspec.structs.replace(self._start, tenants=tenants)
        self.send(messages.ReloadApiServer(tenants))

    def hang_up(self) -> None:
        """Has the process end at once."""
        self._last_words.append(messages.AbortApiServer())
        if self._transport is not None:
            self._transport.close()

    def kill(self) -> None:
        """Ends the process by force."""
        if self._process is not None:
            self._process.kill()

    async def _live(self) -> int | None:
        """Starts a process and takes its messages until it ends; returns its exit status."""
        inherited = [self._listener.fileno(), self._numbers.descriptor]
        self._process = LinkedChild("dsv3.server.http.api_server_child", *inherited, inherited=inherited)
        ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: frames.FrameProtocol(self._take, ended.set_result), sock=self._process.link
        )
        self.sender = next(_senders)
        self.send(msgspec.structs.replace(self._start, sender=self.sender))
        if (address := self._engine.address) is not None:
            self.send(messages.EngineStarted(self._engine.number, address))
        for message in self._last_words:
            self.send(message)
        if (error := await ended) is not None:
            _log.error("front %d: %s", self.number, error)
        return await asyncio.to_thread(self._process.end, _END_S)

    def _take(self, body: memoryview) -> None:
        match messages.from_api_server.decode(body):
            case messages.ApiServerReady():
                self.is_ready.set()
            case messages.EngineSilent(number, reason):
                self._engine.lose(number, reason)

    def send(self, message: messages.ToApiServer) -> None:
        """Tells the process, if there is one."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.encode(message))


def _start_message(config: ServerConfig, api_server: int, created: int) -> messages.StartApiServer:
    return messages.StartApiServer(
        api_server=api_server,
        sender=-1,
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
