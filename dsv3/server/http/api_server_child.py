"""Main of API servers 1 and up: `python -m dsv3.server.http.api_server_child LISTENER NUMBERS` (descriptors).

API server 0 starts and controls it through its link; it exits at once when the link closes.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvloop

from dsv3.processes import frames
from dsv3.processes.child import link_to_parent
from dsv3.server.config import FAILURE_LINGER_S, ServerConfig
from dsv3.server.engine.client import EngineClient
from dsv3.server.engine.messages import Connect, EngineFailure
from dsv3.server.http import messages
from dsv3.server.http.http_server import HttpServer
from dsv3.server.http.serving import drain, serving, wait_for_any
from dsv3.server.serving.metrics import NUM_NUMBERS, SharedNumbers
from dsv3.server.serving.service import Service, make_client, make_service

_log = logging.getLogger("dsv3.server")


def main(listener: int, numbers: int) -> int:
    """Serves until API server 0 sends `DrainApiServer`; returns the exit status."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # API server 0 handles signals for all
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    link = link_to_parent()
    if (body := frames.receive_frame(link)) is None:
        return 1
    start = messages.to_api_server.decode(body)
    assert isinstance(start, messages.StartApiServer)
    return uvloop.run(_run(start, link, socket.socket(fileno=listener), numbers))


async def _run(start: messages.StartApiServer, link: socket.socket, listener: socket.socket, descriptor: int) -> int:
    numbers = SharedNumbers(NUM_NUMBERS, start.options.api_server_count, start.api_server, descriptor)
    config = make_config(start)
    engine = make_client(config, start.sender)
    service = await make_service(config, engine, numbers, start.created)
    api_server = _ApiServer(service, start.sender)
    await api_server.listen(link)
    await wait_for_any(engine.settled, api_server.drain)  # until then other API servers accept the connections
    async with serving(service, config, listener) as server:
        api_server.on_serving(server)
        await wait_for_any(api_server.drain, engine.ended)
        if engine.ended.is_set():
            # The engine has failed, or only this connection to it: then API server 0 replaces this process.
            await wait_for_any(api_server.engine_failed, api_server.drain, timeout_s=FAILURE_LINGER_S)
            if api_server.engine_failed.is_set():
                await api_server.drain.wait()
            return 1
        await drain(service, api_server.abort, start.options, _log.info)
        engine.close()
        return 0


def make_config(start: messages.StartApiServer) -> ServerConfig:
    """Returns the configuration of the server, as far as an API server needs it."""
    return ServerConfig(
        model_dir=Path(start.model_dir),
        model_names=start.model_names,
        tenants=start.tenants,
        options=start.options,
        engine=start.engine,
        cluster=start.cluster,
        watchdog_s=start.watchdog_s,
        template_deadline_s=start.template_deadline_s,
        deadlines=start.deadlines,
        notify=lambda line: None,  # API server 0 prints these lines
    )


class _ApiServer:
    """Handles the messages of API server 0 from `listen` on, and connects to each engine that it announces."""

    def __init__(self, service: Service, sender: int) -> None:
        self.drain, self.abort, self.engine_failed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._service = service
        self._server: HttpServer | None = None
        self._engines = [
            _EngineConnection(i, each, sender, self._send) for i, each in enumerate(service.engine.members)
        ]
        self._transport: asyncio.WriteTransport

    async def listen(self, link: socket.socket) -> None:
        """Starts to handle messages and sends `ApiServerStarted`; exits the process when the link closes."""
        self._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: frames.FrameProtocol(self._on_message, lambda _: os._exit(1)), sock=link
        )
        self._send(messages.ApiServerStarted())

    def on_serving(self, server: HttpServer) -> None:
        self._server = server
        self._send(messages.ApiServerReady())

    def _send(self, message: messages.FromApiServer) -> None:
        self._transport.write(frames.encode(message))

    def _on_message(self, body: memoryview) -> None:
        match messages.to_api_server.decode(body):
            case messages.DrainApiServer(aborts):
                self.drain.set()
                if aborts:
                    self.abort.set()
            case messages.ReloadApiServer(tenants):
                self._service.tenants.replace(tenants)
                if self._server is not None:
                    self._server.reload()
            case messages.EngineStarted(index, number, address):
                self._engines[index].connect(number, address)
            case messages.EngineLost(index, number, reason):
                self._engines[index].on_lost(number, reason)
            case EngineFailure(reason):
                self.engine_failed.set()
                self._service.engine.fail(reason)


class _EngineConnection:
    """The connection to one engine, whose processes follow each other; `index` tells independent engines apart.

    If it ends and API server 0 reports nothing, the client fails, and without another engine this process is replaced.
    """

    def __init__(
        self, index: int, client: EngineClient, sender: int, send: Callable[[messages.FromApiServer], None]
    ) -> None:
        self._index, self._engine, self._sender, self._send = index, client, sender, send
        self._number = -1
        self._reconnect_timeout: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None] | None = None
        client.on_loss, client.on_silence = self._on_loss, self._on_silence

    def on_lost(self, number: int, reason: str) -> None:
        """Suspends the client: API server 0 restarts the engine `number`."""
        if number == self._number:
            self._cancel_reconnect_timeout()
            self._engine.suspend(reason)

    def connect(self, number: int, address: str) -> None:
        """Connects to the process `number` at a Unix socket."""
        self._cancel_reconnect_timeout()
        if self._engine.state == "ready":
            self._engine.suspend("the engine has died")
        self._number = number
        self._connecting = asyncio.create_task(self._engine.connect(address, Connect(self._sender)))

    def _on_silence(self, reason: str) -> None:
        self._send(messages.EngineLost(self._index, self._number, reason))
        self._on_loss(reason)

    def _on_loss(self, reason: str) -> None:
        self._cancel_reconnect_timeout()
        if not self._engine.max_restarts:
            self._engine.fail(reason)
            return
        self._engine.suspend(reason)
        self._reconnect_timeout = asyncio.get_running_loop().call_later(FAILURE_LINGER_S, self._engine.fail, reason)

    def _cancel_reconnect_timeout(self) -> None:
        """Cancels the timeout: API server 0 has reported the state of the engine."""
        if self._reconnect_timeout is not None:
            self._reconnect_timeout.cancel()
            self._reconnect_timeout = None


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
