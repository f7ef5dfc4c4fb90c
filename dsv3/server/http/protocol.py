"""One client's connection: takes requests one at a time, in slices, and ends where framing or a deadline says so."""

import asyncio
import contextlib
import dataclasses
import functools
import socket
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

from dsv3.server.answers.errors import ApiError
from dsv3.server.config import Deadlines
from dsv3.server.http.access import Access
from dsv3.server.http.admission import Admission
from dsv3.server.http.errors import response_of
from dsv3.server.http.exchange import REQUEST_ID, Exchange, scope_of
from dsv3.server.http.wire import BadRequest, Body, body_of, find_head, parse_head
from dsv3.server.http.writer import EXTENSION, Writer

ADMIT = "dsv3.admit"
"""Key of a function in an ASGI scope's extensions: returns whether the connection's request may be worked on."""

_SLICE_BYTES = 32 * 1024
"""What a connection takes in one turn of the loop before others have theirs; the read that passes it is its last."""

_BACKLOG_BYTES = 64 * 1024
"""Reading stops while this much waits for the application, or behind the request that is being answered."""


@dataclasses.dataclass(frozen=True)
class Site:
    """What all connections of a front have in common; `on_access` is called after each request."""

    app: ASGIApp
    deadlines: Deadlines
    admission: Admission
    on_access: Callable[[Access], None] | None = None


