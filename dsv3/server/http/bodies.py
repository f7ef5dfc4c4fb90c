"""HTTP beneath the routes: bounded bodies, disconnects, errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from dsv3.server.http.exchange import described, path_of, response_of
from dsv3.server.limits import MAX_BODY_BYTES
from dsv3.server.protocol.errors import ApiError, internal, invalid

# A client that takes longer to send its body is cut off.
_BODY_DEADLINE_S = 120.0
_log = logging.getLogger("dsv3.server")


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


async def read_json_body(request: Request, grow: Callable[[int], None]) -> bytearray:
    """Returns the body, at most `MAX_BODY_BYTES`; ApiError 413, 415 or 408 otherwise.

    `grow` is called with the size of each part before it is kept, and may raise ApiError.
    """
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
            return await _read(request, grow)
    except TimeoutError:
        raise ApiError(408, "the body took too long to arrive") from None


async def _read(request: Request, grow: Callable[[int], None]) -> bytearray:
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        if len(body) + len(part) > MAX_BODY_BYTES:
            raise _too_large()
        grow(len(part))
        body += part
        if not message.get("more_body", False):
            return body


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")


async def unless_disconnected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`; when the client closes the connection, cancels it and raises ClientGone."""
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
        del task, watch  # an error's traceback holds this frame, and with it whatever `work` had read: up to 32 MiB


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Handler = Callable[[Request], Awaitable[Response]]


def endpoint(handler: Handler) -> Handler:
    """Returns `handler` with its errors turned into responses; what is unexpected is logged, not shown."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return response_of(error, path_of(request.scope))
        except ClientGone:
            return Response(status_code=499)
        except Exception:
            _log.exception("request %s: %s %s failed", described(request.scope), request.method, request.scope["path"])
            return response_of(internal(), path_of(request.scope))

    return run
