"""Accepts connections on a listener, and closes them in the end."""

import asyncio
import contextlib
import logging
import socket
from typing import Any

from dsv3.server.http.protocol import Connection, Site
from dsv3.server.http.tls import Certificate

_ACCEPTS = 16  # in one turn of the loop, so that fronts which share a listener share a burst
_LOOKS = 512  # in one turn: 20 us for a connection whose client has gone
_ENDED = (7, 8)  # the kernel's TCP_CLOSE and TCP_CLOSE_WAIT
_RETRY_S = 0.5  # after the system has refused a descriptor
_CLOSE_S = 3.0
_ABORT_S = 1.0
_log = logging.getLogger("dsv3.server")


class HttpServer:
    """Serves a site on a listener, which it closes in the end."""

    def __init__(self, site: Site, listener: socket.socket, certificate: Certificate | None = None):
        self._site, self._listener, self._certificate = site, listener, certificate
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
        connection = Connection(self._site, accepted, self._lost)
        self._connections.add(connection)
        self._site.admission.open(connection)
        self._is_empty.clear()
        greeting = self._loop.connect_accepted_socket(lambda: connection, accepted, **self._tls())
        task = self._loop.create_task(greeting)
        self._greetings.add(task)
        task.add_done_callback(lambda task: self._greeted(task, connection))

    def _tls(self) -> dict[str, Any]:
        if self._certificate is None:
            return {}
        seconds = self._site.deadlines
        times = {"ssl_handshake_timeout": seconds.head_s, "ssl_shutdown_timeout": seconds.write_s}
        return {"ssl": self._certificate.context, **times}

    def _greeted(self, task: asyncio.Task, connection: Connection) -> None:
        self._greetings.discard(task)
        if (task.cancelled() or task.exception() is not None) and not connection.is_made:
            self._lost(connection)

    def _lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._site.admission.close(connection)
        if not self._connections:
            self._is_empty.set()

    async def _until_empty(self, timeout_s: float) -> None:
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), timeout_s)


def _has_gone(accepted: socket.socket) -> bool:
    """Returns whether the client closed its end before it was accepted, as far as the system tells.

    Clients that send a request and hang up come faster than requests are read: 2,048 of them, the length of the queue
    before `accept`, would hold up `/health` for 5 s if each were read first (`benchmarks/README.md`, "Attacks").
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    return accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _ENDED
