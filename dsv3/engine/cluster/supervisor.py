"""Keeps a follower running on its host: starts its process, and restarts it when it dies or hangs. No jax.

The processes of an instance start together and end together: when one dies, each of the others ends by itself or is
killed by its supervisor, and all supervisors start the next generation. On the leader's host API server 0 does this
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
from dsv3.engine.cluster.link import FollowOrder, Incarnation, Link
from dsv3.processes.child import REAP_TIMEOUT_S, DeathCounter, LinkedChild, RestartPolicy

_log = logging.getLogger("dsv3.cluster")
_POLL_S = 0.25
_CHILD = "dsv3.engine.cluster.child"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Child:
    """A follower's process, from its start on, and the states it has reported. It waits for an order to follow."""

    def __init__(self) -> None:
        self.process = LinkedChild(_CHILD)
        self.link = Link(self.process.link)
        self.generation: Incarnation | None = None
        self.states: set[str] = set()
        self.has_ended = False
        self.last_received_s = time.monotonic()

    @property
    def is_up(self) -> bool:
        """Whether it serves, or waits to join the next group."""
        return bool(self.states & {"serving", "waiting"})

    def read(self) -> None:
        """Processes its reports; sets `has_ended` when it has ended."""
        reports = self.link.reports()
        self.has_ended = reports is None
        self.last_received_s = time.monotonic()
        for each in reports or []:
            self.states.add(each.state)
            self.generation = each.generation or self.generation

    def end(self, patience_s: float = 0.0) -> int | None:
        """Ends the process, by force after `patience_s` seconds; returns its status, None where it does not end."""
        status = self.process.end(patience_s, REAP_TIMEOUT_S)
        self.link.connection.close()
        if status is None:
            _log.error("pid %d still exists %.0f s after kill -9", self.process.pid, REAP_TIMEOUT_S)
        return status


class Supervisor:
    """Runs the follower of `order`; without a `policy` it is not restarted.

    A process counts as hung after as much silence as the leader would allow it.
    """

    def __init__(self, order: FollowOrder, policy: RestartPolicy | None) -> None:
        self._order, self._cluster = order, order.cluster
        self._deaths = None if policy is None else DeathCounter(policy)
        self._spare: Child | None = None
        self._has_served = False
        self._end_signals = 0  # SIGTERM and SIGINT received
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Returns the status of the last process: 0 after an orderly end.

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
            status = self._wait_for_exit(child, signals)
            if status is None:
                return 1
            if not self._should_restart(child, status):
                return abs(status)
            last = child.generation or self._order.last
            _log.warning("restarting process %d (it exited with status %d)", self._cluster.process_id, status)
            self._order = FollowOrder(self._cluster, self._order.model_dir, self._order.engine, self._order.load, last)

    def _next(self) -> Child:
        """Starts the next process, or takes the standby one, and sends it the order."""
        child, self._spare = self._spare or self._start(), None
        child.last_received_s = time.monotonic()
        child.link.send(self._order)
        return child

    def _start(self) -> Child:
        child = Child()
        self._selector.register(child.link.connection, selectors.EVENT_READ, child)
        return child

    def _wait_for_exit(self, child: Child, signals: socket.socket) -> int | None:
        """Watches the process until it has ended, and returns its status; None where it does not end."""
        polled = time.monotonic()
        while not child.has_ended:
            for key, _ in self._selector.select(_POLL_S):
                if key.fileobj is signals:
                    self._forward_signals(child, signals)
                else:
                    self._read(key.data)
            now, limit = time.monotonic(), _allowed_silence_s(self._cluster, child)
            if now - polled > _POLL_S + limit / 2:  # this process was suspended, and the other one possibly too
                child.last_received_s = now
            elif now - child.last_received_s > limit:
                _log.error("process %d has been silent for %g s: it hangs", self._cluster.process_id, limit)
                self._forget(child)
                return child.end()
            polled = now
        with contextlib.suppress(BlockingIOError):  # signals during its end are not for the next process
            self._forward_signals(child, signals)
        return child.end(_POLL_S)

    def _read(self, child: Child) -> None:
        was_up = child.is_up
        child.read()
        if child.has_ended:
            self._forget(child)
        elif child.is_up and not was_up:
            self._has_served = self._has_served or "serving" in child.states
            if self._deaths is not None and self._cluster.cluster_spare:
                self._spare = self._spare or self._start()

    def _forget(self, child: Child) -> None:
        self._selector.unregister(child.link.connection)
        if child is self._spare:
            self._spare = None
            child.end(_POLL_S)

    def _forward_signals(self, child: Child, signals: socket.socket) -> None:
        for number in signals.recv(16):
            self._end_signals += 1
            child.process.signal(number)

    def _should_restart(self, child: Child, status: int) -> bool:
        """Returns whether another process replaces one that has ended.

        A generation that never served is not retried, unless an earlier one had served: the cause is in the settings or
        on the disks. A process joins a generation that serves already.
        """
        if status == 0 or self._deaths is None or "alone" in child.states or self._end_signals > 1:
            return False
        is_later = child.generation is not None and child.generation.number > 0
        was_up = self._has_served or "waiting" in child.states or is_later
        if not was_up or (self._end_signals and child.generation is None):
            return False
        if (too_many := self._deaths.record()) is not None:
            _log.error("process %d %s", self._cluster.process_id, too_many)
        return too_many is None


def _allowed_silence_s(cluster: ClusterOptions, child: Child) -> float:
    return cluster.cluster_silence_timeout if "serving" in child.states else cluster.starting_silence_s


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Yields a socket that receives a byte for each SIGTERM and SIGINT."""
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
