"""A front that another one has started: `python -m dsv3.server.http.front LISTENER FERRY NUMBERS`, three descriptors.

It does what the first front says on its standard input, and ends at once when the first front has gone.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from dsv3.processes import frames
from dsv3.server.answers.metrics import NUM_NUMBERS, SharedNumbers
from dsv3.server.answers.service import Service, make_service
from dsv3.server.config import FAILURE_LINGER_S, ServerConfig
from dsv3.server.engine.client import EngineClient
from dsv3.server.engine.ferry import Ferry
from dsv3.server.http import messages
from dsv3.server.http.listening import HttpServer
from dsv3.server.http.serving import drain, serving, wait_for_any
from dsv3.server.tenants import Tenant

_log = logging.getLogger("dsv3.server")


def main(listener: int, ferry: int, numbers: int) -> int:
    """Serves until the first front has it end; returns the exit status."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # the first front has all fronts drain, or reload
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    return uvloop.run(_run(socket.socket(fileno=listener), socket.socket(fileno=ferry), numbers))


class _Orders:
    """What the first front says, as events. The process ends when the first front has gone."""

    def __init__(self) -> None:
        self.drain, self.abort = asyncio.Event(), asyncio.Event()
        self.on_failure: Callable[[str], None] = lambda _: None
        self.on_loss: Callable[[int, str], None] = lambda number, reason: None
        self.on_reload: Callable[[tuple[Tenant, ...]], None] = lambda _: None
        self.engine_failed = asyncio.Event()
        self.start: asyncio.Future[messages.FrontStart] = asyncio.get_running_loop().create_future()

    async def listen(self) -> None:
        """Begins to take messages."""
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: frames.FrameProtocol(self._take, lambda _: os._exit(1)), sys.stdin.buffer
        )

    def _take(self, body: memoryview) -> None:
        match messages.to_front.decode(body):
            case messages.FrontStart() as start:
                self.start.set_result(start)
            case messages.FrontDrain():
                self.drain.set()
            case messages.FrontAbort():
                self.drain.set()
                self.abort.set()
            case messages.FrontReload(tenants):
                self.on_reload(tenants)
            case messages.EngineLost(number, reason):
                self.on_loss(number, reason)
            case messages.EngineFailed(reason):
                self.engine_failed.set()
                self.on_failure(reason)


async def _run(listener: socket.socket, ferry: socket.socket, descriptor: int) -> int:
    orders = _Orders()
    await orders.listen()
    start = await orders.start
    numbers = SharedNumbers(NUM_NUMBERS, start.options.api_server_count, start.front, descriptor)
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
    orders.on_failure = engine.fail
    service = await make_service(config, engine, numbers, start.created)
    async with serving(service, config, listener) as server:
        orders.on_reload = lambda tenants: _reload(service, server, tenants)
        _Link(engine, orders, ferry)
        _tell(messages.FrontReady())
        await wait_for_any(orders.drain, engine.ended)
        if engine.ended.is_set():
            # Everybody's engine has failed, or only this front's connection: then another front takes this one's place.
            await wait_for_any(orders.engine_failed, orders.drain, timeout_s=FAILURE_LINGER_S)
            if orders.engine_failed.is_set():
                await orders.drain.wait()
            return 1
        await drain(service, orders.abort, start.options, _log.info)
        engine.close()
        return 0


class _Link:
    """This front's connection to the engine of the moment, as the first front gives it one after the other.

    A connection that ends without a word of the first front is this front's alone: then another front takes its place.
    """

    def __init__(self, engine: EngineClient, orders: _Orders, ferry: socket.socket):
        self._engine, self._number = engine, -1
        self._patience: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._ferry = Ferry(ferry, self._connect)
        orders.on_loss = self._note_loss
        engine.on_loss, engine.on_silence = self._lose, self._note_silence

    def _connect(self, number: int, connection: socket.socket) -> None:
        self._be_patient()
        if self._engine.state == "ready":
            self._engine.lose("the engine has died")
        self._number = number
        self._connecting = asyncio.create_task(self._engine.connect(connection))

    def _note_loss(self, number: int, reason: str) -> None:
        if number == self._number:
            self._be_patient()
            self._engine.lose(reason)

    def _note_silence(self, reason: str) -> None:
        _tell(messages.EngineSilent(self._number, reason))
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


def _reload(service: Service, server: HttpServer, tenants: tuple[Tenant, ...]) -> None:
    service.tenants.replace(tenants)
    server.reload()


def _tell(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(frames.encode(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
