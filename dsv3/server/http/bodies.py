"""What all routes share: bounded bodies, aborts on disconnect, errors as responses."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive

from dsv3.server.http.exchange import error_path, error_response, request_label
from dsv3.server.limits import MAX_BODY_BYTES
from dsv3.server.protocol.errors import ApiError, internal, invalid

_BODY_DEADLINE_S = 120.0  # for a client to send its body
_log = logging.getLogger("dsv3.server")


class ClientGone(Exception):
    """The client has closed the connection; no response is sent."""


async def read_json_body(request: Request, grow: Callable[[int], None]) -> bytearray:
    """Returns the body, at most `MAX_BODY_BYTES`; raises ApiError 413, 415 or 408 otherwise.

    `grow` is called with the size of each part before it is stored, and may raise ApiError.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "the content type must be application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "compressed bodies are not accepted; send the body without content-encoding")
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise invalid("content-length is not a number")
    if len(length) > 12 or int(length) > MAX_BODY_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(_BODY_DEADLINE_S):
            return await _read(request, grow)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_BODY_DEADLINE_S:g} s") from None


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
    """Returns the result of `work`; cancels it and raises ClientGone when the client disconnects."""
    task, watch = asyncio.create_task(work), asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
        del task, watch  # an error's traceback keeps this frame alive, and with it the body that `work` read


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Handler = Callable[[Request], Awaitable[Response]]


def make_routes(handlers: Mapping[tuple[str, str], Handler]) -> list[Route]:
    """Returns a route for each path, with the handlers of all its methods; keys are (method, path)."""
    paths: dict[str, dict[str, Handler]] = {}
    for (method, path), handler in handlers.items():
        paths.setdefault(path, {})[method] = handler
    return [
        Route(path, endpoint(functools.partial(_dispatch, by_method)), methods=list(by_method))
        for path, by_method in paths.items()
    ]


async def _dispatch(by_method: Mapping[str, Handler], request: Request) -> Response:
    return await by_method["GET" if request.method == "HEAD" else request.method](request)


def endpoint(handler: Handler) -> Handler:
    """Returns `handler` with its errors turned into responses; unexpected ones are logged and not shown."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error_response(error, error_path(request.scope))
        except ClientGone:
            return Response(status_code=499)
        except Exception:
            _log.exception(
                "request %s: %s %s failed", request_label(request.scope), request.method, request.scope["path"]
            )
            return error_response(internal(), error_path(request.scope))

    return run
