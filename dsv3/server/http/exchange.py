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

from starlette.types import ASGIApp

from dsv3.server.answers.answer import Summary
from dsv3.server.http.access import Access
from dsv3.server.http.wire import Head
from dsv3.server.http.writer import Writer
from dsv3.server.tenants import Tenant

REQUEST_ID = "dsv3.request_id"
"""Key of the request's id, a text, in an ASGI scope's extensions."""

TENANT = "dsv3.tenant"
"""Key of the tenant that sent the request, there too; absent on a server without API keys."""

SUMMARY = "dsv3.summary"
"""Key of a function that returns the `Summary` of the answer, there too; absent where there is none."""

_log = logging.getLogger("dsv3.server")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_MAX_LOGGED_PATH = 1024
_CLOSE = (b"connection", b"close")


class Exchange:
    """One request and its response.

    `on_read` is called when the application wants more of the body, `on_end` when the response is complete. What it
    never asks for is never parsed.
    """

    def __init__(self, head: Head, writer: Writer, on_read: Callable[[], None], on_end: Callable[[], None]):
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
        self._tenant: Tenant | None = None
        self._summary: Summary | None = None
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

    async def run(self, app: ASGIApp, scope: MutableMapping[str, Any]) -> None:
        """Has the application answer; what it leaves unfinished ends the connection."""
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            _log.exception("request %s: %s %s failed", described(scope), scope["method"], scope["path"])
        self._tenant = scope["extensions"].get(TENANT)
        if (summary := scope["extensions"].pop(SUMMARY, None)) is not None:
            self._summary = summary()
        if not self.is_complete and not self._is_gone:
            if not self.status:
                await self._fail()
            else:
                self._writer.abort()

    def access(self) -> Access:
        """Returns the line of the access log; status 499: the client had gone."""
        answer = self._summary
        first = None if answer is None else answer.first_token_at
        return Access(
            time=round(time.time(), 3),
            request_id=self.request_id,
            tenant=None if self._tenant is None else self._tenant.name,
            method=self._head.method,
            path=self._head.target.partition(b"?")[0].decode("ascii")[:_MAX_LOGGED_PATH],
            status=self.status or 499,
            seconds=round(time.monotonic() - self._began, 6),
            bytes=self._writer.num_bytes - self._num_bytes_before,
            complete=self.is_complete,
            model=None if answer is None else answer.model,
            prompt_tokens=None if answer is None else answer.prompt_tokens,
            completion_tokens=None if answer is None else answer.completion_tokens,
            first_token_s=None if first is None else round(first - self._began, 6),
        )

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
