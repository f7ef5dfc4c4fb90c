"""Starts and controls API servers 1 and up from API server 0, and replaces those that die.

All inherit one listening socket, so any running process accepts the next connection. With SO_REUSEPORT and a socket per
process the kernel would also assign connections to a process that hangs, and drop those queued for one that ends.
"""

import asyncio
import functools
import itertools
import logging
import socket
from collections.abc import Callable, Sequence

import msgspec

from dsv3.processes import frames
from dsv3.processes.child import LinkedChild
from dsv3.server.config import ServerConfig
from dsv3.server.engine.messages import FIRST_SENDER, ApiServerDropped
from dsv3.server.engine.supervisor import EngineSupervisor
from dsv3.server.http import messages
from dsv3.server.serving.metrics import SharedNumbers
from dsv3.server.tenants import Tenant

_RESTART_S = 1.0
_END_S = 10.0  # closing its connections takes a process a few seconds
_senders = itertools.count(FIRST_SENDER + 1)
_log = logging.getLogger("dsv3.server")


class ApiServerProcesses:
    """API servers 1 to `api_server_count` - 1.

    `created` is the instance's start time, which all of them report. `on_failure` is called with a reason when an API
    server cannot be started.
    """

    def __init__(
        self,
        config: ServerConfig,
        created: int,
        listener: socket.socket,
        numbers: SharedNumbers,
        engines: Sequence[EngineSupervisor],
        on_failure: Callable[[str], None],
    ):
        self._api_servers = [
            _ApiServerProcess(start_message(config, number, created), listener, numbers, engines, on_failure)
            for number in range(1, config.options.api_server_count)
        ]
        self._running = [asyncio.create_task(api_server.run()) for api_server in self._api_servers]
        for i, engine in enumerate(engines):
            engine.on_start = functools.partial(self._on_engine_start, i)

    async def ready(self) -> None:
        for api_server in self._api_servers:
            await api_server.is_ready.wait()

    def broadcast(self, message: messages.ToApiServer) -> None:
        """Sends a message to every API server that runs."""
        for api_server in self._api_servers:
            api_server.send(message)

    def end(self, message: messages.ToApiServer) -> None:
        """Sends every API server a message after which it ends, or this process does; it is not replaced."""
        for api_server in self._api_servers:
            api_server.end(message)

    def reload(self, tenants: tuple[Tenant, ...]) -> None:
        """Makes every API server reload the certificate and replace its tenants."""
        for api_server in self._api_servers:
            api_server.reload(tenants)

    def drop(self, dropped: ApiServerDropped) -> None:
        """Kills an API server that the engine has disconnected; a new one replaces it."""
        for api_server in self._api_servers:
            if api_server.sender == dropped.sender:
                _log.error("API server %d: %s", api_server.number, dropped.reason)
                api_server.kill()

    async def wait(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` seconds until all have ended."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    async def close(self) -> None:
        """Ends all API servers, and kills them after `_END_S`."""
        for api_server in self._api_servers:
            api_server.disconnect()
        await self.wait(_END_S)
        for api_server in self._api_servers:
            api_server.kill()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _on_engine_start(self, index: int, number: int, address: str) -> None:
        self.broadcast(messages.EngineStarted(index, number, address))


class _ApiServerProcess:
    """One API server's process, replaced when it dies, until `end` or `disconnect`."""

    def __init__(
        self,
        start: messages.StartApiServer,
        listener: socket.socket,
        numbers: SharedNumbers,
        engines: Sequence[EngineSupervisor],
        on_failure: Callable[[str], None],
    ):
        self.number = start.api_server
        self.sender = -1
        self.is_ready = asyncio.Event()
        self._has_started = False
        self._start, self._listener, self._numbers = start, listener, numbers
        self._engines, self._on_failure = engines, on_failure
        self._process: LinkedChild | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._end_messages: list[messages.ToApiServer] = []

    async def run(self) -> None:
        """Runs one process after the other until `end` or `disconnect`."""
        while not self._end_messages:
            self._has_started = False
            try:
                status = await self._run_once()
            except OSError as error:
                self._on_failure(f"API server {self.number} could not start ({error.strerror})")
                return
            if self._end_messages:
                return
            _log.error("API server %d has ended with exit status %s", self.number, status)
            if not self._has_started:
                self._on_failure(f"API server {self.number} could not start (exit status {status})")
                return
            await asyncio.sleep(_RESTART_S)

    def end(self, message: messages.ToApiServer) -> None:
        """Sends a message that ends the process, and does not replace it."""
        self._end_messages.append(message)
        self.send(message)

    def reload(self, tenants: tuple[Tenant, ...]) -> None:
        """Replaces the tenants in the process and in those that replace it."""
        self._start = msgspec.structs.replace(self._start, tenants=tenants)
        self.send(messages.ReloadApiServer(tenants))

    def disconnect(self) -> None:
        """Closes the link, on which the process exits at once."""
        self._end_messages.append(messages.DrainApiServer(aborts=True))
        if self._transport is not None:
            self._transport.close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def _run_once(self) -> int | None:
        """Starts a process and handles its messages until it ends; returns its exit status."""
        inherited = [self._listener.fileno(), self._numbers.descriptor]
        self._process = LinkedChild("dsv3.server.http.api_server_child", *inherited, inherited=inherited)
        ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: frames.FrameProtocol(self._on_message, ended.set_result), sock=self._process.link
        )
        self.sender = next(_senders)
        self.send(msgspec.structs.replace(self._start, sender=self.sender))
        for i, engine in enumerate(self._engines):
            if (address := engine.address) is not None:
                self.send(messages.EngineStarted(i, engine.number, address))
        for message in self._end_messages:
            self.send(message)
        if (error := await ended) is not None:
            _log.error("API server %d: %s", self.number, error)
        return await asyncio.to_thread(self._process.end, _END_S)

    def _on_message(self, body: memoryview) -> None:
        match messages.from_api_server.decode(body):
            case messages.ApiServerStarted():
                self._has_started = True
            case messages.ApiServerReady():
                self.is_ready.set()
            case messages.EngineLost(index, number, reason):
                self._engines[index].engine_lost(number, reason)

    def send(self, message: messages.ToApiServer) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.encode(message))


def start_message(config: ServerConfig, api_server: int, created: int) -> messages.StartApiServer:
    """Returns the first message to an API server (`api_server_child.make_config` reads it), still without `sender`."""
    return messages.StartApiServer(
        api_server=api_server,
        sender=-1,
        created=created,
        model_dir=str(config.model_dir),
        model_names=config.model_names,
        tenants=config.tenants,
        options=config.options,
        engine=config.engine,
        cluster=config.cluster,
        watchdog_s=config.watchdog_s,
        template_deadline_s=config.template_deadline_s,
        deadlines=config.deadlines,
    )
