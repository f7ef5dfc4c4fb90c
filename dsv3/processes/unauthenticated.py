"""Listens on a port, and limits how many connections may be open before they have authenticated."""

import contextlib
import socket
import threading
from collections import Counter

_MAX_UNAUTHENTICATED = 64


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises OSError if the address is taken or invalid."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


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
