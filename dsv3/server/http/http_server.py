"""The server of HTTP/1.1 beneath an ASGI application: its listener, its connections, how many there may be, TLS.

A connection takes requests one at a time, in slices, and ends where framing or a deadline says so.
"""

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import ssl
from typing import Any

from starlette.types import ASGIApp

from dsv3.config.server_options import ServerOptions
from dsv3.server.config import Deadlines
from dsv3.server.http.exchange import (
    ADMIT,
    REQUEST_ID,
    WRITER,
    HttpExchange,
    OnAccess,
    ResponseWriter,
    response_of,
    scope_of,
)
from dsv3.server.http.wire import BadRequest, Body, body_of, find_head, parse_head
from dsv3.server.protocol.errors import ApiError

_MOST = 65_536
_SPARE = 32
_OWN_DESCRIPTORS = 64
_DESCRIPTORS_PER_API_SERVER = 4
_MAX_HELD_BYTES = 64 * 2**20
_SLICE_BYTES = 32 * 1024
"""What a connection takes in one turn of the loop before others have theirs; the read that passes it is its last."""
_BACKLOG_BYTES = 64 * 1024
"""Reading stops while this much waits for the application, or behind the request that is being answered."""
_ACCEPTS = 16  # in one turn of the loop, so that fronts which share a listener share a burst
_LOOKS = 512  # in one turn: 20 us for a connection whose client has gone
_ENDED = (7, 8)  # the kernel's TCP_CLOSE and TCP_CLOSE_WAIT
_RETRY_S = 0.5  # after the system has refused a descriptor
_CLOSE_S = 3.0
_ABORT_S = 1.0
_log = logging.getLogger("dsv3.server")


class ConnectionLimit:
    """The connections of a front.

    A connection whose request was let in is *admitted* until its response is complete; all others are *strangers*:
    they are idle, have sent no head, or are refused. At most `max_admitted` are admitted. There may be a few more
    connections than that, so that one is always left for `GET /health`; where there are so many, the one that has been
    a stranger for longest is closed for a new one. So a client without a key cannot keep others out.
    """

    def __init__(self, max_admitted: int):
        self._max_admitted = max_admitted
        self._admitted: set[Connection] = set()
        self._unauthenticated: dict[Connection, int] = {}  # oldest first, with the bytes of a head that is not complete
        self._num_held = 0

    def __len__(self) -> int:
        return len(self._admitted) + len(self._unauthenticated)

    def open(self, client: "Connection") -> None:
        """Takes a new connection; where there are too many, the oldest stranger goes."""
        if len(self) >= self._max_admitted + _SPARE:
            self._evict(next(iter(self._unauthenticated)))
        self._unauthenticated[client] = 0

    def close(self, client: "Connection") -> None:
        """Forgets a connection that is closed."""
        self._admitted.discard(client)
        self._num_held -= self._unauthenticated.pop(client, 0)

    def admit(self, client: "Connection") -> bool:
        """Returns whether a connection's request may be worked on, and lets it in."""
        if client in self._unauthenticated and len(self._admitted) < self._max_admitted:
            self.close(client)
            self._admitted.add(client)
        return client in self._admitted

    def release(self, client: "Connection") -> None:
        """Notes that a connection's response is complete."""
        if client in self._admitted:
            self._admitted.remove(client)
            self._unauthenticated[client] = 0

    def hold(self, client: "Connection", num_bytes: int) -> None:
        """Notes the size of a connection's incomplete head; the oldest ones go where all are too much together."""
        if client in self._unauthenticated:
            self._num_held += num_bytes - self._unauthenticated[client]
            self._unauthenticated[client] = num_bytes
        while self._num_held > _MAX_HELD_BYTES:
            self._evict(next(client for client, held in self._unauthenticated.items() if held))

    def _evict(self, client: "Connection") -> None:
        self.close(client)
        client.abort()


def max_admitted(max_connections: int | None, api_server_count: int) -> int:
    """Returns how many connections of a front are admitted at most; ValueError where open files are too few."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST
    if limit != resource.RLIM_INFINITY:
        most = min(_MOST, limit - _SPARE - _OWN_DESCRIPTORS - _DESCRIPTORS_PER_API_SERVER * api_server_count)
    if most < 1 or (max_connections or 0) > most:
        raise ValueError(
            f"max_connections: {max_connections or 1} is more than {max(0, most)}, for which there are open files "
            f"enough; the limit is {limit} (ulimit -n)"
        )
    return max_connections or most


class Connection(asyncio.Protocol):
    """One client's connection to a server.

    A response that is complete before its request ends the connection: nobody parses what nobody wants.
    """

    def __init__(self, server: "HttpServer", accepted: socket.socket):
        self.is_made = False
        self._server, self._accepted = server, accepted
        self._deadlines, self._limit = server.deadlines, server.limit
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._num_searched = 0
        self._is_between = False
        self._is_paused = False
        self._exchange: HttpExchange | None = None
        self._body: Body | None = None
        self._task: asyncio.Task[None] | None = None
        self._turn: asyncio.Handle | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request (asyncio calls this method and the next five)."""
        self.is_made = True
        self._transport = transport
        self._scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        self._writer = ResponseWriter(transport, self._deadlines.write_s)
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
        self._server.lost(self)

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
        self._limit.hold(self, 0 if size else len(self._buffer))
        if size:
            data = bytes(self._buffer[:size])
            del self._buffer[:size]
            self._begin(data)
        return size

    def _begin(self, data: bytes) -> None:
        head = parse_head(data)
        self._stop_waiting()
        self._body = body_of(head)
        self._exchange = HttpExchange(head, self._writer, self._go_on, self._end)
        if self._body.is_complete:
            self._body = None
            self._exchange.feed(b"", True)
        extensions = {
            WRITER: self._writer,
            ADMIT: functools.partial(self._limit.admit, self),
            REQUEST_ID: self._exchange.request_id,
        }
        scope = scope_of(head, self._scheme, extensions)
        self._task = self._loop.create_task(self._exchange.run(self._server.app, scope, self._server.on_access))

    def _take_body(self, exchange: HttpExchange, body: Body) -> int:
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
        self._limit.release(self)
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
        self._limit.release(self)
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