class Connection(asyncio.Protocol):
    """One client's connection; `on_lost` is called with it when it is closed.

    A response that is complete before its request ends the connection: nobody parses what nobody wants.
    """

    def __init__(self, site: Site, accepted: socket.socket, on_lost: Callable[["Connection"], None]):
        self.is_made = False
        self._site, self._accepted, self._on_lost = site, accepted, on_lost
        self._deadlines, self._admission = site.deadlines, site.admission
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._num_searched = 0
        self._is_between = False
        self._is_paused = False
        self._exchange: Exchange | None = None
        self._body: Body | None = None
        self._task: asyncio.Task[None] | None = None
        self._turn: asyncio.Handle | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request (asyncio calls this method and the next five)."""
        self.is_made = True
        self._transport = transport
        self._scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        self._writer = Writer(transport, self._deadlines.write_s)
        self._wait(self._deadlines.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells everybody concerned."""
        self._stop_waiting()
        if self._turn is not None:
            self._turn.cancel()
        self._writer.lost()
        if self._exchange is not None:
            self._exchange.disconnect()
            self._exchange = None  # each holds the other: both would wait for the garbage collector
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        """Takes what has come, or a slice of it."""
        if self._is_between:
            self._is_between = False
            self._wait(self._deadlines.head_s)
        self._buffer += data
        self._go_on()

    def eof_received(self) -> None:
        """Takes a client that sends no more for one that has gone."""
        if self._exchange is not None:
            self._exchange.disconnect()
        self._writer.close()

    def pause_writing(self) -> None:
        """Notes that the client reads slowly."""
        self._writer.pause()

    def resume_writing(self) -> None:
        """Notes that the client has read."""
        self._writer.resume()

    def shutdown(self) -> None:
        """Closes the connection, after the response if one is on its way."""
        if self._exchange is not None:
            self._exchange.keeps_alive = False
        elif self.is_made:
            self._writer.close()
        else:
            self.abort()

    def abort(self) -> None:
        """Closes the connection now."""
        if self.is_made:
            self._writer.abort()
        else:
            with contextlib.suppress(OSError):  # it has gone already
                self._accepted.shutdown(socket.SHUT_RDWR)

    def _go_on(self) -> None:
        if self._turn is None:
            self._work()

    def _work(self) -> None:
        """Takes a slice of what has come; the loop's next turn takes the rest.

        uvloop reads a socket up to 32 times in a row, 256 KiB each, while it is not paused.
        """
        self._turn = None
        done = 0
        try:
            while done < _SLICE_BYTES and (taken := self._take()):
                done += taken
        except BadRequest as error:
            self._refuse(400, str(error))
        if done >= _SLICE_BYTES:
            self._turn = self._loop.call_soon(self._work)
        self._pace()

    def _take(self) -> int:
        """Takes the next part of what has come; returns its size, 0 where nothing can be taken now."""
        if not self._buffer:
            return 0
        if self._writer.is_closing:
            return self._drop()
        if self._exchange is None:
            return self._take_head()
        if self._body is not None and self._exchange.is_read and len(self._exchange.body) < _BACKLOG_BYTES:
            return self._take_body(self._exchange, self._body)
        return 0

    def _drop(self) -> int:
        size = len(self._buffer)
        self._buffer.clear()
        return size

    def _take_head(self) -> int:
        if self._buffer.startswith(b"\r\n"):  # RFC 9112, 2.2: clients of old send one after a body
            del self._buffer[:2]
            self._num_searched = 0
            return 2
        size = find_head(self._buffer, self._num_searched)
        self._num_searched = 0 if size else len(self._buffer)
        self._admission.hold(self, 0 if size else len(self._buffer))
        if size:
            data = bytes(self._buffer[:size])
            del self._buffer[:size]
            self._begin(data)
        return size

    def _begin(self, data: bytes) -> None:
        head = parse_head(data)
        self._stop_waiting()
        self._body = body_of(head)
        self._exchange = Exchange(head, self._writer, self._go_on, self._end)
        if self._body.is_complete:
            self._body = None
            self._exchange.feed(b"", True)
        extensions = {
            EXTENSION: self._writer,
            ADMIT: functools.partial(self._admission.admit, self),
            REQUEST_ID: self._exchange.request_id,
        }
        self._task = self._loop.create_task(self._run(self._exchange, scope_of(head, self._scheme, extensions)))

    async def _run(self, exchange: Exchange, scope: dict[str, Any]) -> None:
        await exchange.run(self._site.app, scope)
        if self._site.on_access is not None:
            self._site.on_access(exchange.access())

    def _take_body(self, exchange: Exchange, body: Body) -> int:
        size, content = body.take(self._buffer)
        if body.is_complete:
            self._body = None
            exchange.keeps_alive &= not body.has_more
        exchange.feed(content, body.is_complete)
        return size

    def _end(self) -> None:
        """Ends an exchange: its response is complete."""
        assert self._exchange is not None
        keeps_alive, self._exchange = self._exchange.keeps_alive, None
        self._admission.release(self)
        if self._body is not None:
            self._writer.half_close(self._deadlines.linger_s)
        elif not keeps_alive:
            self._writer.close()
        else:
            self._is_between = not self._buffer
            self._wait(self._deadlines.keep_alive_s if self._is_between else self._deadlines.head_s)
        if self._turn is None:
            self._turn = self._loop.call_soon(self._work)

    def _refuse(self, status: int, message: str) -> None:
        """Answers what is no request, and ends the connection."""
        self._drop()
        exchange, self._exchange = self._exchange, None
        self._admission.release(self)
        has_begun = exchange is not None and exchange.status != 0
        if exchange is not None:
            exchange.status = exchange.status or status
            exchange.disconnect()
        if has_begun:
            self._writer.abort()
        elif not self._writer.is_closing:
            self._stop_waiting()
            self._transport.write(_last_response(ApiError(status, message)))
            self._writer.half_close(self._deadlines.linger_s)

    def _pace(self) -> None:
        waiting = len(self._buffer) + len(self._exchange.body) if self._exchange is not None else 0
        is_paused = self._turn is not None or waiting > _BACKLOG_BYTES
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._deadline = self._loop.call_later(seconds, self._waited)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _waited(self) -> None:
        if self._buffer:
            self._refuse(408, "the head of the request took too long to arrive")
        else:
            self._writer.close()


def _last_response(error: ApiError) -> bytes:
    response = response_of(error)
    fields = b"".join(b"%b: %b\r\n" % field for field in response.raw_headers)
    reason = {400: b"Bad Request", 408: b"Request Timeout"}[error.status]
    return b"HTTP/1.1 %d %b\r\n%bconnection: close\r\n\r\n%b" % (error.status, reason, fields, bytes(response.body))
