"""The first front from its first line to its exit status: bind, start the engine and the other fronts, serve, drain."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dsv3.server.batches.runner import running_batches
from dsv3.server.config import ServerConfig
from dsv3.server.engine.supervisor import EngineSupervisor
from dsv3.server.http.api_server_processes import ApiServerProcesses
from dsv3.server.http.http_server import HttpServer
from dsv3.server.http.serving import drain, serving, wait_for_any
from dsv3.server.serving.metrics import NUM_NUMBERS, Metrics, SharedNumbers
from dsv3.server.serving.service import Service, make_client, make_service, start_engine
from dsv3.server.tenants import reread

if TYPE_CHECKING:
    from dsv3.server.http.registration import Registrar

_COUNTED = ("prompt_tokens", "generation_tokens")
_LOOKED_UP = ("prefix_queries", "prefix_hits")


class Throughput:
    """What a server does between two questions."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._at, self._before = time.monotonic(), self._totals()

    def line(self) -> str | None:
        """Returns the rates since the last call and the state of the moment; None where nothing has happened."""
        now, totals = time.monotonic(), self._totals()
        seconds, self._at = max(now - self._at, 1e-9), now
        before, self._before = self._before, totals
        grown = {name: value - before[name] for name, value in totals.items()}
        stats = self._metrics.stats
        running, waiting = _number(stats, "running"), _number(stats, "waiting")
        if not (running or waiting or any(grown[name] for name in _COUNTED)):
            return None
        prompt, generated = (grown[name] / seconds for name in _COUNTED)
        queries, hits = (grown[name] for name in _LOOKED_UP)
        hit_rate = f", prefix cache hit rate: {hits / queries:.1%}" if queries > 0 else ""
        return (
            f"running: {running:.0f} reqs, waiting: {waiting:.0f} reqs, prompt throughput: {prompt:.1f} tokens/s, "
            f"generation throughput: {generated:.1f} tokens/s, "
            f"KV cache usage: {_number(stats, 'cache_usage'):.1%}{hit_rate}"
        )

    def _totals(self) -> dict[str, float]:
        counted, stats = self._metrics.counted()[0], self._metrics.stats
        return {name: counted[name] for name in _COUNTED} | {name: _number(stats, name) for name in _LOOKED_UP}


def _number(stats: Mapping[str, object], name: str) -> float:
    value = stats.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


_log = logging.getLogger("dsv3.server")
_LOG_S = 10.0  # vLLM's
_CLOSE_S = 10.0  # a front that has drained closes its connections


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises OSError if the address is taken. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except BaseException:
        listener.close()
        raise
    listener.set_inheritable(False)
    return listener


async def serve(config: ServerConfig, listener: socket.socket, on_ready: Callable[[Service], None]) -> int:
    """Serves until a signal or the engine's end; returns the exit status: 0 after a signal, 1 after a failure.

    The first SIGTERM or SIGINT drains: new requests are taken for `shutdown_grace` seconds, and those in flight then
    have `shutdown_timeout` seconds to finish before they are aborted. The second aborts them at once. An engine that
    dies is started anew, and requests go on. Where that does no good every client hears of it at once, and the process
    ends a few seconds later (at once if the engine had never been ready) for a supervisor to start it anew.
    """
    numbers = SharedNumbers(NUM_NUMBERS, config.options.api_server_count)
    registrar = _registrar(config, listener.getsockname()[1])
    engine = make_client(config)
    service = await make_service(config, engine, numbers)
    files = config.options.ssl_certfile, config.options.api_key_file
    signals = _ServerSignals(reloads=any(file is not None for file in files))
    try:
        async with serving(service, config, listener) as server:
            supervisor = await start_engine(config, service)
            api_servers = ApiServerProcesses(config, service.created, listener, numbers, supervisor, engine.fail)
            signals.on_reload = lambda: _reload(config, service, server, api_servers)
            engine.on_dropped = api_servers.drop
            supervisor.on_loss = lambda number, reason: _pass_on_loss(number, reason, service, api_servers)
            engine.on_failure = lambda reason: _pass_on_failure(reason, supervisor, api_servers)
            try:
                return await _serve(config, service, signals, api_servers, registrar, on_ready)
            finally:
                if registrar is not None:
                    await registrar.leave()
                await api_servers.close()
                await supervisor.close()
    finally:
        signals.close()


