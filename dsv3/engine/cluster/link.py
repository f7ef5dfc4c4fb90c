"""Declares what a follower and its supervisor tell each other, as frames over a Unix socket. Imports no jax."""

import contextlib
import socket
import threading
from collections.abc import Callable

import msgspec

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.engine.cluster.generation import Generation
from dsv3.processes import frames

LOAD = "dsv3.engine.cluster.start:load_model"


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Follow the leader. `load` is "module:function" of what loads the parts of the engine.

    `last` is the generation that the process before has been in.
    """

    cluster: ClusterOptions
    model_dir: str
    engine: EngineOptions
    load: str = LOAD
    last: Generation | None = None


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """The process runs: comes from a thread of its own, whatever the process does."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The leader has let the process into this generation."""

    generation: Generation


class Serving(msgspec.Struct, frozen=True, tag=True):
    """All processes of the generation are ready."""


class Waits(msgspec.Struct, frozen=True, tag=True):
    """The others have gone on without the process: when it is told to end, the next gang starts, with this place."""


class Alone(msgspec.Struct, frozen=True, tag=True):
    """No leader was found in time, or the one found lets this process not in: there is no use in another try."""


News = Begun | Serving | Waits | Alone
Tell = Callable[[News], None]
FromFollower = Pulse | News

_to_follower = msgspec.msgpack.Decoder(Follow)
_from_follower: msgspec.msgpack.Decoder[FromFollower] = msgspec.msgpack.Decoder(FromFollower)
_READ_BYTES = 2**16


class Link:
    """One end of the socket. Any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self._splitter = frames.Splitter()

    def send(self, message: Follow | FromFollower) -> None:
        """Sends a message; one to a process that has gone is dropped."""
        with self._lock, contextlib.suppress(OSError):
            self.connection.sendall(frames.encode(message))

    def order(self) -> Follow | None:
        """Waits for the supervisor's order; None when it has gone."""
        while received := self._receive():
            for body in self._splitter.add(received):
                return _to_follower.decode(body)
        return None

    def news(self) -> list[FromFollower] | None:
        """Returns what has come since, waiting for something to come; None when the follower has gone."""
        received = self._receive()
        if not received:
            return None
        return [_from_follower.decode(body) for body in self._splitter.add(received)]

    def wait_for_end(self) -> None:
        """Waits until the other process has gone."""
        while self._receive():
            pass

    def _receive(self) -> bytes:
        try:
            return self.connection.recv(_READ_BYTES)
        except OSError:
            return b""
