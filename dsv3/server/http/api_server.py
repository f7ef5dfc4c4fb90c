"""API server 0, the server's main process: binds the port, starts the engine and the other API servers, serves, drains.

`launch.serve` calls `bind` and `serve`.
"""

import asyncio
import functools
import logging
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dsv3.server.batches.runner import running_batches
from dsv3.server.config import ServerConfig
from dsv3.server.engine.messages import EngineFailure, number_in
from dsv3.server.http import messages
from dsv3.server.http.api_server_processes import ApiServerProcesses
from dsv3.server.http.http_server import HttpServer, raise_open_files_limit
from dsv3.server.http.serving import drain, serving, wait_for_any
from dsv3.server.serving.metrics import NUM_NUMBERS, Metrics, SharedNumbers
from dsv3.server.serving.service import Service, make_client, make_service, start_engines
from dsv3.server.tenants import reload_tenants

if TYPE_CHECKING:
    from dsv3.server.http.registration import Registrar

_TOKEN_COUNTS = ("prompt_tokens", "generation_tokens")
_PREFIX_COUNTS = ("prefix_queries", "prefix_hits")


class Throughput:
    """Makes the log line about throughput from the differences of counters."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._at, self._before = time.monotonic(), self._totals()

    def line(self) -> str | None:
        """Returns the rates since the last call and the current load; None if the server is idle."""
        now, totals = time.monotonic(), self._totals()
        seconds, self._at = max(now - self._at, 1e-9), now
        before, self._before = self._before, totals
        added = {name: value - before[name] for name, value in totals.items()}
        stats = self._metrics.stats
        running, waiting = number_in(stats, "running"), number_in(stats, "waiting")
        if not (running or waiting or any(added[name] for name in _TOKEN_COUNTS)):
            return None
        prompt, generated = (added[name] / seconds for name in _TOKEN_COUNTS)
        queries, hits = (added[name] for name in _PREFIX_COUNTS)
        hit_rate = f", prefix cache hit rate: {hits / queries:.1%}" if queries > 0 else ""
        return (
            f"running: {running:.0f} reqs, waiting: {waiting:.0f} reqs, prompt throughput: {prompt:.1f} tokens/s, "
            f"generation throughput: {generated:.1f} tokens/s, "
            f"KV cache usage: {number_in(stats, 'cache_usage'):.1%}{hit_rate}"
        )

    def _totals(self) -> dict[str, float]:
        counted, stats = self._metrics.counted()[0], self._metrics.stats
        tokens = {name: counted[name] for name in _TOKEN_COUNTS}
        return tokens | {name: number_in(stats, name) for name in _PREFIX_COUNTS}


_log = logging.getLogger("dsv3.server")
_LOG_S = 10.0  # as vLLM
_CLOSE_S = 10.0  # for drained API servers to close their connections


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises OSError if the address is taken. Port 0 selects a free port."""
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
    """Serves until a signal or the engine's failure; returns the exit status: 0 after a signal, 1 after a failure.

    The first SIGTERM or SIGINT drains: new requests are accepted for `shutdown_grace` seconds, then those in flight
    have `shutdown_timeout` seconds to finish before they are aborted. The second aborts them at once. An engine that
    dies is restarted and its requests resume. If that fails, every client gets an error at once, and the process exits
    after `failure_linger_s` (at once if the engine was never ready), so that a process manager can restart it.
    """
    raise_open_files_limit()
    numbers = SharedNumbers(NUM_NUMBERS, config.options.api_server_count)
    registrar = None
    if config.options.register:
        from dsv3.server.http.registration import make_registrar  # only then: it imports an HTTP client

        registrar = make_registrar(config, listener.getsockname()[1])
    engine = make_client(config)
    service = await make_service(config, engine, numbers)
    files = config.options.ssl_certfile, config.options.api_key_file
    signals = _ServerSignals(reloads=any(file is not None for file in files))
    try:
        async with serving(service, config, listener) as server:
            supervisors = await start_engines(config, service)
            api_servers = ApiServerProcesses(config, service.created, listener, numbers, supervisors, engine.fail)
            signals.on_reload = lambda: _reload(config, service, server, api_servers)
            engine.on_dropped = api_servers.drop

            def on_engine_loss(index: int, number: int, reason: str) -> None:
                service.metrics.add("engine_restarts", 1)
                api_servers.broadcast(messages.EngineLost(index, number, reason))

            def on_engine_failure(reason: str) -> None:
                api_servers.end(EngineFailure(reason))
                kill_engines(reason)

            kill_engines, engine.on_failure = engine.on_failure, on_engine_failure
            for i, supervisor in enumerate(supervisors):
                supervisor.on_loss = functools.partial(on_engine_loss, i)
            try:
                return await _serve(config, service, signals, api_servers, registrar, on_ready)
            finally:
                if registrar is not None:
                    await registrar.deregister()
                await api_servers.close()
                await asyncio.gather(*(supervisor.close() for supervisor in supervisors))
    finally:
        signals.close()


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
        await wait_for_any(engine.ended, signals.first, engine.drain_requested)
    announcing.cancel()
    logging_throughput.cancel()
    if signals.first.is_set() or engine.drain_requested.is_set():
        if registrar is not None:
            await registrar.deregister()
        await _drain(config, service, signals, api_servers)
        return 0
    if engine.info is not None:
        await wait_for_any(signals.first, timeout_s=config.failure_linger_s)
    return 1


async def _drain(
    config: ServerConfig, service: Service, signals: "_ServerSignals", api_servers: ApiServerProcesses
) -> None:
    options = config.options
    api_servers.end(messages.DrainApiServer())
    forwarding = asyncio.create_task(_forward_second_signal(signals, api_servers))
    await asyncio.gather(
        drain(service, signals.second, options, config.notify),
        api_servers.wait(options.shutdown_grace + options.shutdown_timeout + _CLOSE_S),
    )
    forwarding.cancel()


async def _forward_second_signal(signals: "_ServerSignals", api_servers: ApiServerProcesses) -> None:
    await signals.second.wait()
    api_servers.end(messages.DrainApiServer(aborts=True))


def _reload(config: ServerConfig, service: Service, server: HttpServer, api_servers: ApiServerProcesses) -> None:
    """Reloads certificate and API keys in all API servers; keeps the old ones if the files are invalid."""
    server.reload()
    if config.options.api_key_file is not None:
        try:
            service.tenants.replace(reload_tenants(config.options, service.tenants.all))
        except ValueError as error:
            _log.error("the old API keys stay in use: %s", error)
        else:
            _log.info("reloaded the API keys")
    api_servers.reload(service.tenants.all)


async def _announce(
    service: Service,
    api_servers: ApiServerProcesses,
    registrar: "Registrar | None",
    on_ready: Callable[[Service], None],
) -> None:
    await service.engine.settled.wait()
    await api_servers.ready()
    if service.engine.state in ("ready", "restarting"):  # it may have died since; routers see in /health when it is up
        if registrar is not None:
            registrar.start()
        on_ready(service)


async def _log_throughput(service: Service) -> None:
    """Logs the throughput of all API servers every `_LOG_S` while they are busy."""
    throughput = Throughput(service.metrics)
    while True:
        await asyncio.sleep(_LOG_S)
        if (line := throughput.line()) is not None:
            _log.info("%s", line)


class _ServerSignals:
    """Handles SIGTERM and SIGINT as the events `first` and `second`, and SIGHUP, if there are files to reload."""

    def __init__(self, reloads: bool) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.on_reload: Callable[[], None] = lambda: None  # until `serve` has read the files
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
