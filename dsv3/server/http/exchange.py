"""One HTTP request and its response as an ASGI application sees them, and writing with flow control."""

import asyncio
import functools
import http
import logging
import re
import time
import uuid
from collections.abc import Callable, MutableMapping
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from dsv3.server.http.wire import Head
from dsv3.server.protocol.anthropic import MESSAGES, messages_envelope
from dsv3.server.protocol.errors import ApiError
from dsv3.server.tenants import Tenant

# Keys in an ASGI scope's extensions.
WRITER = "dsv3.writer"
"""The connection's `ResponseWriter`."""

ADMIT = "dsv3.admit"
"""A function that admits the connection; it returns whether the request may be served."""

REQUEST_ID = "dsv3.request_id"
"""The request's id, a string."""

TENANT = "dsv3.tenant"
"""The tenant that sent the request; absent on a server without API keys."""

SUMMARY = "dsv3.summary"
"""The `summary` of a generation's `RequestHandler`; absent for other routes."""

ENDED = "dsv3.ended"
"""A function that is called with the status when the exchange is over (499: the client has gone); may be absent."""

TIMING_HEADER = "x-request-timing"
"""A request's header that asks, with the value 1, for the header `Server-Timing` and for `usage.timing`."""

OnAccess = Callable[[dict[str, object]], None]
"""Called with the fields of the access log after each request."""

_log = logging.getLogger("dsv3.server")
_SLICE_BYTES = 64 * 1024
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_MAX_LOGGED_PATH = 1024
_CLOSE = (b"connection", b"close")


def error_response(error: ApiError, path: str = "") -> Response:
    """Returns the response for an error: Anthropic's JSON if `path` belongs to their API, or else OpenAI's."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    content = messages_envelope(error) if path.startswith(MESSAGES) else error.envelope()
    return Response(content, error.status, headers, media_type="application/json")


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_path(scope: Scope) -> str:
    """Returns the path for `error_response`; Anthropic's clients get their errors on every route."""
    return MESSAGES if any(name == b"anthropic-version" for name, _ in scope["headers"]) else scope["path"]


