"""The numbers of gangs, and what a follower and its supervisor send each other over a Unix socket. Imports no jax."""

import contextlib
import hashlib
import hmac
import socket
import threading

import msgspec

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.processes import frames


class Incarnation(msgspec.Struct, frozen=True):
    """One gang: the processes that start together and end together. One that is over can harm no later one.

    `number` counts from 0 the gangs of a first front, and `front` is a random name of that front: another front, of a
    server that was started again, counts anew.
    """

    number: int = 0
    front: str = ""

    def __str__(self) -> str:
        return f"generation {self.number}"

    def is_over_for(self, last: "Incarnation | None") -> bool:
        """Returns whether a process that was in generation `last` must have nothing to do with this one any more."""
        return last is not None and last.front == self.front and last.number >= self.number

    def secret(self, key: bytes) -> bytes:
        """Returns the secret of this gang alone, made from the key of the instance.

        jax's coordinator asks for certificates made from it. So a process that was late to leave an earlier gang cannot
        say there that it is process 1 of this one.
        """
        return hmac.digest(key, f"generation {self.number} of {self.front}".encode(), hashlib.sha256)


FIRST = Incarnation()
"""The generation of processes that nobody numbers."""

LOAD = "dsv3.engine.cluster.start:load_model"


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Follow the leader. `load` is "module:function" of what loads the parts of the engine.

    `last` is the generation that the process before has been in.
    """

    cluster: ClusterOptions
    model_dir: str
    engine: EngineOptions
    load: str = LOAD
    last: Incarnation | None = None


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """The process runs: comes from a thread of its own, whatever the process does."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The leader has let the process into this generation."""

    generation: Incarnation


class Serving(msgspec.Struct, frozen=True, tag=True):
    """All processes of the generation are ready."""


class Waits(msgspec.Struct, frozen=True, tag=True):
    """The others have gone on without the process: when it is told to end, the next gang starts, with this place."""


class Alone(msgspec.Struct, frozen=True, tag=True):
    """No leader was found in time, or the one found lets this process not in: there is no use in another try."""


FromFollower = Pulse | Begun | Serving | Waits | Alone

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

    def events(self) -> list[FromFollower] | None:
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
