"""Serves HTTP on a listener and drains: shared by API server 0 and the others."""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from dsv3.config.server_options import ServerOptions
from dsv3.server.config import ServerConfig
from dsv3.server.engine.client import EngineUnavailable
from dsv3.server.http.app import make_app
from dsv3.server.http.exchange import OnAccess
from dsv3.server.http.http_server import ConnectionLimit, HttpServer, certificate_of, max_admitted
from dsv3.server.serving.service import Service
from dsv3.server.tracing import make_tracer

_FLUSH_S = 0.1  # delay until another API server's /metrics includes this one's counts
_FAREWELL_S = 2.0


@contextlib.asynccontextmanager
async def serving(service: Service, config: ServerConfig, listener: socket.socket) -> AsyncIterator[HttpServer]:
    """Serves HTTP on `listener` for the time of the `async with`; closes the service at its end."""
    options = config.options
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(service.close)
        name, port = listener.getsockname()[:2]
        about = {"service.instance.id": f"{name}:{port}:{os.getpid()}", "dsv3.role": config.engine.role}
        service.tracer = make_tracer(options.otlp_traces_endpoint, "dsv3", about)
        if service.tracer is not None:
            stack.push_async_callback(service.tracer.close)
        limit = max_admitted(options.max_connections, options.api_server_count)
        on_access = _access_log() if options.access_log else None
        app, certificate = make_app(service, options), certificate_of(options)
        server = HttpServer(app, listener, ConnectionLimit(limit), config.deadlines, certificate, on_access)
        server.start()
        stack.push_async_callback(server.close)
        flushing = asyncio.create_task(_flush(service))
        stack.callback(flushing.cancel)
        gc.freeze()  # modules and tokenizers: a full collection, which stops all streams, would look at each object
        stack.callback(gc.unfreeze)
        yield server


def _access_log() -> OnAccess:
    """Returns a function that writes a line of JSON per request to standard error, without query, body or key."""
    log, handler = logging.getLogger("dsv3.access"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    return lambda line: log.info("%s", msgspec.json.encode(line).decode())


async def drain(service: Service, abort: asyncio.Event, options: ServerOptions, notify: Callable[[str], None]) -> None:
    """Drains an API server, in two waits that `abort` ends early.

    `/health` fails at once. If the engine is ready, new requests are accepted for `shutdown_grace` seconds; those in
    flight then have `shutdown_timeout` seconds before they are aborted.
    """
    service.leaving = True
    if options.shutdown_grace and service.engine.state == "ready":
        notify(f"draining: accepting requests for {options.shutdown_grace:g} s more")
        await wait_for_any(abort, service.engine.ended, timeout_s=options.shutdown_grace)
    service.draining, timeout_s = True, options.shutdown_timeout
    if service.active:
        notify(f"draining {service.active} requests, for {timeout_s:g} s at most")
    await wait_for_any(service.idle, abort, timeout_s=timeout_s)
    if service.active:
        notify(f"aborting {service.active} requests")
        service.engine.abort_all(EngineUnavailable("the server is shutting down"))
        await wait_for_any(service.idle, timeout_s=_FAREWELL_S)  # send error events to the clients


async def wait_for_any(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Waits until one of the events is set, or for `timeout_s` seconds."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()


async def _flush(service: Service) -> None:
    """Publishes this API server's counts to the others and records the dashboard's history, every `_FLUSH_S`."""
    while True:
        await asyncio.sleep(_FLUSH_S)
        service.metrics.flush()
        service.history.record(time.time())