class ResponseWriter:
    """Writes responses to a connection with flow control: whole bodies in slices, streams event by event.

    The connection of a client that reads nothing for `deadline_s` seconds is aborted. A stream writes its events to the
    transport synchronously, because waking a task costs more than making a token's event.
    """

    def __init__(self, transport: asyncio.Transport, deadline_s: float):
        self.num_bytes = 0
        self._transport, self._deadline_s = transport, deadline_s
        self._is_closing = False
        self._is_chunked = True
        self._on_pause: Callable[[], None] | None = None
        self._on_resume: Callable[[], None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_ready = asyncio.Event()
        self._is_ready.set()

    def start_stream(self, http_version: str, on_pause: Callable[[], None], on_resume: Callable[[], None]) -> None:
        """Starts a stream of events; calls `on_pause` when the client reads too slowly, then `on_resume`."""
        self._is_chunked = http_version == "1.1"
        self._on_pause, self._on_resume = on_pause, on_resume

    def end_stream(self) -> None:
        self._on_pause = self._on_resume = None

    def write(self, data: bytes) -> None:
        """Writes one server-sent event as a chunk of the body."""
        if self.is_closing:
            return
        if self._is_chunked:
            self._transport.write(b"%x\r\n%b\n\n\r\n" % (len(data) + 2, data))
        else:
            self._transport.write(b"%b\n\n" % data)
        self.num_bytes += len(data)

    async def send(self, data: bytes) -> None:
        """Writes bytes in slices as the client reads them, so that the transport buffers few of them."""
        view = memoryview(data)
        for start in range(0, len(view), _SLICE_BYTES):
            await self._is_ready.wait()
            if self.is_closing:
                return
            self._transport.write(view[start : start + _SLICE_BYTES])
            self.num_bytes += len(view[start : start + _SLICE_BYTES])

    def pause(self) -> None:
        """Pauses writing: the transport's buffer is full. Starts the deadline."""
        self._is_ready.clear()
        self._start_deadline()
        if self._on_pause is not None:
            self._on_pause()

    def resume(self) -> None:
        """Resumes writing: the client has read the buffer."""
        self._is_ready.set()
        if not self._is_closing:
            self.cancel_deadline()
        if self._on_resume is not None:
            self._on_resume()

    @property
    def is_closing(self) -> bool:
        """Whether the connection is closing, so that nothing more is written."""
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection after the buffer is written, or at the deadline."""
        self._is_closing = True
        self._transport.close()
        self._start_deadline()

    def half_close(self, seconds: float) -> None:
        """Ends the sending direction and closes the connection after `seconds`.

        If a connection is closed while its client still writes, the client gets a reset and may lose the response.
        """
        self._is_closing = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()  # TLS: discards input until the client closes its end
        self.cancel_deadline()
        self._start_deadline(seconds)

    def abort(self) -> None:
        """Closes the connection at once and discards its buffer."""
        self._transport.abort()

    def on_connection_lost(self) -> None:
        """Releases waiting writers after the connection has closed."""
        self.end_stream()
        self.cancel_deadline()
        self._is_ready.set()

    def cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _start_deadline(self, seconds: float | None = None) -> None:
        if self._deadline is None:
            delay = self._deadline_s if seconds is None else seconds
            self._deadline = asyncio.get_running_loop().call_later(delay, self._transport.abort)


class HttpExchange:
    """One request and its response, with the `receive` and `send` of ASGI.

    `on_read` is called when the application reads more of the body, `on_end` when the response is complete. A body is
    parsed only as far as the application reads it.
    """

    def __init__(self, head: Head, writer: ResponseWriter, on_read: Callable[[], None], on_end: Callable[[], None]):
        self.body = bytearray()
        self.is_received = False
        self.is_read = False
        self.keeps_alive = head.keeps_alive
        self.request_id = _request_id(head)
        self.status = 0
        self.is_complete = False
        self._head, self._writer = head, writer
        self._on_read, self._on_end = on_read, on_end
        self._must_send_continue = head.expects_continue
        self._is_disconnected = False
        self._is_chunked = False
        self._changed = asyncio.Event()
        self._began, self._num_bytes_before = time.monotonic(), writer.num_bytes

    def feed(self, content: bytes, is_last: bool) -> None:
        """Appends the next part of the request's body."""
        self.body += content
        self.is_received = is_last
        self._must_send_continue = False
        self._changed.set()

    def disconnect(self) -> None:
        """Ends the exchange: the client has disconnected. `receive` then returns `http.disconnect`."""
        self._is_disconnected = True
        self._changed.set()

    async def run(self, app: ASGIApp, scope: MutableMapping[str, Any], on_access: OnAccess | None = None) -> None:
        """Runs the application; a response that it leaves incomplete aborts the connection."""
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            _log.exception("request %s: %s %s failed", request_label(scope), scope["method"], scope["path"])
        if not self.is_complete and not self._is_disconnected:
            if not self.status:
                self.keeps_alive = False
                await self._send({"type": "http.response.start", "status": 500, "headers": [(b"content-length", b"0")]})
                await self._send({"type": "http.response.body"})
            else:
                self._writer.abort()
        if (on_end := scope["extensions"].get(ENDED)) is not None:
            try:
                on_end(self.status if self.is_complete else 499)
            except Exception:
                _log.exception("the trace of request %s is not complete", request_label(scope))
        if on_access is not None:
            on_access(self._access(scope["extensions"]))

    def _access(self, extensions: dict[str, Any]) -> dict[str, object]:
        """Returns the fields of the access log; status 499: the client disconnected before the response.

        `complete` is whether the whole response was sent, `bytes` how much of it. `tenant` is None without a valid key.
        The last four fields are None except for generations; after a disconnect the tokens are those sent so far.
        `first_token_s` counts from the request's arrival.
        """
        tenant: Tenant | None = extensions.get(TENANT)
        summary = extensions[SUMMARY]() if SUMMARY in extensions else (None, None, None, None)
        model, prompt_tokens, completion_tokens, first = summary
        return {
            "time": round(time.time(), 3),
            "request_id": self.request_id,
            "tenant": None if tenant is None else tenant.name,
            "method": self._head.method,
            "path": self._head.target.partition(b"?")[0].decode("ascii")[:_MAX_LOGGED_PATH],
            "status": self.status or 499,
            "seconds": round(time.monotonic() - self._began, 6),
            "bytes": self._writer.num_bytes - self._num_bytes_before,
            "complete": self.is_complete,
            "model": model,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "first_token_s": None if first is None else round(first - self._began, 6),
        }

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._must_send_continue:
            self._must_send_continue = False
            await self._writer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.is_read = True
        if not self._is_disconnected and not self.is_complete:
            self._on_read()
            await self._changed.wait()
            self._changed.clear()
        if self._is_disconnected or self.is_complete:
            return {"type": "http.disconnect"}
        content, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": content, "more_body": not self.is_received}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if self._is_disconnected:
            return
        if message["type"] == "http.response.start":
            await self._writer.send(self._response_head(message["status"], list(message.get("headers", []))))
        elif message["type"] == "http.response.body":
            await self._send_body(message.get("body", b""), not message.get("more_body", False))

    def _response_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        self.status = status
        is_sized = any(name == b"content-length" for name, _ in headers)
        self._is_chunked = not is_sized and self._head.version == "1.1" and self._has_body
        if self._is_chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        self.keeps_alive &= self.is_received and (is_sized or self._is_chunked or not self._has_body)
        if not self.keeps_alive:
            headers.append(_CLOSE)
        headers += [(b"date", _date(int(time.time()))), (b"x-request-id", self.request_id.encode())]
        lines = [_status_line(status)]
        lines += [b"%b: %b" % field for field in headers]
        return b"\r\n".join([*lines, b"", b""])

    @property
    def _has_body(self) -> bool:
        return self._head.method != "HEAD" and self.status not in (204, 304)

    async def _send_body(self, content: bytes, is_last: bool) -> None:
        if self._has_body and content:
            if self._is_chunked:
                content = b"%x\r\n%b\r\n" % (len(content), content)
            await self._writer.send(content)
        if is_last and self._is_chunked:
            await self._writer.send(b"0\r\n\r\n")
        if is_last and not self._is_disconnected:
            self.is_complete = True
            self._changed.set()
            self._on_end()


def request_label(scope: MutableMapping[str, Any]) -> str:
    """Returns the request's id and tenant for log lines."""
    extensions = scope["extensions"]
    tenant: Tenant | None = extensions.get(TENANT)
    return extensions[REQUEST_ID] if tenant is None else f"{extensions[REQUEST_ID]} of {tenant.name}"


def _request_id(head: Head) -> str:
    """Returns the client's `X-Request-Id` if it is printable and short, or else a new id."""
    given = head.values(b"x-request-id")
    if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]):
        return given[0].decode()
    return uuid.uuid4().hex


def make_scope(head: Head, scheme: str, extensions: dict[str, Any]) -> dict[str, Any]:
    raw_path, _, query = head.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": head.version,
        "scheme": scheme,
        "method": head.method,
        "root_path": "",
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "query_string": query,
        "headers": head.headers,
        "extensions": extensions,
    }


@functools.cache
def _status_line(status: int) -> bytes:
    known = status in http.HTTPStatus.__members__.values()
    return b"HTTP/1.1 %d %b" % (status, http.HTTPStatus(status).phrase.encode() if known else b"")


@functools.lru_cache(1)
def _date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()
