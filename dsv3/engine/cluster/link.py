"""Incarnations of process groups, and the messages between a follower and its supervisor on a Unix socket. No jax."""

import contextlib
import hashlib
import hmac
import socket
import threading
from typing import Literal

import msgspec

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.processes import frames


class Incarnation(msgspec.Struct, frozen=True):
    """One process group: processes that start together and end together. A past one cannot disturb a later one.

    `number` counts the groups of one API server 0 from 0, and `server` is a random name of that process: a restarted
    server counts anew.
    """

    number: int = 0
    server: str = ""

    def __str__(self) -> str:
        return f"generation {self.number}"

    def is_over_for(self, last: "Incarnation | None") -> bool:
        """Returns whether a process that was in generation `last` must not join this one."""
        return last is not None and last.server == self.server and last.number >= self.number

    def secret(self, key: bytes) -> bytes:
        """Returns the secret of this group alone, derived from the key of the instance.

        jax's coordinator requires certificates made from it. So a process that is late to leave an earlier group cannot
        join as process 1 of this one.
        """
        return hmac.digest(key, f"generation {self.number} of {self.server}".encode(), hashlib.sha256)


FIRST = Incarnation()
"""The generation of processes without a supervisor that counts."""

LOAD = "dsv3.engine.build:load_components"


class FollowOrder(msgspec.Struct, frozen=True):
    """Follow the leader. `load` is "module:function" of the loader of the engine's components.

    `last` is the generation of the process before.
    """

    cluster: ClusterOptions
    model_dir: str
    engine: EngineOptions
    load: str = LOAD
    last: Incarnation | None = None


class FollowerReport(msgspec.Struct, frozen=True):
    """What a follower's process reports to its supervisor.

    alive: it runs, whatever its main thread does. joined: the leader has admitted it to `generation`. serving: all
    processes of that are ready. waiting: the others have started without it; when it gets `Stop`, the next group
    starts, with it. alone: no leader was found in time, or the leader refused it, and a restart would not help.
    """

    state: Literal["alive", "joined", "serving", "waiting", "alone"] = "alive"
    generation: Incarnation | None = None


_order = msgspec.msgpack.Decoder(FollowOrder)
_report = msgspec.msgpack.Decoder(FollowerReport)
_READ_BYTES = 2**16


class Link:
    """One end of the socket. Any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self._splitter = frames.Splitter()

    def send(self, message: FollowOrder | FollowerReport) -> None:
        """Sends a message; drops it if the other process has ended."""
        with self._lock, contextlib.suppress(OSError):
            self.connection.sendall(frames.encode(message))

    def receive_order(self) -> FollowOrder | None:
        """Waits for the supervisor's order; None when the supervisor has ended."""
        while received := self._receive():
            for body in self._splitter.add(received):
                return _order.decode(body)
        return None

    def reports(self) -> list[FollowerReport] | None:
        """Waits for reports and returns them; None when the follower has ended."""
        received = self._receive()
        if not received:
            return None
        return [_report.decode(body) for body in self._splitter.add(received)]

    def wait_for_end(self) -> None:
        """Waits until the other process has ended."""
        while self._receive():
            pass

    def _receive(self) -> bytes:
        try:
            return self.connection.recv(_READ_BYTES)
        except OSError:
            return b""
