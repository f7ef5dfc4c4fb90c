"""HTTP beneath the routes: bounded bodies, disconnects, server-sent events, errors."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsv3.api.errors import ApiError, internal, invalid
from dsv3.api.schema import MAX_BODY_BYTES

# A client that takes longer to send its body, or to read its stream, is cut off.
_BODY_DEADLINE_S = 120.0
_SEND_DEADLINE_S = 120.0
_DONE = b"data: [DONE]\n\n"
_log = logging.getLogger("dsv3.server")


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


async def read_json_body(request: Request) -> bytes:
    """The body, at most `MAX_BODY_BYTES`; ApiError 413, 415 or 408 otherwise."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "the content type must be application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "compressed bodies are not accepted")
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise invalid("content-length is not a number")
    if len(length) > 12 or int(length) > MAX_BODY_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(_BODY_DEADLINE_S):
            return await _read(request)
    except TimeoutError:
        raise ApiError(408, "the body took too long to arrive") from None


async def _read(request: Request) -> bytes:
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
        if not message.get("more_body", False):
            return bytes(body)


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")


async def unless_disconnected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and ClientGone raised, when the client closes the connection."""
    task, watch = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Handler = Callable[[Request], Awaitable[Response]]


def endpoint(handler: Handler) -> Handler:
    """`handler` with its errors turned into responses; what is unexpected is logged, not shown."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error.response()
        except ClientGone:
            return Response(status_code=499)
        except Exception:
            _log.exception("%s %s failed", request.method, request.url.path)
            return internal().response()

    return run


class EventStream(Response):
    """Server-sent events made by `events`, which yields the JSON of each.

    The first event is awaited before the status is sent, so that a refused request gets a proper status; a later error
    becomes an event. The generator is closed as soon as the client has gone.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]):
        self.status_code = 200
        self.background = None
        self._events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._stream(scope, receive, send))
        except (ClientGone, TimeoutError, OSError):
            return
        finally:
            await self._events.aclose()

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            event: bytes | None = await anext(self._events, None)
        except Exception as error:
            await _as_api_error(error).response()(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while event is not None:
            await self._send(send, b"data: " + event + b"\n\n")
            try:
                event = await anext(self._events, None)
            except Exception as error:
                await self._send(send, b"data: " + _as_api_error(error).envelope() + b"\n\n")
                break
        await self._send(send, _DONE, more=False)

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        async with asyncio.timeout(_SEND_DEADLINE_S):
            await send({"type": "http.response.body", "body": body, "more_body": more})


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    _log.error("a stream failed", exc_info=error)
    return internal()
