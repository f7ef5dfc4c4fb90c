"""The listener for peers that must authenticate."""

import contextlib
import logging
import socket

import pytest

from dsv3.processes.peer_listener import PeerListener, UnauthenticatedConnections


def test_a_flood_from_one_address_displaces_no_other_address() -> None:
    strangers, pairs = UnauthenticatedConnections(), [socket.socketpair() for _ in range(200)]
    (honest, theirs), *flood = pairs
    strangers.add(honest, "10.0.0.1")
    for connection, _ in flood:
        strangers.add(connection, "10.0.0.2")
    theirs.sendall(b"proof")
    assert honest.recv(10) == b"proof"
    displaced = [other for _, other in flood if is_ended(other)]
    assert displaced == [other for _, other in flood[: len(flood) + 1 - 64]]
    for each in pairs:
        for connection in each:
            connection.close()


def is_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return connection.recv(1) == b""
    return False


def test_a_connection_is_closed_whatever_serving_it_raises() -> None:
    def serve(connection: socket.socket, *_: object) -> None:
        raise KeyError(connection.recv(10))

    listener = PeerListener("127.0.0.1", 0, serve, "a test", logging.getLogger(__name__))
    listener.open()
    with socket.create_connection(listener.address, 30.0) as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b""
    while listener.is_serving:
        pass
    listener.close()


def test_an_invalid_host_name_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match=r"'a\.\.b' is not a host name"):
        PeerListener("a..b", 0, lambda *_: None, "a test", logging.getLogger(__name__))
