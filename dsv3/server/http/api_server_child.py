"""An API server that API server 0 starts: `python -m dsv3.server.http.api_server_child LISTENER NUMBERS`, descriptors.

It does what the first front says through its link, and ends at once when the first front has gone.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import uvloop

from dsv3.processes import frames
from dsv3.processes.child import link_to_parent
from dsv3.server.config import FAILURE_LINGER_S, ServerConfig
from dsv3.server.engine.client import EngineClient
from dsv3.server.engine.messages import Connect
from dsv3.server.http import messages
from dsv3.server.http.http_server import HttpServer
from dsv3.server.http.serving import drain, serving, wait_for_any
from dsv3.server.serving.metrics import NUM_NUMBERS, SharedNumbers
from dsv3.server.serving.service import Service, make_service

_log = logging.getLogger("dsv3.server")


def main(listener: int, numbers: int) -> int:
    """Serves until the first front has it end; returns the exit status."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # the first front has all fronts drain, or reload
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    link = link_to_parent()
    if (body := frames.receive_frame(link)) is None:
        return 1
    start = messages.to_api_server.decode(body)
    assert isinstance(start, messages.StartApiServer)
    return uvloop.run(_run(start, link, socket.socket(fileno=listener), numbers))


async def _run(start: messages.StartApiServer, link: socket.socket, listener: socket.socket, descriptor: int) -> int:
    numbers = SharedNumbers(NUM_NUMBERS, start.options.api_server_count, start.api_server, descriptor)
    config = ServerConfig(
        model_dir=Path(start.model_dir),
        model_names=start.model_names,
        tenants=start.tenants,
        options=start.options,
        engine=start.engine,
        template_deadline_s=start.template_deadline_s,
        deadlines=start.deadlines,
        notify=lambda line: None,  # the first front has said it
    )
    engine = EngineClient(
        max_num_queued_reqs=start.engine.max_num_queued_reqs,
        watchdog_s=start.watchdog_s,
        max_restarts=start.options.max_request_restarts,
    )
    service = await make_service(config, engine, numbers, start.created)
    async with serving(service, config, listener) as server:
        api_server = _ApiServer(service, server, start.sender)
        await api_server.listen(link)
        await wait_for_any(api_server.drain, engine.ended)
        if engine.ended.is_set():
            # Everybody's engine has failed, or only this front's connection: then another front takes this one's place.
            await wait_for_any(api_server.engine_failed, api_server.drain, timeout_s=FAILURE_LINGER_S)
            if api_server.engine_failed.is_set():
                await api_server.drain.wait()
            return 1
        await drain(service, api_server.abort, start.options, _log.info)
        engine.close()
        return 0


class _ApiServer:
    """Does what the first front says, whose messages wait until `listen`, and connects to one engine after the other.

    A connection that ends without a word of the first front is this front's alone: then another front takes its place.
    """

    def __init__(self, service: Service, server: HttpServer, sender: int) -> None:
        self.drain, self.abort, self.engine_failed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._service, self._server, self._engine = service, server, service.engine
        self._sender, self._number = sender, -1
        self._patience: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._transport: asyncio.WriteTransport
        self._engine.on_loss, self._engine.on_silence = self._lose, self._note_silence

    async def listen(self, link: socket.socket) -> None:
        """Begins to take messages, and says that this front answers; ends the process when the first front has gone."""
        self._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: frames.FrameProtocol(self._take, lambda _: os._exit(1)), sock=link
        )
        self._tell(messages.ApiServerReady())

    def _tell(self, message: messages.FromApiServer) -> None:
        self._transport.write(frames.encode(message))

    def _take(self, body: memoryview) -> None:
        match messages.to_api_server.decode(body):
            case messages.DrainApiServer():
                self.drain.set()
            case messages.AbortApiServer():
                self.drain.set()
                self.abort.set()
            case messages.ReloadApiServer(tenants):
                self._service.tenants.replace(tenants)
                self._server.reload()
            case messages.EngineStarted(number, address):
                self._connect(number, address)
            case messages.EngineLost(number, reason):
                if number == self._number:
                    self._be_patient()
                    self._engine.lose(reason)
            case messages.EngineFailed(reason):
                self.engine_failed.set()
                self._engine.fail(reason)

    def _connect(self, number: int, address: str) -> None:
        self._be_patient()
        if self._engine.state == "ready":
            self._engine.lose("the engine has died")
        self._number = number
        self._connecting = asyncio.create_task(self._engine.connect(address, Connect(self._sender)))

    def _note_silence(self, reason: str) -> None:
        self._tell(messages.EngineSilent(self._number, reason))
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._be_patient()
        if not self._engine.max_restarts:
            self._engine.fail(reason)
            return
        self._engine.lose(reason)
        self._patience = asyncio.get_running_loop().call_later(FAILURE_LINGER_S, self._engine.fail, reason)

    def _be_patient(self) -> None:
        """Waits for what comes: the first front has said something."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
