"""Hands a front that runs already its connections to engines, through a Unix socket that it has inherited."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

_NUMBER_BYTES = 4


def hand_over(ferry: socket.socket, number: int, connection: socket.socket) -> None:
    """Sends the connection to the engine with that number and closes it here; a front that has gone misses it."""
    with connection, contextlib.suppress(OSError):  # it has gone, or has taken none of many: then it is replaced
        socket.send_fds(ferry, [number.to_bytes(_NUMBER_BYTES, "little")], [connection.fileno()])


class Ferry:
    """The front's end, on the running loop: `on_connection` gets each engine's number with the connection."""

    def __init__(self, ferry: socket.socket, on_connection: Callable[[int, socket.socket], None]):
        self._ferry, self._on_connection = ferry, on_connection
        ferry.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ferry.fileno(), self._receive)

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data, descriptors, *_ = socket.recv_fds(self._ferry, _NUMBER_BYTES, 1)
            if not descriptors:  # the first front has gone, and this one ends with it
                self._loop.remove_reader(self._ferry.fileno())
                return
            self._on_connection(int.from_bytes(data, "little"), socket.socket(fileno=descriptors[0]))
