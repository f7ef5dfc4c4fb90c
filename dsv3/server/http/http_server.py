"""The HTTP/1.1 server beneath an ASGI application: listener, connections, connection limit, TLS.

A connection handles one request at a time. It parses input in slices, so that one client does not block the event loop,
and closes on malformed framing or an expired deadline.
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
    error_response,
    make_scope,
)
from dsv3.server.http.wire import BadRequest, Body, find_head, make_body, parse_head
from dsv3.server.protocol.errors import ApiError

_MAX_CONNECTIONS = 65_536
_SPARE = 32
_OWN_DESCRIPTORS = 64
_OPEN_FILES = 2**18  # enough for a router of `_MAX_CONNECTIONS`, which opens one to an instance for each
_DESCRIPTORS_PER_API_SERVER = 4
_MAX_HEAD_BYTES_TOGETHER = 64 * 2**20
_SLICE_BYTES = 32 * 1024
"""Input that a connection parses in one iteration of the event loop."""
_BACKLOG_BYTES = 64 * 1024
"""Reading pauses while this much input waits for the application, or behind the current request."""
_MAX_ACCEPTED = 16  # in one iteration, so that API servers that share the listener share a burst
_MAX_ACCEPT_CALLS = 512  # in one iteration, also of connections that their clients have closed
_CLOSED_STATES = (7, 8)  # the kernel's TCP_CLOSE and TCP_CLOSE_WAIT
_RETRY_S = 0.5  # after `accept` failed for lack of descriptors or memory
_CLOSE_S = 3.0
_ABORT_S = 1.0
_log = logging.getLogger("dsv3.server")


class ConnectionLimit:
    """Limits the HTTP connections of an API server.

    A connection whose request was authenticated is *admitted* until its response is complete; all others are
    *unauthenticated*: idle, without a complete head, or rejected. At most `max_admitted` are admitted. A few more may
    be open, so that `GET /health` is always served; above that, a new connection evicts the one that has been
    unauthenticated for longest. So clients without a key cannot lock others out.
    """

    def __init__(self, max_admitted: int):
        self._max_admitted = max_admitted
        self._admitted: set[Connection] = set()
        self._unauthenticated: dict[Connection, int] = {}  # oldest first, with the bytes of an incomplete head
        self._num_head_bytes = 0

    def __len__(self) -> int:
        return len(self._admitted) + len(self._unauthenticated)

    def add(self, client: "Connection") -> None:
        """Adds a new connection; evicts the oldest unauthenticated one above the limit."""
        if len(self) >= self._max_admitted + _SPARE:
            self._evict(next(iter(self._unauthenticated)))
        self._unauthenticated[client] = 0

    def close(self, client: "Connection") -> None:
        self._admitted.discard(client)
        self._num_head_bytes -= self._unauthenticated.pop(client, 0)

    def admit(self, client: "Connection") -> bool:
        """Admits a connection if the limit allows it; returns whether it is admitted."""
        if client in self._unauthenticated and len(self._admitted) < self._max_admitted:
            self.close(client)
            self._admitted.add(client)
        return client in self._admitted

    def release(self, client: "Connection") -> None:
        """Ends the admission of a connection whose response is complete."""
        if client in self._admitted:
            self._admitted.remove(client)
            self._unauthenticated[client] = 0

    def record_head_bytes(self, client: "Connection", num_bytes: int) -> None:
        """Records the size of a connection's incomplete head; above 64 MiB together, evicts the oldest ones."""
        if client in self._unauthenticated:
            self._num_head_bytes += num_bytes - self._unauthenticated[client]
            self._unauthenticated[client] = num_bytes
        while self._num_head_bytes > _MAX_HEAD_BYTES_TOGETHER:
            self._evict(next(client for client, held in self._unauthenticated.items() if held))

    def _evict(self, client: "Connection") -> None:
        self.close(client)
        client.abort()


