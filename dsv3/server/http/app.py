"""The ASGI application: routes and their handlers. A client's disconnect aborts its request (`unless_disconnected`)."""

import asyncio
import contextlib
import datetime
import functools
import re
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dsv3.config.server_options import ServerOptions
from dsv3.server.http.auth import (
    is_loopback,
    require_admission,
    require_key,
    require_local_name,
    require_operator,
    tenant_of,
)
from dsv3.server.http.batches import batch_routes
from dsv3.server.http.bodies import ClientGone, make_routes, read_json_body, unless_disconnected
from dsv3.server.http.dashboard import dashboard_routes
from dsv3.server.http.exchange import (
    ENDED,
    REQUEST_ID,
    SUMMARY,
    TIMING_HEADER,
    WRITER,
    ResponseWriter,
    error_path,
    error_response,
    json_response,
)
from dsv3.server.http.openapi import openapi, openapi_path
from dsv3.server.http.operations import operation_routes
from dsv3.server.protocol.anthropic import MESSAGES
from dsv3.server.protocol.errors import ApiError, invalid
from dsv3.server.protocol.openai import DetokenizeRequest, TokenizeRequest
from dsv3.server.serving import prompts
from dsv3.server.serving.anthropic import count_tokens
from dsv3.server.serving.handler import RequestHandler
from dsv3.server.serving.handlers import KINDS
from dsv3.server.serving.request_parsing import read_request
from dsv3.server.serving.service import Service
from dsv3.server.serving.spans import begin_timeline, end_trace
from dsv3.server.serving.timeline import RequestTimeline, server_timing


