"""Listens on a port for peers that must authenticate, and bounds how many connections are open before they have.

Above the bound the address with most of these connections loses its oldest one. So an attacker displaces itself, and a
displaced peer retries.
"""

import contextlib
import functools
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

_MAX_UNAUTHENTICATED = 64
_MAX_WARNINGS = 20
_PAUSE_S = 0.1  # after an error of accept, such as no free descriptor; connections that time out free theirs

Serve = Callable[[socket.socket, str, Callable[[], None]], None]
"""Serves a connection from an address; calls its last argument once the peer has authenticated."""


class UnauthenticatedConnections:
    """Up to 64 connections whose peers have not authenticated yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: dict[socket.socket, str] = {}  # oldest first

    def add(self, connection: socket.socket, address: str) -> None:
        """Adds a connection; above the limit, shuts down the oldest one of the address that has most."""
        with self._lock:
            self._addresses[connection] = address
            if len(self._addresses) > _MAX_UNAUTHENTICATED:
                [(most, _)] = Counter(self._addresses.values()).most_common(1)
                displaced = next(each for each, other in self._addresses.items() if other == most)
                del self._addresses[displaced]
                with contextlib.suppress(OSError):
                    displaced.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._addresses.pop(connection, None)


class PeerListener:
    """A listening port. `serve` runs for each connection on a thread of its own, named `name`.

    Where `serve` raises, the connection is closed and `log` gets a warning, of which there are 20 at most. The
    constructor listens, and raises OSError where it cannot; `open` begins to accept.
    """

    def __init__(self, host: str, port: int, serve: Serve, name: str, log: logging.Logger) -> None:
        self._serve, self._name, self._log = serve, name, log
        self._unauthenticated = UnauthenticatedConnections()
        self._lock = threading.Lock()
        self._num_served = self._num_warnings = 0
        self._closed = threading.Event()
        self._listener = _listen(host, port)

    @property
    def address(self) -> tuple[str, int]:
        host, port, *_ = self._listener.getsockname()
        return host, port

    @property
    def is_serving(self) -> bool:
        """Whether `serve` runs for some connection."""
        return self._num_served > 0

    def open(self) -> None:
        """Begins to accept connections."""
        threading.Thread(target=self._accept, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Stops listening; open connections continue."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone leaves a thread in accept, and the port open
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                self._begin(*self._listener.accept())
            except (OSError, RuntimeError) as error:  # no descriptor, or no thread
                if not self._closed.wait(_PAUSE_S):
                    self._warn(f"{self._name}: cannot accept a connection: {error}")

    def _begin(self, connection: socket.socket, address: tuple[Any, ...]) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            guard = stack.enter_context(connection.dup())  # shuts it down, even where TLS has taken the first one
            self._count(1)
            stack.callback(self._count, -1)
            self._unauthenticated.add(guard, address[0])
            stack.callback(self._unauthenticated.remove, guard)
            threading.Thread(
                target=self._run, args=(connection, guard, address[0]), name=self._name, daemon=True
            ).start()
            stack.pop_all()  # the thread ends them

    def _run(self, connection: socket.socket, guard: socket.socket, address: str) -> None:
        release = functools.partial(self._release, guard)
        try:
            self._serve(connection, address, release)
        except Exception as error:
            connection.close()
            self._warn(f"{self._name}: the connection from {address} ends: {error}")
        finally:
            release()
            self._count(-1)

    def _release(self, guard: socket.socket) -> None:
        self._unauthenticated.remove(guard)
        guard.close()

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_served += change

    def _warn(self, text: str) -> None:
        with self._lock:
            self._num_warnings += 1
        if self._num_warnings <= _MAX_WARNINGS:
            self._log.warning("%s", text)


def _listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises OSError if the address is taken or invalid."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError:  # an empty label, or one that is too long
        raise OSError(f"{host!r} is not a host name") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
