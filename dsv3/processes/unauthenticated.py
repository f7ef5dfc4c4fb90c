"""A port for those who know a secret, and a bound on the connections of those who have not proved it yet."""

import contextlib
import socket
import threading
from collections import Counter

_MAX_STRANGERS = 64


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; raises OSError where it cannot."""
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
    """The connections whose other end has not proved yet that it knows the secret."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: dict[socket.socket, str] = {}  # the oldest first

    def add(self, connection: socket.socket, address: str) -> None:
        """Notes a connection; where there are too many, one that is displaced ends for both sides."""
        with self._lock:
            self._addresses[connection] = address
            if len(self._addresses) > _MAX_STRANGERS:
                [(most, _)] = Counter(self._addresses.values()).most_common(1)
                displaced = next(each for each, other in self._addresses.items() if other == most)
                del self._addresses[displaced]
                with contextlib.suppress(OSError):
                    displaced.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def remove(self, connection: socket.socket) -> None:
        """Forgets a connection: its other end is known now, or has been refused."""
        with self._lock:
            self._addresses.pop(connection, None)
