"""Keeps a follower running on its host: starts its process, and another one when it dies or hangs. Imports no jax.

The processes of an instance start together and end together: when one dies, each of the others ends by itself or is
killed by its supervisor, and all supervisors start the next generation. On the leader's host the first front does this
(`dsv3.server.engine.supervisor`).
"""

import contextlib
import logging
import selectors
import signal
import socket
import time
from collections.abc import Iterator

from dsv3.config.options import ClusterOptions
from dsv3.engine.cluster.link import Alone, Begun, Follow, FromFollower, Incarnation, Link, Serving, Waits
from dsv3.processes.child import KILLED_S, Deaths, LinkedChild, RestartPolicy

_log = logging.getLogger("dsv3.cluster")
_LOOK_S = 0.25
_CHILD = "dsv3.engine.cluster.child"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Child:
    """A follower's process, from its start on, with what is known of it. It waits until it is told to `follow`."""

    def __init__(self) -> None:
        self.process = LinkedChild(_CHILD)
        self.link = Link(self.process.link)
        self.generation: Incarnation | None = None
        self.is_serving = self.is_waiting = self.is_alone = self.has_ended = False
        self.last_heard_s = time.monotonic()

    @property
    def is_up(self) -> bool:
        """Whether it serves, or waits to be in the next gang of those that do."""
        return self.is_serving or self.is_waiting

    def read(self) -> None:
        """Takes what it has said; `has_ended` says whether it has gone."""
        events = self.link.events()
        self.has_ended = events is None
        self.last_heard_s = time.monotonic()
        for each in events or []:
            self._take(each)

    def end(self, patience_s: float = 0.0) -> int | None:
        """Ends the process, by force after `patience_s` seconds; returns its status, None where it does not end."""
        status = self.process.end(patience_s, KILLED_S)
        self.link.connection.close()
        if status is None:
            _log.error("pid %d is there %.0f s after kill -9", self.process.pid, KILLED_S)
        return status

    def _take(self, events: FromFollower) -> None:
        match events:
            case Begun(generation):
                self.generation = generation
            case Serving():
                self.is_serving = True
            case Waits():
                self.is_waiting = True
            case Alone():
                self.is_alone = True


class Supervisor:
    """Runs the follower of `order`; without a `policy` its first death is the last.

    A process is taken for hanging after as much silence as the leader would allow it.
    """

    def __init__(self, order: Follow, policy: RestartPolicy | None) -> None:
        self._order, self._cluster = order, order.cluster
        self._deaths = None if policy is None else Deaths(policy)
        self._spare: Child | None = None
        self._has_served = False
        self._asked = 0  # signals that ask for the end
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Returns the status of the process that was not followed by another one: 0 after an orderly end.

        It is 1 where a process does not end: the next one could not have its devices.
        """
        with _signals() as signals:
            self._selector.register(signals, selectors.EVENT_READ)
            try:
                return self._run(signals)
            finally:
                if self._spare is not None:
                    self._spare.end()

    def _run(self, signals: socket.socket) -> int:
        while True:
            child = self._next()
            status = self._attend(child, signals)
            if status is None:
                return 1
            if not self._goes_on(child, status):
                return abs(status)
            last = child.generation or self._order.last
            _log.warning("process %d is started anew (it had status %d)", self._cluster.process_id, status)
            self._order = Follow(self._cluster, self._order.model_dir, self._order.engine, self._order.load, last)

    def _next(self) -> Child:
        """Starts the next process, or takes the one that waits, and tells it to follow."""
        child, self._spare = self._spare or self._start(), None
        child.last_heard_s = time.monotonic()
        child.link.send(self._order)
        return child

    def _start(self) -> Child:
        child = Child()
        self._selector.register(child.link.connection, selectors.EVENT_READ, child)
        return child

    def _attend(self, child: Child, signals: socket.socket) -> int | None:
        """Watches the process until it has ended, and returns its status; None where it does not end."""
        looked = time.monotonic()
        while not child.has_ended:
            for key, _ in self._selector.select(_LOOK_S):
                if key.fileobj is signals:
                    self._pass_on(child, signals)
                else:
                    self._read(key.data)
            now, limit = time.monotonic(), _allowed_silence_s(self._cluster, child)
            if now - looked > _LOOK_S + limit / 2:  # this process was suspended, and the other one maybe too
                child.last_heard_s = now
            elif now - child.last_heard_s > limit:
                _log.error("process %d has been silent for %g s: it hangs", self._cluster.process_id, limit)
                self._forget(child)
                return child.end()
            looked = now
        with contextlib.suppress(BlockingIOError):  # signals that came with its end are not for the next process
            self._pass_on(child, signals)
        return child.end(_LOOK_S)

    def _read(self, child: Child) -> None:
        was_up = child.is_up
        child.read()
        if child.has_ended:
            self._forget(child)
        elif child.is_up and not was_up:
            self._has_served = self._has_served or child.is_serving
            if self._deaths is not None and self._cluster.cluster_spare:
                self._spare = self._spare or self._start()

    def _forget(self, child: Child) -> None:
        self._selector.unregister(child.link.connection)
        if child is self._spare:
            self._spare = None
            child.end(_LOOK_S)

    def _pass_on(self, child: Child, signals: socket.socket) -> None:
        for number in signals.recv(16):
            self._asked += 1
            child.process.signal(number)

    def _goes_on(self, child: Child, status: int) -> bool:
        """Returns whether another process follows one that has ended.

        A generation that nobody was served by is not tried again, unless another one had been: the reason for its end
        is in the settings or on the disks. One that others serve in is waited for.
        """
        if status == 0 or self._deaths is None or child.is_alone or self._asked > 1:
            return False
        was_up = self._has_served or child.is_waiting or (child.generation is not None and child.generation.number > 0)
        if not was_up or (self._asked and child.generation is None):
            return False
        if (too_many := self._deaths.note()) is not None:
            _log.error("process %d %s", self._cluster.process_id, too_many)
        return too_many is None


def _allowed_silence_s(cluster: ClusterOptions, child: Child) -> float:
    return cluster.cluster_silence_timeout if child.is_serving else cluster.starting_silence_s


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Gives a socket that has a byte for each signal that asks for the end."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    old = signal.set_wakeup_fd(writer.fileno())
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