class EventStream(Response):
    """Streams the events of `handler`.

    The status is sent with the first event, so that a rejected request gets its status; a later error becomes an event.
    When the client disconnects, the handler is closed, which aborts its sequences. While the client does not read, the
    generation is on hold, so that tokens are buffered there and not in the connection. `on_close` is called at the end.
    """

    media_type = "text/event-stream"

    def __init__(self, handler: RequestHandler, on_close: Callable[[], None]):
        self.status_code = 200
        self.background = None
        self._handler, self._on_close = handler, on_close
        self._waiting: list[bytes] = []
        self._writer: ResponseWriter | None = None
        self._has_begun = asyncio.Event()
        self._ended: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer: ResponseWriter = scope["extensions"][WRITER]
        try:
            await unless_disconnected(receive, self._stream(writer, scope, receive, send))
        except ClientGone:
            return
        finally:
            self._handler.generation.close()
            self._on_close()
            writer.end_stream()

    async def _stream(self, writer: ResponseWriter, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._handler.start(self._on_event, self._on_end)
        except ApiError as error:
            await error_response(error, error_path(scope))(scope, receive, send)
            return
        await self._has_begun.wait()
        if not self._waiting and (refusal := self._ended.result()) is not None:
            await error_response(refusal, error_path(scope))(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        generation = self._handler.generation
        writer.start_stream(scope["http_version"], generation.hold, generation.release)
        for event in self._waiting:
            writer.write(event)
        self._waiting, self._writer = [], writer
        if (failure := await self._ended) is not None:
            writer.write(self._handler.failure(failure))
        await send({"type": "http.response.body", "body": self._handler.stream_end, "more_body": False})

    def _on_event(self, event: bytes) -> None:
        if self._writer is not None:
            self._writer.write(event)
        else:
            self._waiting.append(event)
            self._has_begun.set()

    def _on_end(self, error: ApiError | None) -> None:
        if not self._ended.done():  # else the client has disconnected, and the handler is about to be closed
            self._ended.set_result(error)
        self._has_begun.set()


RANK_HEADER = "x-data-parallel-rank"
_RANK = re.compile(r"[0-9]{1,6}")


def rank_of(header: str | None) -> int | None:
    """Returns the rank in a header, None without one; raises ApiError 400 if it is not a number.

    `dsv3.scheduler.request` checks that the rank exists.
    """
    if header is None:
        return None
    if not _RANK.fullmatch(header.strip()):
        raise invalid(f"{RANK_HEADER}: expected the number of a rank, counted from 0", RANK_HEADER)
    return int(header)


_Handler = Callable[[Service, Request], Awaitable[Response]]


def make_app(service: Service, options: ServerOptions) -> ASGIApp:
    """Returns the application for `service` inside the middleware that the options require."""
    router = make_router(service, options.batch_dir, options.profile_dir)
    app = require_admission(router, service.metrics.record_rejected)
    if service.tenants.all:
        app = require_key(app, service.tenants)
    elif is_loopback(options.host):
        app = require_local_name(app, options.host, options.allowed_origins)
    if options.allowed_origins:
        methods, shown = ["GET", "POST", "DELETE"], ["x-request-id", "retry-after", "server-timing"]
        app = CORSMiddleware(app, options.allowed_origins, methods, allow_headers=["*"], expose_headers=shown)
    return app


def make_router(service: Service, batch_dir: str | None = None, profile_dir: str | None = None) -> Starlette:
    """Returns the routes without authentication."""
    handlers: dict[tuple[str, str], _Handler] = {
        ("POST", path): functools.partial(_generate, kind) for path, kind in KINDS.items()
    }
    handlers |= {
        ("POST", "/tokenize"): _tokenize,
        ("POST", "/detokenize"): _detokenize,
        ("POST", "/flush_cache"): _flush_cache,
        ("POST", f"{MESSAGES}/count_tokens"): _count_tokens,
        ("GET", "/v1/models"): _models,
        ("GET", "/v1/models/{model:path}"): _model,
        ("GET", "/health"): _health,
        ("GET", "/ready"): _ready,
        ("GET", "/version"): _version,
        ("GET", "/metrics"): _metrics,
        ("GET", "/openapi.json"): _openapi,
    }
    routes = make_routes({key: functools.partial(handler, service) for key, handler in handlers.items()})
    routes += batch_routes(service, batch_dir)
    routes += dashboard_routes(service, profile_dir)
    routes += operation_routes(service)
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    return app


def _http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, headers = error.status_code, error.headers or {}
    if status == 404:
        path = http.scope["path"]
        text = next((text for start, text in _UNSUPPORTED.items() if path.startswith(start)), "no such route")
    else:
        text = "this route does not support the method" if status == 405 else "the request cannot be answered"
    response = error_response(
        ApiError(status, text, code="not_found" if status == 404 else None), error_path(http.scope)
    )
    response.headers.update(headers)  # `Allow`, which RFC 9110 requires with 405
    return response


# Prefixes of routes that the served APIs have elsewhere.
_UNSUPPORTED = {
    "/v1/embeddings": "this model makes no embeddings",
    "/v1/images": "this model makes no images",
    "/v1/audio": "this model has no audio input or output",
    "/v1/moderations": "this model does no moderation",
    "/v1/rerank": "this model does no reranking",
    "/v1/responses/": "this server stores no responses; send the whole conversation as input to /v1/responses",
    "/v1/messages/batches": "this server has no batches of messages; /v1/batches takes chat completions",
}


async def _generate(kind: type[RequestHandler], service: Service, http: Request) -> Response:
    """Serves a route that generates, as a stream of events or as one JSON response."""
    timeline = _begin_timeline(service, http)
    with contextlib.ExitStack() as stack:
        grow = stack.enter_context(service.reserve_memory())
        handler = kind(service, await read_json_body(http, grow), tenant_of(http))  # which alone holds the body
        handler.rank, handler.timeline = rank_of(http.headers.get(RANK_HEADER)), timeline
        await unless_disconnected(http.receive, handler.prepare())
        http.scope["extensions"][SUMMARY] = handler.summary
        if timeline.trace is not None:
            http.scope["extensions"][ENDED] = functools.partial(end_trace, service, timeline, handler)
        if handler.streams:
            return EventStream(handler, stack.pop_all().close)
        content = await unless_disconnected(http.receive, handler.whole())
        headers = {"server-timing": server_timing(timeline.split())} if timeline.is_shown else None
        return Response(content, 200, headers, media_type="application/json")


def _begin_timeline(service: Service, http: Request) -> RequestTimeline:
    """Creates the record of a new request; its trace is sent when the response has ended."""
    extensions, is_shown = http.scope["extensions"], http.headers.get(TIMING_HEADER) == "1"
    timeline = begin_timeline(service, extensions[REQUEST_ID], http.headers, is_shown=is_shown)
    if timeline.trace is not None:
        extensions[ENDED] = functools.partial(end_trace, service, timeline, None)
    return timeline


async def _models(service: Service, _: Request) -> Response:
    names = service.config.model_names
    entries = [_entry(service, name) for name in names]
    return json_response(
        {"object": "list", "data": entries, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    )


async def _model(service: Service, http: Request) -> Response:
    return json_response(_entry(service, service.require_model(http.path_params["model"])))


def _entry(service: Service, name: str) -> dict[str, Any]:
    """Returns a model with the fields of OpenAI's, vLLM's and Anthropic's APIs."""
    info, created = service.engine.info, service.created
    entry = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "dsv3",
        "root": str(service.config.model_dir),
        "parent": None,
        "max_model_len": None if info is None else info.rules.max_model_len,
        "max_num_seqs": None if info is None else info.max_num_seqs,
        "data_parallel_size": None if info is None else info.num_ranks,
        "kv_events": None if info is None else info.kv_events,
        "version": service.config.options.served_version,
        "type": "model",
        "display_name": name,
        "created_at": datetime.datetime.fromtimestamp(created, datetime.UTC),
    }
    if info is not None and info.kernel_fallbacks:
        entry["kernel_fallbacks"] = info.kernel_fallbacks
    return entry


async def _health(service: Service, _: Request) -> Response:
    """Returns 200 if requests are served, else 503; for liveness probes and load balancers."""
    if service.status == "ok":
        return json_response({"status": "ok"})
    return json_response({"status": service.status, "reason": service.reason}, 503)


async def _ready(service: Service, _: Request) -> Response:
    """Returns 200 if a request would be accepted now: `/health` is 200 and the queue is not full."""
    if service.status == "ok" and not service.engine.has_capacity:
        return json_response({"status": "busy", "reason": "the queue is full"}, 503)
    return await _health(service, _)


async def _flush_cache(service: Service, http: Request) -> Response:
    """Resets the prefix cache on the devices and in host memory, but not in a store."""
    require_operator(service, http)
    service.require_ready()
    service.engine.flush()
    return json_response({"status": "ok"})


async def _version(service: Service, _: Request) -> Response:
    try:
        return json_response({"version": version("dsv3")})
    except PackageNotFoundError:
        return json_response({"version": "unknown"})


async def _metrics(service: Service, http: Request) -> Response:
    require_operator(service, http)
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


async def _tokenize(service: Service, http: Request) -> Response:
    with service.reserve_memory() as grow:
        request = await read_request(service, TokenizeRequest, await read_json_body(http, grow))
        service.require_model(request.model)
        info = service.require_ready()
        prompt = await unless_disconnected(http.receive, prompts.tokenize_prompt(service, request))
        ids = prompt.token_ids.tolist()
        answer = {"count": len(ids), "max_model_len": info.rules.max_model_len, "tokens": ids}
        if request.return_token_strs and service.tokenizer is not None:
            answer["token_strs"] = await prompts.token_strings(service, ids)
        return json_response(answer)


async def _count_tokens(service: Service, http: Request) -> Response:
    with service.reserve_memory() as grow:
        body = await read_json_body(http, grow)
        return json_response(await unless_disconnected(http.receive, count_tokens(service, body)))


async def _openapi(service: Service, http: Request) -> Response:
    found = ((method, openapi_path(route.path)) for route in http.app.routes for method in route.methods - {"HEAD"})
    return Response(openapi(tuple(sorted(found))), media_type="application/json")


async def _detokenize(service: Service, http: Request) -> Response:
    with service.reserve_memory() as grow:
        request = await read_request(service, DetokenizeRequest, await read_json_body(http, grow))
        service.require_model(request.model)
        return json_response({"prompt": await prompts.detokenize(service, request.tokens)})