def raise_open_files_limit() -> None:
    """Raises the soft limit of open files (`ulimit -n`) to the hard one, for this process and those that it starts.

    Logs a warning where it stays below the most connections that a process admits.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, wanted = (_OPEN_FILES if each == resource.RLIM_INFINITY else min(each, _OPEN_FILES) for each in limits)
    while soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
            soft = wanted
        except (OSError, ValueError):  # macOS has another limit, which `getrlimit` does not return
            wanted //= 2
    if soft < _MAX_CONNECTIONS:
        _log.warning(
            "this process may open %d files, which bounds its connections; raise the hard limit (ulimit -Hn) to %d",
            soft,
            _MAX_CONNECTIONS,
        )


def max_admitted(max_connections: int | None, api_server_count: int, files_per_request: int = 1) -> int:
    """Returns how many connections an API server admits; raises ValueError if `ulimit -n` allows fewer.

    Each takes `files_per_request` open files: the connection, and in a router that to an instance.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_CONNECTIONS
    if limit != resource.RLIM_INFINITY:
        left = limit - _SPARE - _OWN_DESCRIPTORS - _DESCRIPTORS_PER_API_SERVER * api_server_count
        most = min(_MAX_CONNECTIONS, left // files_per_request)
    if most < 1 or (max_connections or 0) > most:
        raise ValueError(
            f"max_connections: {max_connections or 1} is more than the {max(0, most)} that {limit} open files allow; "
            "lower it or raise ulimit -n"
        )
    return max_connections or most


class Connection(asyncio.Protocol):
    """One client's connection.

    If a response is complete before the request's body has been read, the connection closes and the rest is not parsed.
    """

    def __init__(self, server: "HttpServer", accepted: socket.socket):
        self.is_made = False
        self._server, self._accepted = server, accepted
        self._deadlines, self._limit = server.deadlines, server.limit
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._num_searched = 0
        self._is_idle = False
        self._is_paused = False
        self._exchange: HttpExchange | None = None
        self._body: Body | None = None
        self._task: asyncio.Task[None] | None = None
        self._next_slice: asyncio.Handle | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for a request, with a deadline. Called by asyncio, like the next five methods."""
        self.is_made = True
        self._transport = transport
        self._scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        self._writer = ResponseWriter(transport, self._deadlines.write_s)
        self._set_deadline(self._deadlines.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the exchange, which aborts its request, and removes the connection."""
        self._cancel_deadline()
        if self._next_slice is not None:
            self._next_slice.cancel()
        self._writer.on_connection_lost()
        if self._exchange is not None:
            self._exchange.disconnect()
            self._exchange = None  # breaks a reference cycle, to free both without the garbage collector
        self._server.on_connection_lost(self)

    def data_received(self, data: bytes) -> None:
        """Buffers input and parses the first slice."""
        if self._is_idle:
            self._is_idle = False
            self._set_deadline(self._deadlines.head_s)
        self._buffer += data
        self._resume_parsing()

    def eof_received(self) -> None:
        """Treats a client that has closed its sending direction as disconnected."""
        if self._exchange is not None:
            self._exchange.disconnect()
        self._writer.close()

    def pause_writing(self) -> None:
        """Pauses the response: the client reads too slowly."""
        self._writer.pause()

    def resume_writing(self) -> None:
        """Resumes the response."""
        self._writer.resume()

    def shutdown(self) -> None:
        """Closes the connection, after the current response if there is one."""
        if self._exchange is not None:
            self._exchange.keeps_alive = False
        elif self.is_made:
            self._writer.close()
        else:
            self.abort()

    def abort(self) -> None:
        """Closes the connection at once."""
        if self.is_made:
            self._writer.abort()
        else:
            with contextlib.suppress(OSError):  # the client has disconnected
                self._accepted.shutdown(socket.SHUT_RDWR)

    def _resume_parsing(self) -> None:
        if self._next_slice is None:
            self._process_buffer()

    def _process_buffer(self) -> None:
        """Parses a slice of the buffer; the next iteration of the event loop parses the rest.

        Reading is paused meanwhile: uvloop would read up to 32 times in a row, 256 KiB each.
        """
        self._next_slice = None
        done = 0
        try:
            while done < _SLICE_BYTES and (consumed := self._consume()):
                done += consumed
        except BadRequest as error:
            self._reject(400, str(error))
        if done >= _SLICE_BYTES:
            self._next_slice = self._loop.call_soon(self._process_buffer)
        self._update_reading()

    def _consume(self) -> int:
        """Consumes the next part of the buffer; returns its size, 0 if nothing can be consumed now."""
        if not self._buffer:
            return 0
        if self._writer.is_closing:
            return self._drop()
        if self._exchange is None:
            return self._consume_head()
        if self._body is not None and self._exchange.is_read and len(self._exchange.body) < _BACKLOG_BYTES:
            return self._consume_body(self._exchange, self._body)
        return 0

    def _drop(self) -> int:
        size = len(self._buffer)
        self._buffer.clear()
        return size

    def _consume_head(self) -> int:
        if self._buffer.startswith(b"\r\n"):  # RFC 9112, 2.2: old clients send one after a body
            del self._buffer[:2]
            self._num_searched = 0
            return 2
        size = find_head(self._buffer, self._num_searched)
        self._num_searched = 0 if size else len(self._buffer)
        self._limit.record_head_bytes(self, 0 if size else len(self._buffer))
        if size:
            data = bytes(self._buffer[:size])
            del self._buffer[:size]
            self._begin_exchange(data)
        return size

    def _begin_exchange(self, data: bytes) -> None:
        head = parse_head(data)
        self._cancel_deadline()
        self._body = make_body(head)
        self._exchange = HttpExchange(head, self._writer, self._resume_parsing, self._on_response_complete)
        if self._body.is_complete:
            self._body = None
            self._exchange.feed(b"", True)
        extensions = {
            WRITER: self._writer,
            ADMIT: functools.partial(self._limit.admit, self),
            REQUEST_ID: self._exchange.request_id,
        }
        scope = make_scope(head, self._scheme, extensions)
        self._task = self._loop.create_task(self._exchange.run(self._server.app, scope, self._server.on_access))

    def _consume_body(self, exchange: HttpExchange, body: Body) -> int:
        size, content = body.consume(self._buffer)
        if body.is_complete:
            self._body = None
            exchange.keeps_alive &= not body.has_more
        exchange.feed(content, body.is_complete)
        return size

    def _on_response_complete(self) -> None:
        """Ends an exchange and waits for the next request, or closes the connection."""
        assert self._exchange is not None
        keeps_alive, self._exchange = self._exchange.keeps_alive, None
        self._limit.release(self)
        if self._body is not None:
            self._writer.half_close(self._deadlines.linger_s)
        elif not keeps_alive:
            self._writer.close()
        else:
            self._is_idle = not self._buffer
            self._set_deadline(self._deadlines.keep_alive_s if self._is_idle else self._deadlines.head_s)
        if self._next_slice is None:
            self._next_slice = self._loop.call_soon(self._process_buffer)

    def _reject(self, status: int, message: str) -> None:
        """Sends an error for a malformed or late request, and closes the connection."""
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
            self._cancel_deadline()
            self._transport.write(_last_response(ApiError(status, message)))
            self._writer.half_close(self._deadlines.linger_s)

    def _update_reading(self) -> None:
        waiting = len(self._buffer) + len(self._exchange.body) if self._exchange is not None else 0
        is_paused = self._next_slice is not None or waiting > _BACKLOG_BYTES
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    def _set_deadline(self, seconds: float) -> None:
        self._cancel_deadline()
        self._deadline = self._loop.call_later(seconds, self._on_deadline)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        if self._buffer:
            self._reject(408, f"the head of the request did not arrive within {self._deadlines.head_s:g} s")
        else:
            self._writer.close()


def _last_response(error: ApiError) -> bytes:
    response = error_response(error)
    fields = b"".join(b"%b: %b\r\n" % field for field in response.raw_headers)
    reason = {400: b"Bad Request", 408: b"Request Timeout"}[error.status]
    return b"HTTP/1.1 %d %b\r\n%bconnection: close\r\n\r\n%b" % (error.status, reason, fields, bytes(response.body))


class Certificate:
    """The TLS context of new connections, from the files that the options name; raises ValueError for invalid files."""

    def __init__(self, options: ServerOptions):
        self._options = options
        try:
            self.context = _context(options)
        except OSError as error:
            raise ValueError(f"ssl_certfile: {_problem(options, error)}") from None

    def reload(self) -> None:
        """Reloads the files for new connections; keeps the old certificate if they are invalid."""
        try:
            self.context = _context(self._options)
        except OSError as error:
            _log.error("the old certificate stays in use: %s", _problem(self._options, error))
        else:
            _log.info("reloaded the certificate")


def certificate_of(options: ServerOptions) -> Certificate | None:
    """Returns the certificate that the options name, None without TLS."""
    return None if options.ssl_certfile is None else Certificate(options)


def _context(options: ServerOptions) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    assert options.ssl_certfile is not None
    context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="")  # never prompt
    if options.ssl_ca_certs is not None:
        context.load_verify_locations(options.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _problem(options: ServerOptions, error: OSError) -> str:
    named = [options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs]
    return f"{' and '.join(name for name in named if name)} cannot be used ({error.strerror or error})"


class HttpServer:
    """Serves an application on `listener`, which `close` closes; connections count against `limit`."""

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
        self._connecting: set[asyncio.Task] = set()
        self._is_empty = asyncio.Event()
        self._retry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def reload(self) -> None:
        if self._certificate is not None:
            self._certificate.reload()

    async def close(self) -> None:
        """Stops accepting, gives current responses a few seconds to finish, and closes all connections."""
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
        for _ in range(_MAX_ACCEPT_CALLS):
            if kept == _MAX_ACCEPTED:
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors or memory. The listener stays readable, so retrying at once would be a busy loop.
                _log.warning("cannot accept connections (%s); retrying", error.strerror)
                self._stop_accepting()
                self._retry = self._loop.call_later(_RETRY_S, self.start)
                return
            if _is_closed_by_client(accepted):
                accepted.close()
            else:
                self._open_connection(accepted)
                kept += 1

    def _stop_accepting(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        if self._retry is not None:
            self._retry.cancel()

    def _open_connection(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        connection = Connection(self, accepted)
        self._connections.add(connection)
        self.limit.add(connection)
        self._is_empty.clear()
        connecting = self._loop.connect_accepted_socket(lambda: connection, accepted, **self._tls())
        task = self._loop.create_task(connecting)
        self._connecting.add(task)
        task.add_done_callback(lambda task: self._on_connected(task, connection))

    def _tls(self) -> dict[str, Any]:
        if self._certificate is None:
            return {}
        seconds = self.deadlines
        times = {"ssl_handshake_timeout": seconds.head_s, "ssl_shutdown_timeout": seconds.write_s}
        return {"ssl": self._certificate.context, **times}

    def _on_connected(self, task: asyncio.Task, connection: Connection) -> None:
        self._connecting.discard(task)
        if (task.cancelled() or task.exception() is not None) and not connection.is_made:
            self.on_connection_lost(connection)

    def on_connection_lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self.limit.close(connection)
        if not self._connections:
            self._is_empty.set()

    async def _until_empty(self, timeout_s: float) -> None:
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), timeout_s)


def _is_closed_by_client(accepted: socket.socket) -> bool:
    """Returns whether the client has closed its end before `accept`; False where the system cannot say.

    Parsing the requests of a full accept queue of such connections would delay `/health` by 5 s (`benchmarks.attacks`).
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    return accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _CLOSED_STATES
