"""The leader's end of the control connections: who has come, what they say and are sent, how they fail.

Threads of its own accept, receive, send and watch, so a main thread that compiles, loads or is stuck in a collective
delays none of it. The first failure of any process is everyone's: `on_failure` is called with it, once.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

import numpy as np

from dsv3.engine.cluster import messages
from dsv3.engine.cluster.digest import Book, Chain
from dsv3.engine.cluster.fingerprint import Fields, differences
from dsv3.engine.cluster.membership import ClusterError, read_key
from dsv3.engine.cluster.messages import Build, Digest, Drain, Failed, Heartbeat, Hello, Loaded, Ready, Step, Stop
from dsv3.engine.cluster.peer import Peer, PeerLost
from dsv3.engine.cluster.wire import Wire, WireError, accept
from dsv3.engine.commands import StepCommand
from dsv3.engine.config import EngineConfig
from dsv3.options import LEADER, ClusterOptions

_log = logging.getLogger("dsv3.cluster")
_MAX_GREETINGS = 64  # connections that have not proved themselves; more are closed at once
_MAX_REFUSALS_LOGGED = 20
_REMIND_S = 30.0
_FAREWELL_S, _LAST_WORD_S = 3.0, 0.5  # after an orderly end, after a failure
# A broken connection is seen at once, on another thread; the collective that it broke may raise a little earlier.
_EXPLANATION_S = 2.0


class Leader:
    """Process 0's view of the others.

    `on_failure` is called on some thread with a reason fit for clients when the instance must end; `on_drain` when a
    follower has been asked to end. The constructor listens; raises ClusterError where it cannot.
    """

    def __init__(
        self,
        options: ClusterOptions,
        fields: Fields,
        on_failure: Callable[[str], None],
        on_drain: Callable[[str], None],
    ) -> None:
        self._options, self._fields = options, fields
        self._on_failure, self._on_drain = on_failure, on_drain
        self._key = read_key(options.cluster_key_file)
        self._followers = frozenset(range(1, options.num_processes))
        self._peers: dict[int, Peer] = {}
        self._said: dict[type, dict[int, messages.ToLeader]] = {Hello: {}, Loaded: {}, Ready: {}}
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._explained = threading.Event()
        self._ending = False
        self._book, self._chain = Book(self._followers), Chain()
        self._launched = (-1, 0.0)  # the last step this process has launched, and when
        self._reached = dict.fromkeys(self._followers, -1)  # the last step each follower is known to have launched
        self._refusals = 0
        self._greetings = threading.Semaphore(_MAX_GREETINGS)
        self._listener = _listen(options)
        for target in (self._accept, self._watch):
            threading.Thread(target=target, name=f"cluster{target.__name__}", daemon=True).start()

    def gather(self) -> None:
        """Waits until every follower has come and has the leader's fingerprint, then lets them begin.

        Raises ClusterError when the time is over, naming those that are missing, and for fingerprints that differ.
        """
        address = "{}:{}".format(*self._listener.getsockname()[:2])
        _log.info("waiting for %d processes at %s", len(self._followers), address)
        missing = self._wait_for(Hello, "to come", self._options.cluster_start_timeout)
        if missing:
            raise self._fail(
                f"{_processes(missing)} of {self._options.num_processes} did not come within "
                f"{self._options.cluster_start_timeout:g} s (listening at {address})"
            )
        _stop_listening(self._listener)
        self._broadcast(messages.encode(messages.Begin()))

    def loaded(self, fields: Fields) -> int:
        """Waits until every follower has its weights; returns the cache pages that each of them has room for.

        Raises ClusterError where their fields differ from the leader's.
        """
        self._wait_for(Loaded, "to load the weights")
        said = {p: m for p, m in self._said[Loaded].items() if isinstance(m, Loaded)}
        for process_id, message in sorted(said.items()):
            self._compare(process_id, fields, message.fields)
        return min(message.num_pages for message in said.values())

    def build(self, config: EngineConfig) -> None:
        """Tells the followers the limits that all use."""
        self._broadcast(messages.encode(Build(config)))

    def ready(self) -> None:
        """Waits until every follower has compiled."""
        self._wait_for(Ready, "to compile")

    def send(self, command: StepCommand) -> None:
        """Sends a command to every follower, without waiting for any."""
        self._broadcast(messages.encode(Step(command)))

    def launched(self, number: int) -> None:
        """Notes that this process has launched step `number`, as the followers should soon have."""
        self._launched = number, time.monotonic()

    def results(self, number: int, results: list[np.ndarray]) -> None:
        """Notes what this process has read of step `number`; raises ClusterError once the instance has failed."""
        self._diverged(self._book.lead(number, self._chain.add(number, results)), number)
        self._check()

    def explain(self, error: Exception) -> Exception:
        """What to raise for an error of a step: the failure of the process that caused it, if one did."""
        self._explained.wait(_EXPLANATION_S)
        return error if self._failure is None else ClusterError(self._failure)

    def end(self, failure: str | None = None) -> None:
        """Tells the followers to end, with `failure` or in order, and waits for them a little."""
        self._ending = True
        body = messages.encode(Stop(failure))
        with self._changed:
            peers = list(self._peers.values())
        for peer in peers:
            peer.send_last(body)
        deadline = time.monotonic() + (_FAREWELL_S if failure is None else _LAST_WORD_S)
        for peer in peers:
            peer.join(max(0.0, deadline - time.monotonic()))
        _stop_listening(self._listener)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return  # closed: all have come
            if not self._greetings.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection, address[0]), daemon=True).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            process_id, wire = accept(connection, self._key, self._options.num_processes)
            self._admit(process_id, wire, address)
        except WireError as error:
            connection.close()
            self._refusals += 1
            if self._refusals <= _MAX_REFUSALS_LOGGED:
                _log.warning("refused a connection from %s: %s", address, error)
        finally:
            self._greetings.release()

    def _admit(self, process_id: int, wire: Wire, address: str) -> None:
        with self._changed:
            if process_id in self._peers:
                wire.send(messages.encode(Stop(f"another process has --process_id {process_id} already")))
                raise WireError(f"it says to be process {process_id}, which is here already")
            self._peers[process_id] = Peer(
                wire, _heartbeat, lambda body: self._take(process_id, body), lambda end: self._lost(process_id, end)
            )
        _log.info("process %d has come from %s", process_id, address)

    def _take(self, process_id: int, body: bytes) -> None:
        message = messages.decode_for_leader(body)
        match message:
            case Heartbeat():
                self._reached[process_id] = message.launched
            case Digest():
                self._reached[process_id] = max(self._reached[process_id], message.number)
                self._diverged(self._book.follow(process_id, message.number, message.digest), message.number)
            case Hello():
                self._compare(process_id, self._fields, message.fields)
                _log.info("process %d is pid %d on %s", process_id, message.pid, message.host)
                self._note(process_id, message)
            case Loaded() | Ready():
                self._note(process_id, message)
            case Drain():
                _log.info("process %d asks to end: %s", process_id, message.reason)
                self._on_drain(message.reason)
            case Failed():
                _log.error("process %d: %s", process_id, message.text)
                self._fail(f"process {process_id} has failed ({message.kind})")

    def _note(self, process_id: int, message: messages.ToLeader) -> None:
        with self._changed:
            self._said[type(message)][process_id] = message
            self._changed.notify_all()

    def _compare(self, process_id: int, mine: Fields, theirs: Fields) -> None:
        if found := differences(mine, theirs, process_id):
            raise self._fail(f"process {process_id} is not configured as process {LEADER}: {found}")

    def _diverged(self, process_id: int | None, number: int) -> None:
        if process_id is not None:
            self._fail(f"process {process_id} has other results than process {LEADER} in step {number}")

    def _lost(self, process_id: int, end: str) -> None:
        if not self._ending:
            self._fail(f"process {process_id} {end}")

    def _watch(self) -> None:
        """Notices peers that are silent; a watcher that was itself suspended judges nobody by that time."""
        interval = min(0.25, self._options.cluster_silence_timeout / 8)
        last = time.monotonic()
        while self._failure is None and not self._ending:
            time.sleep(interval)
            now = time.monotonic()
            late, last = now - last > interval + self._options.cluster_silence_timeout / 2, now
            if not late:
                self._judge()
            else:
                for peer in list(self._peers.values()):
                    peer.forgive()

    def _judge(self) -> None:
        limit = self._options.cluster_silence_timeout
        for process_id, peer in list(self._peers.items()):
            if peer.silent_s > limit:
                self._fail(f"process {process_id} has been silent for {limit:g} s: it hangs, or its host is gone")
        number, since = self._launched
        for process_id, reached in self._reached.items():
            if reached < number and time.monotonic() - since > limit:
                self._fail(f"process {process_id} has not launched step {number} for {limit:g} s: it hangs")
        if late := self._book.late(limit):
            self._fail(f"process {late[0]} has not reported step {late[1]} for {limit:g} s: it hangs")

    def _wait_for(self, kind: type, doing: str, timeout_s: float | None = None) -> frozenset[int]:
        """Waits until all have said `kind`; returns those that have not in time. Raises ClusterError for a failure."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        said = self._said[kind]
        remind = time.monotonic() + _REMIND_S
        with self._changed:
            while missing := self._followers - said.keys():
                self._check()
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    return missing
                if now >= remind:
                    _log.info("waiting for %s %s", _processes(missing), doing)
                    remind = now + _REMIND_S
                self._changed.wait(min(1.0, deadline - now if deadline is not None else 1.0))
            self._check()
        return frozenset()

    def _broadcast(self, body: bytes) -> None:
        self._check()
        for process_id, peer in self._peers.items():
            try:
                peer.send(body)
            except PeerLost as lost:
                raise self._fail(f"process {process_id} {lost}") from None

    def _check(self) -> None:
        if self._failure is not None:
            raise ClusterError(self._failure)

    def _fail(self, reason: str) -> ClusterError:
        """Ends the instance for a reason: only the first counts."""
        with self._changed:
            first, self._failure = self._failure is None, self._failure or reason
            self._changed.notify_all()
        self._explained.set()
        if first and not self._ending:
            _log.error("the instance ends: %s", reason)
            threading.Thread(target=self._on_failure, args=(reason,), daemon=True).start()
        return ClusterError(self._failure)


def _heartbeat() -> bytes:
    return messages.encode(Heartbeat())


def _listen(options: ClusterOptions) -> socket.socket:
    host, port = options.control_address
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        raise ClusterError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; --coordinator must be an address of process "
            f"{LEADER}'s host, with that port and the next one free"
        ) from None
    return listener


def _stop_listening(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # closing alone leaves a thread in accept, and the port open
    listener.close()


def _processes(ids: frozenset[int]) -> str:
    shown = ", ".join(map(str, sorted(ids)))
    return f"process {shown}" if len(ids) == 1 else f"processes {shown}"