def _registrar(config: ServerConfig, port: int) -> "Registrar | None":
    """Returns what registers this server with the routers that the options name, None where they name none."""
    if not config.options.register:
        return None
    from dsv3.server.http.registration import registrar_of  # with an HTTP client: 0.3 s of a start, and 7 MiB

    return registrar_of(config, port)


async def _serve(
    config: ServerConfig,
    service: Service,
    signals: "_ServerSignals",
    api_servers: ApiServerProcesses,
    registrar: "Registrar | None",
    on_ready: Callable[[Service], None],
) -> int:
    engine = service.engine
    announcing = asyncio.create_task(_announce(service, api_servers, registrar, on_ready))
    logging_throughput = asyncio.create_task(_log_throughput(service))
    async with running_batches(service, config.options.batch_dir, config.model_dir):
        await wait_for_any(engine.ended, signals.first, engine.asks_to_drain)
    announcing.cancel()
    logging_throughput.cancel()
    if signals.first.is_set() or engine.asks_to_drain.is_set():
        if registrar is not None:
            await registrar.leave()
        await _drain(config, service, signals, api_servers)
        return 0
    if engine.info is not None:
        await wait_for_any(signals.first, timeout_s=config.failure_linger_s)
    return 1


async def _drain(
    config: ServerConfig, service: Service, signals: "_ServerSignals", api_servers: ApiServerProcesses
) -> None:
    """Drains all fronts together."""
    options = config.options
    api_servers.drain()
    passing_on = asyncio.create_task(_pass_on_second(signals, api_servers))
    await asyncio.gather(
        drain(service, signals.second, options, config.notify),
        api_servers.wait(options.shutdown_grace + options.shutdown_timeout + _CLOSE_S),
    )
    passing_on.cancel()


async def _pass_on_second(signals: "_ServerSignals", api_servers: ApiServerProcesses) -> None:
    await signals.second.wait()
    api_servers.abort()


def _pass_on_loss(number: int, reason: str, service: Service, api_servers: ApiServerProcesses) -> None:
    service.metrics.add("engine_restarts", 1)
    api_servers.lose(number, reason)


def _pass_on_failure(reason: str, supervisor: EngineSupervisor, api_servers: ApiServerProcesses) -> None:
    api_servers.fail(reason)
    supervisor.kill()


def _reload(config: ServerConfig, service: Service, server: HttpServer, api_servers: ApiServerProcesses) -> None:
    """Has all fronts use the files as they are now, or go on with what they have where those are bad."""
    server.reload()
    if config.options.api_key_file is not None:
        try:
            service.tenants.replace(reread(config.options, service.tenants.all))
        except ValueError as error:
            _log.error("the old API keys stay: %s", error)
        else:
            _log.info("the API keys have been read anew")
    api_servers.reload(service.tenants.all)


async def _announce(
    service: Service,
    api_servers: ApiServerProcesses,
    registrar: "Registrar | None",
    on_ready: Callable[[Service], None],
) -> None:
    await service.engine.settled.wait()
    await api_servers.ready()
    if service.engine.state == "ready":
        if registrar is not None:
            registrar.start()
        on_ready(service)


async def _log_throughput(service: Service) -> None:
    """Logs what all fronts do, from time to time, while they do something."""
    throughput = Throughput(service.metrics)
    while True:
        await asyncio.sleep(_LOG_S)
        if (line := throughput.line()) is not None:
            _log.info("%s", line)


class _ServerSignals:
    """SIGTERM and SIGINT as events on the running loop; SIGHUP, where there is something to reload, as a call."""

    def __init__(self, reloads: bool) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.on_reload: Callable[[], None] = lambda: None  # the files are yet to be read
        self._loop = asyncio.get_running_loop()
        self._handlers = {signal.SIGTERM: self._received, signal.SIGINT: self._received}
        if reloads:
            self._handlers[signal.SIGHUP] = lambda: self.on_reload()
        for number, handler in self._handlers.items():
            self._loop.add_signal_handler(number, handler)

    def _received(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def close(self) -> None:
        for number in self._handlers:
            self._loop.remove_signal_handler(number)