class Certificate:
    """What new connections prove who we are with; ValueError for files that cannot be used."""

    def __init__(self, options: ServerOptions):
        self._options = options
        try:
            self.context = _context(options)
        except OSError as error:
            raise ValueError(f"ssl_certfile: {_problem(options, error)}") from None

    def reload(self) -> None:
        """Reads the files anew; the connections that there are keep what they have, and all do if the files are bad."""
        try:
            self.context = _context(self._options)
        except OSError as error:
            _log.error("the old certificate stays: %s", _problem(self._options, error))
        else:
            _log.info("the certificate has been read anew")


def certificate_of(options: ServerOptions) -> Certificate | None:
    """Returns the certificate that the options name, None where they ask for no TLS."""
    return None if options.ssl_certfile is None else Certificate(options)


def _context(options: ServerOptions) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    assert options.ssl_certfile is not None
    context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="")  # nobody is there to be asked
    if options.ssl_ca_certs is not None:
        context.load_verify_locations(options.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _problem(options: ServerOptions, error: OSError) -> str:
    named = [options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs]
    return f"{' and '.join(name for name in named if name)} cannot be used ({error.strerror or error})"


class HttpServer:
    """Serves an application on a listener, which it closes in the end.

    `limit` is its own.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        limit: ConnectionLimit,
        deadlines: Deadlines,
        certificate: Certificate | None = None,
        on_access: OnAccess | None = None,
    ):
        self.app, self.limit, self.deadlines, self.on_access = app, limit, deadlines, on_access
        self._listener, self._certificate = listener, certificate
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self._greetings: set[asyncio.Task] = set()
        self._is_empty = asyncio.Event()
        self._retry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to accept connections."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def reload(self) -> None:
        """Reads the certificate anew."""
        if self._certificate is not None:
            self._certificate.reload()

    async def close(self) -> None:
        """Accepts no more, lets the responses on their way finish for a few seconds, and closes all connections."""
        self._stop_accepting()
        self._listener.close()
        for connection in list(self._connections):
            connection.shutdown()
        await self._until_empty(_CLOSE_S)
        for connection in list(self._connections):
            connection.abort()
        await self._until_empty(_ABORT_S)

    def _accept(self) -> None:
        kept = 0
        for _ in range(_LOOKS):
            if kept == _ACCEPTS:
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Descriptors or memory have run out; the listener stays readable, and asking on would be a busy loop.
                _log.warning("no connection can be accepted (%s)", error.strerror)
                self._stop_accepting()
                self._retry = self._loop.call_later(_RETRY_S, self.start)
                return
            if _has_gone(accepted):
                accepted.close()
            else:
                self._greet(accepted)
                kept += 1

    def _stop_accepting(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        if self._retry is not None:
            self._retry.cancel()

    def _greet(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        connection = Connection(self, accepted)
        self._connections.add(connection)
        self.limit.open(connection)
        self._is_empty.clear()
        greeting = self._loop.connect_accepted_socket(lambda: connection, accepted, **self._tls())
        task = self._loop.create_task(greeting)
        self._greetings.add(task)
        task.add_done_callback(lambda task: self._greeted(task, connection))

    def _tls(self) -> dict[str, Any]:
        if self._certificate is None:
            return {}
        seconds = self.deadlines
        times = {"ssl_handshake_timeout": seconds.head_s, "ssl_shutdown_timeout": seconds.write_s}
        return {"ssl": self._certificate.context, **times}

    def _greeted(self, task: asyncio.Task, connection: Connection) -> None:
        self._greetings.discard(task)
        if (task.cancelled() or task.exception() is not None) and not connection.is_made:
            self.lost(connection)

    def lost(self, connection: Connection) -> None:
        """Forgets a connection that is closed."""
        self._connections.discard(connection)
        self.limit.close(connection)
        if not self._connections:
            self._is_empty.set()

    async def _until_empty(self, timeout_s: float) -> None:
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), timeout_s)


def _has_gone(accepted: socket.socket) -> bool:
    """Returns whether the client closed its end before it was accepted, as far as the system tells.

    Clients that send a request and hang up come faster than requests are read: 2,048 of them, the length of the queue
    before `accept`, would hold up `/health` for 5 s if each were read first (`benchmarks.hostile`).
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    return accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _ENDED
