"""One request and its response, as an ASGI application sees them."""

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
from dsv3.server.serving.handler import Summary
from dsv3.server.tenants import Tenant

# Keys in an ASGI scope's extensions.
WRITER = "dsv3.writer"
"""The connection's `ResponseWriter`."""

ADMIT = "dsv3.admit"
"""A function: returns whether the connection's request may be worked on."""

REQUEST_ID = "dsv3.request_id"
"""The request's id, a text."""

TENANT = "dsv3.tenant"
"""The tenant that sent the request; absent on a server without API keys."""

SUMMARY = "dsv3.summary"
"""A function that returns the `Summary` of the answer; absent where there is none."""

OnAccess = Callable[[dict[str, object]], None]
"""Is called with the line of the access log after each request."""

_log = logging.getLogger("dsv3.server")
_PIECE_BYTES = 64 * 1024
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_MAX_LOGGED_PATH = 1024
_CLOSE = (b"connection", b"close")


def response_of(error: ApiError, path: str = "") -> Response:
    """Returns the response for an error at a path, with the headers that belong to its status.

    The JSON is OpenAI's, and Anthropic's where the path is one of theirs.
    """
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    content = messages_envelope(error) if path.startswith(MESSAGES) else error.envelope()
    return Response(content, error.status, headers, media_type="application/json")


def json_response(value: object, status: int = 200) -> Response:
    """Returns the response whose body is `value` as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def path_of(scope: Scope) -> str:
    """Returns the path by which `response_of` chooses the shape: Anthropic's clients name their API on every route."""
    return MESSAGES if any(name == b"anthropic-version" for name, _ in scope["headers"]) else scope["path"]


