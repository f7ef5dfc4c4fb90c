"""The HTTP process from its first line to its exit status: bind, start the engine, serve, drain, stop."""

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
from collections.abc import Callable, Generator
from pathlib import Path

import uvicorn

from dsv3.api import frames
from dsv3.api.app import make_app
from dsv3.api.defaults import sampling_defaults
from dsv3.api.engine_client import WATCHDOG_S, EngineClient, EngineDead
from dsv3.api.service import Service, ServiceConfig
from dsv3.api.template_pool import DEADLINE_S, TemplatePool
from dsv3.options import ClusterOptions, EngineOptions, ServerOptions
from dsv3.text.chat_template import TemplateError
from dsv3.text.reasoning import writes_reasoning
from dsv3.text.tokenizer import Tokenizer, TokenizerNotFound

_MAX_HEADER_BYTES = 64 * 1024
# Time for load balancers to read the reason from /health before the process ends with status 1.
FAILURE_LINGER_S = 5.0
_CLOSE_CONNECTIONS_S = 3
_log = logging.getLogger("dsv3.server")


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Everything a server needs.

    `options.api_key` is the key itself, wherever it was read. `engine_factory` ("module:function") is called in the
    engine's process with `frames.Start`, which carries `engine`, `cluster` and `factory_options`; the latter are for
    factories that need more than the real one. `notify` gets lines for the person who started the server.
    """

    model_dir: Path
    model_names: tuple[str, ...]
    options: ServerOptions = dataclasses.field(default_factory=ServerOptions)
    engine: EngineOptions = dataclasses.field(default_factory=EngineOptions)
    cluster: ClusterOptions | None = None
    failure_linger_s: float = FAILURE_LINGER_S
    watchdog_s: float = WATCHDOG_S
    template_deadline_s: float = DEADLINE_S
    engine_factory: str = "dsv3.api.engine_factory:start_engine"
    factory_options: dict[str, object] = dataclasses.field(default_factory=dict)
    notify: Callable[[str], None] = print


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises OSError if the address is taken. Port 0 takes a free one."""
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

    The first SIGTERM or SIGINT drains: no new requests are taken, and those in flight have `shutdown_timeout` seconds
    to finish before they are aborted. The second aborts them at once. When the engine fails every client hears of it
    at once, and the process ends a few seconds later (at once if it had not been ready) for a supervisor to start it
    anew.
    """
    service = await make_service(config)
    server = _uvicorn(service, config)
    signals = _Signals()
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await service.engine.start()
        announcing = asyncio.create_task(_announce(service, on_ready))
        failed = asyncio.create_task(service.engine.ended.wait())
        first = asyncio.create_task(signals.first.wait())
        asked = asyncio.create_task(service.engine.asks_to_drain.wait())
        await asyncio.wait({failed, first, asked}, return_when=asyncio.FIRST_COMPLETED)
        announcing.cancel()
        if first.done() or asked.done():
            await _drain(service, signals, config)
            return 0
        if service.engine.info is not None:
            await _linger(signals, config)
        return 1
    finally:
        signals.close()
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await service.close()


def _uvicorn(service: Service, config: ServerConfig) -> "_Uvicorn":
    """h11 bounds headers, which httptools does not."""
    settings = uvicorn.Config(
        make_app(service, config.options.api_key),
        http="h11",
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=_CLOSE_CONNECTIONS_S,
    )
    return _Uvicorn(settings)


async def make_service(config: ServerConfig) -> Service:
    """Tokenizer, chat template and the (not yet started) engine client of a server.

    Raises TokenizerError for a tokenizer, ValueError for a generation_config.json that cannot be used.
    """
    tokenizer = _tokenizer(config)
    templates = await _templates(config, tokenizer)
    parser = config.options.reasoning_parser
    if parser == "auto" and not (templates and tokenizer and writes_reasoning(tokenizer.chat_template)):
        parser = "none"
    engine = EngineClient(
        frames.Start(
            config.engine_factory, str(config.model_dir), config.engine, config.cluster, config.factory_options
        ),
        on_progress=_Progress(config.notify),
        watchdog_s=config.watchdog_s,
    )
    settings = ServiceConfig(config.model_names, parser, sampling_defaults(config.model_dir))
    service = Service(settings, engine, tokenizer, templates)
    engine.on_stats = service.metrics.update
    return service


def _tokenizer(config: ServerConfig) -> Tokenizer | None:
    try:
        return Tokenizer.from_directory(config.model_dir)
    except TokenizerNotFound:
        config.notify("no tokenizer.json in the model directory: only prompts of token ids are served")
        return None


async def _templates(config: ServerConfig, tokenizer: Tokenizer | None) -> TemplatePool | None:
    if tokenizer is None:
        return None
    if tokenizer.chat_template is None:
        config.notify("the tokenizer has no chat template: /v1/chat/completions is off")
        return None
    pool = TemplatePool(tokenizer.chat_template, tokenizer.special_tokens, config.template_deadline_s)
    try:
        await pool.check()
    except TemplateError as error:
        config.notify(f"{error}: /v1/chat/completions is off")
        await pool.close()
        return None
    return pool


async def _announce(service: Service, on_ready: Callable[[Service], None]) -> None:
    await service.engine.settled.wait()
    if service.engine.state == "ready":
        on_ready(service)


async def _drain(service: Service, signals: "_Signals", config: ServerConfig) -> None:
    service.draining = True
    if service.active:
        config.notify(f"draining {service.active} requests, for {config.options.shutdown_timeout:g} s at most")
    waits = {asyncio.create_task(service.idle.wait()), asyncio.create_task(signals.second.wait())}
    _, pending = await asyncio.wait(waits, timeout=config.options.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    if service.active:
        config.notify(f"aborting {service.active} requests")
        service.engine.abort_all(EngineDead("the server is shutting down"))
        with contextlib.suppress(TimeoutError):  # the clients' error events
            await asyncio.wait_for(service.idle.wait(), 2.0)


async def _linger(signals: "_Signals", config: ServerConfig) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(signals.first.wait(), config.failure_linger_s)


class _Progress:
    """Tells what the engine does while it starts; of a count every tenth."""

    def __init__(self, notify: Callable[[str], None]):
        self._notify = notify

    def __call__(self, progress: frames.Progress) -> None:
        if not progress.total:
            self._notify(progress.text)
        elif progress.done == progress.total or progress.done % max(1, progress.total // 10) == 0:
            self._notify(f"[{progress.done}/{progress.total}] {progress.text}")


class _Signals:
    """SIGTERM and SIGINT as events on the running loop."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling: `serve` decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