class ResponseWriter:
    """A connection, for the responses on it: whole replies in pieces, and streamed events.

    A client that takes nothing for `deadline_s` seconds is cut off, whatever is sent to it, and what was meant for it
    is forgotten at once. A task's wake-up costs more than making a token's event, so a stream that has sent its head
    writes its chunks to the transport itself.
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

    def claim(self, http_version: str, on_pause: Callable[[], None], on_resume: Callable[[], None]) -> None:
        """Has a response told when the client's reading holds it up, and when it may go on."""
        self._is_chunked = http_version == "1.1"
        self._on_pause, self._on_resume = on_pause, on_resume

    def free(self) -> None:
        """Ends what `claim` began."""
        self._on_pause = self._on_resume = None

    def write(self, data: bytes) -> None:
        """Writes the lines of one server-sent event as a chunk of the body."""
        if self.is_closing:
            return
        if self._is_chunked:
            self._transport.write(b"%x\r\n%b\n\n\r\n" % (len(data) + 2, data))
        else:
            self._transport.write(b"%b\n\n" % data)
        self.num_bytes += len(data)

    async def send(self, data: bytes) -> None:
        """Writes bytes as the client takes them, so that the transport holds few of them."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            await self._is_ready.wait()
            if self.is_closing:
                return
            self._transport.write(view[start : start + _PIECE_BYTES])
            self.num_bytes += len(view[start : start + _PIECE_BYTES])

    def pause(self) -> None:
        """Notes that the client reads more slowly than it is written to."""
        self._is_ready.clear()
        self._start_clock()
        if self._on_pause is not None:
            self._on_pause()

    def resume(self) -> None:
        """Notes that the client has read."""
        self._is_ready.set()
        if not self._is_closing:
            self.stop_clock()
        if self._on_resume is not None:
            self._on_resume()

    @property
    def is_closing(self) -> bool:
        """Whether nothing is written any more."""
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection when all is written, within the deadline."""
        self._is_closing = True
        self._transport.close()
        self._start_clock()

    def half_close(self, seconds: float) -> None:
        """Lets the client read what is written and know that it was the last; closes the connection after `seconds`.

        A connection that is closed while its client still writes is reset, and then the client may not see the answer.
        """
        self._is_closing = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()  # TLS: reads and drops what comes until the client closes its end
        self.stop_clock()
        self._start_clock(seconds)

    def abort(self) -> None:
        """Closes the connection now, and forgets what is not written."""
        self._transport.abort()

    def lost(self) -> None:
        """Notes that the connection is closed."""
        self.free()
        self.stop_clock()
        self._is_ready.set()

    def stop_clock(self) -> None:
        """Lets the deadline go."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _start_clock(self, seconds: float | None = None) -> None:
        if self._deadline is None:
            delay = self._deadline_s if seconds is None else seconds
            self._deadline = asyncio.get_running_loop().call_later(delay, self._transport.abort)


class HttpExchange:
    """One request and its response.

    `on_read` is called when the application wants more of the body, `on_end` when the response is complete. What it
    never asks for is never parsed.
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
        self._must_ask = head.expects_continue
        self._is_gone = False
        self._is_chunked = False
        self._news = asyncio.Event()
        self._began, self._num_bytes_before = time.monotonic(), writer.num_bytes

    def feed(self, content: bytes, is_last: bool) -> None:
        """Takes the next part of the request's body."""
        self.body += content
        self.is_received = is_last
        self._must_ask = False
        self._news.set()

    def disconnect(self) -> None:
        """Notes that the client has gone."""
        self._is_gone = True
        self._news.set()

    async def run(self, app: ASGIApp, scope: MutableMapping[str, Any], on_access: OnAccess | None = None) -> None:
        """Has the application answer; what it leaves unfinished ends the connection."""
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            _log.exception("request %s: %s %s failed", described(scope), scope["method"], scope["path"])
        if not self.is_complete and not self._is_gone:
            if not self.status:
                await self._fail()
            else:
                self._writer.abort()
        if on_access is not None:
            on_access(self._access(scope["extensions"]))

    def _access(self, extensions: dict[str, Any]) -> dict[str, object]:
        """Returns the line of the access log; status 499: the client had gone.

        `complete` says whether the client was sent all of the response, `bytes` how much of it. `tenant` is None
        without a key that the server knows. The last four are those of an answer, None for what is none; its tokens
        are those told so far where the client has gone. `first_token_s` counts from the request's arrival.
        """
        tenant: Tenant | None = extensions.get(TENANT)
        answer: Summary | None = extensions[SUMMARY]() if SUMMARY in extensions else None
        first = None if answer is None else answer.first_token_at
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
            "model": None if answer is None else answer.model,
            "prompt_tokens": None if answer is None else answer.prompt_tokens,
            "completion_tokens": None if answer is None else answer.completion_tokens,
            "first_token_s": None if first is None else round(first - self._began, 6),
        }

    async def _fail(self) -> None:
        self.keeps_alive = False
        await self._send({"type": "http.response.start", "status": 500, "headers": [(b"content-length", b"0")]})
        await self._send({"type": "http.response.body"})

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._must_ask:
            self._must_ask = False
            await self._writer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.is_read = True
        if not self._is_gone and not self.is_complete:
            self._on_read()
            await self._news.wait()
            self._news.clear()
        if self._is_gone or self.is_complete:
            return {"type": "http.disconnect"}
        content, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": content, "more_body": not self.is_received}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if self._is_gone:
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
        if is_last and not self._is_gone:
            self.is_complete = True
            self._news.set()
            self._on_end()


def described(scope: MutableMapping[str, Any]) -> str:
    """Returns what the log calls a request: its id, and who sent it."""
    extensions = scope["extensions"]
    tenant: Tenant | None = extensions.get(TENANT)
    return extensions[REQUEST_ID] if tenant is None else f"{extensions[REQUEST_ID]} of {tenant.name}"


def _request_id(head: Head) -> str:
    """Returns the id that the client gave, if it is one that can go into a log, or else a new one."""
    given = head.values(b"x-request-id")
    if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]):
        return given[0].decode()
    return uuid.uuid4().hex


def scope_of(head: Head, scheme: str, extensions: dict[str, Any]) -> dict[str, Any]:
    """Returns the ASGI scope of a request."""
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
