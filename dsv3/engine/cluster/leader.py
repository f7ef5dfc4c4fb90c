"""Leads the other processes of an instance: lets them in, sends them commands, notices what fails.

Its own threads accept, receive, send and watch. A main thread that compiles, loads or is stuck in a collective delays
none of them. The first failure of any process ends the instance: `on_failure` is called with it, once.
"""

import dataclasses
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.config.options import LEADER, ClusterOptions
from dsv3.engine.cluster import messages
from dsv3.engine.cluster.channel import Channel, ChannelError
from dsv3.engine.cluster.digest import Book, Chain, Orders, first_difference
from dsv3.engine.cluster.link import FIRST, Incarnation
from dsv3.engine.cluster.messages import (
    Build,
    Checked,
    Compiled,
    Digest,
    Drain,
    FollowerFailed,
    Heartbeat,
    Hello,
    Loaded,
    Ready,
    Started,
    Stop,
    Wait,
    WorkEvent,
)
from dsv3.engine.cluster.rejoin import RejoiningProcesses, refuse
from dsv3.engine.cluster.wire import Entrance, Wire
from dsv3.engine.errors import ClusterError
from dsv3.engine.fingerprint import Fields, differences
from dsv3.engine.job import StepCommand, WorkEvents
from dsv3.engine.kernel_checks import Replaced, agree
from dsv3.processes.certificates import credentials_of
from dsv3.processes.key_file import read_key

_log = logging.getLogger("dsv3.cluster")
_REMIND_S = 30.0  # how often the log names the processes that are waited for
# Before its process ends, the leader waits until every follower has read why and has ended. That takes milliseconds,
# and about a second on a busy host. These are the bounds: in order and after a failure.
_FAREWELL_S = 4.0  # the HTTP process kills this one 5 s after an orderly stop
_LAST_WORD_S = 10.0
# A collective may raise a little before the leader's receiving thread has seen the broken connection behind it.
_EXPLANATION_S = 2.0
_TOO_LATE = messages.encode(Stop("it has come too late: the others have gone on without it, and it may come again"))


class Leader:
    """The leader's view of the followers.

    `on_failure` is called when the instance must end, with a reason fit for clients; `on_drain` when a follower has
    been asked to end. Both are called on the leader's own threads. The constructor listens and `gather` accepts: no
    follower can fail before the caller has arranged that `end` is called. Raises ClusterError where it cannot listen.
    `events` are what followers tell planners.
    """

    def __init__(
        self,
        options: ClusterOptions,
        fields: Fields,
        on_failure: Callable[[str], None],
        on_drain: Callable[[str], None],
        generation: Incarnation = FIRST,
    ) -> None:
        self._options, self._fields, self._generation = options, fields, generation
        self._on_failure, self._on_drain = on_failure, on_drain
        self._followers = frozenset(range(1, options.num_processes))
        self._left_out: frozenset[int] = frozenset()
        self._returning: RejoiningProcesses | None = None
        self._channels: dict[int, Channel] = {}
        self._said: dict[type, dict[int, messages.ToLeader]] = {
            kind: {} for kind in (Hello, Checked, Loaded, Compiled, Ready)
        }
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._explained = threading.Event()
        self._ending = False
        self._last_word: bytes | None = None
        self._book, self._chain = Book(self._followers), Chain()
        self._launched = (-1, 0.0)  # the last step this process has launched, and when
        self._reached = dict.fromkeys(self._followers, -1)  # the last step each follower is known to have launched
        self._ranks: dict[int, range] = {}
        self.events = WorkEvents()
        self._places: dict[int, int] = {}  # by process: its number among those that have begun
        self._silence_s = options.starting_silence_s
        self._forgiven = 0.0  # when this process was last found to have been suspended
        credentials = credentials_of(read_key(options.cluster_key_file))
        self._entrance = Entrance(options, credentials, self._admit)

    def gather(self) -> ClusterOptions:
        """Waits until every follower has come and has the leader's fingerprint, then lets them begin.

        Returns this process's place among those that begin: in a gang that takes the place of another one these are
        all whose whole node has come when `cluster_return_timeout` is over. Otherwise, or where one of this process's
        own node is missing, raises ClusterError when the time is over, with the missing processes. Raises it always
        where fingerprints differ, or processes of one node run on several hosts.
        """
        address = self._entrance.address
        self._entrance.open()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        _log.info("waiting for %d processes at %s", len(self._followers), address)
        returning_s = self._options.cluster_return_timeout if self._generation.number else None
        timeout_s = returning_s or self._options.cluster_start_timeout
        missing = self._wait_for(Hello, "to come", timeout_s)
        if missing and (returning_s is None or missing & frozenset(self._options.node_of(LEADER))):
            raise self._fail(
                f"{_processes(missing)} of {self._options.num_processes} did not come within {timeout_s:g} s "
                f"(listening at {address})"
            )
        return self._begin_without(missing)

    def _begin_without(self, missing: frozenset[int]) -> ClusterOptions:
        """Lets the others begin, numbered anew where some are missing; these may come back."""
        number = None
        missing = frozenset(other for process_id in missing for other in self._options.node_of(process_id))
        if not missing:
            self._entrance.close()
        else:
            _log.warning("going on without %s of %d", _processes(missing), self._options.num_processes)
            number = 1 + self._leave_out(missing)
        self._places = {process_id: place for place, process_id in enumerate(sorted(self._followers), 1)}
        for process_id, place in self._places.items():
            begin = messages.Begin(self._generation, number, LEADER if number is None else place)
            self._post(process_id, messages.encode(begin))
        return dataclasses.replace(self._options, num_processes=number or self._options.num_processes)

    def _leave_out(self, missing: frozenset[int]) -> int:
        """Forgets processes that have not come, or have not said so; returns how many followers are left."""
        with self._changed:
            self._returning = RejoiningProcesses(self._options, self._fields, missing)
            self._left_out, self._followers = missing, self._followers - missing
            late = [self._channels.pop(process_id) for process_id in missing & self._channels.keys()]
        self._book, self._reached = Book(self._followers), dict.fromkeys(self._followers, -1)
        for channel in late:
            channel.send(messages.encode(Wait()))
            channel.send_last(_TOO_LATE)
        return len(self._followers)

    def checked(self, own: Mapping[str, Replaced]) -> dict[str, Replaced]:
        """Waits until every follower has checked its kernels; returns what all processes replace, and tells them so.

        `own` is what the leader would replace.
        """
        self._wait_for(Checked, "to check their kernels")
        said = {p: m.replaced for p, m in self._said[Checked].items() if isinstance(m, Checked)}
        replaced = agree({LEADER: own, **said})
        self._broadcast(messages.encode(Checked(replaced)))
        return replaced

    def loaded(self, fields: Fields) -> int:
        """Waits until every follower has its weights; returns the number of cache pages that all have room for.

        Raises ClusterError where a follower's fields differ from the leader's.
        """
        self._wait_for(Loaded, "to load the weights")
        said = {p: m for p, m in self._said[Loaded].items() if isinstance(m, Loaded)}
        for process_id, message in sorted(said.items()):
            if error := self._compare(process_id, fields, message.fields):
                raise error
        return min((message.num_pages for message in said.values()), default=sys.maxsize)

    def transfer_addresses(self, own: str | None) -> tuple[str, ...]:
        """Returns where each process lets other instances fetch pages, this one at `own`; empty where none does.

        Call it behind `loaded`. Raises ClusterError where some do and others do not, or two at the same address.
        """
        others = {p: m.transfer_address for p, m in self._said[Loaded].items() if isinstance(m, Loaded)}
        said = {LEADER: own or ""} | others
        addresses = tuple(address for _, address in sorted(said.items()))
        if not any(addresses):
            return ()
        if missing := frozenset(process_id for process_id, address in said.items() if not address):
            raise self._fail(f"transfer_address: {_processes(missing)} has none, and others have; give each its own")
        if len(set(addresses)) < len(addresses):
            raise self._fail(f"transfer_address: two processes have the same one: {', '.join(addresses)}")
        return addresses

    def build(self, config: EngineConfig) -> None:
        """Tells the followers the limits that all processes use."""
        self._ranks = {process_id: config.ranks_of(place) for process_id, place in self._places.items()}
        self._broadcast(messages.encode(Build(config)))

    def compiled(self, orders: Orders) -> None:
        """Waits until every follower has compiled, and tells all so: they launch their programs for the first time.

        `orders` are those of the leader's programs. Raises ClusterError where a follower's programs launch collectives
        in another order: XLA has chosen otherwise there, and the processes would wait for each other for ever.
        """
        self._wait_for(Compiled, "to compile")
        others = {p: m.orders for p, m in self._said[Compiled].items() if isinstance(m, Compiled)}
        differ = {p: found for p, other in others.items() if (found := first_difference(orders, other)) is not None}
        if differ:
            name, place = differ[min(differ)]
            alike = frozenset(process_id for process_id, found in differ.items() if found == (name, place))
            own = orders[name][place] if place < len(orders[name]) else "none"
            raise self._fail(
                f"{_processes(alike)} and process {LEADER} launch the collectives of {name} in different orders, and "
                f"would hang: the first that differs is number {place + 1}, in process {LEADER} {own}; remove "
                "instance-* and programs-* in --compilation_cache_dir on every host, so that all compile anew"
            )
        self._broadcast(messages.encode(Compiled()))

    def ready(self) -> None:
        """Waits until every follower has launched its programs, and tells all so; less silence is allowed then."""
        self._wait_for(Ready, "to launch their programs for the first time")
        self._broadcast(messages.encode(Started()))
        self._silence_s = self._options.cluster_silence_timeout
        if self._returning is not None:
            self._returning.serve()

    def send(self, command: StepCommand) -> None:
        """Sends each follower the part of a command that its ranks need, without waiting.

        Raises ClusterError once the instance has failed, and fails it where a part is too long for a message.
        """
        self._check()
        for process_id, ranks in self._ranks.items():
            self._post(process_id, messages.encode(messages.step_of(command.part(ranks))))

    def launched(self, number: int) -> None:
        """Notes that this process has launched step `number`; every follower should do so soon."""
        self._launched = number, time.monotonic()

    def results(self, number: int, results: list[np.ndarray]) -> None:
        """Notes what this process has read of step `number`. Raises ClusterError once the instance has failed."""
        self._diverged(self._book.lead(number, self._chain.add(number, results)), number)
        self._check()

    def explain(self, error: Exception) -> Exception:
        """Returns what to raise for an error of a step: the failure of the process that caused it, if one did.

        Waits for that failure at most `_EXPLANATION_S` seconds.
        """
        self._explained.wait(_EXPLANATION_S)
        return error if self._failure is None else ClusterError(self._failure)

    def end(self, failure: str | None = None) -> None:
        """Tells the followers to end, in order or because of `failure`, and waits until they have ended.

        The wait is at most `_LAST_WORD_S` seconds after a failure, else `_FAREWELL_S`. Silent followers are not
        waited for.
        """
        self._entrance.close()
        with self._changed:
            self._ending = True
            self._last_word = self._last_word or messages.encode(Stop(failure))
            channels = self._all_channels()
        for channel in channels:
            channel.send_last(self._last_word)
        deadline = time.monotonic() + (_FAREWELL_S if failure is None else _LAST_WORD_S)
        with self._changed:
            while self._someone_listens() and time.monotonic() < deadline:
                self._changed.wait(0.02)

    def _someone_listens(self) -> bool:
        """Returns whether a follower, or a process that is being let in, may still read the last message."""
        heard_s = time.monotonic() - self._silence_s
        listening = [c for c in self._all_channels() if not c.closed and c.last_heard_s >= heard_s]
        return bool(listening) or self._entrance.is_busy

    def _all_channels(self) -> list[Channel]:
        """Returns the connections to followers, and to those that wait to become one."""
        return [*self._channels.values(), *(self._returning.channels if self._returning is not None else ())]

    def _admit(self, process_id: int, wire: Wire, address: str) -> None:
        """Lets a process in; one that comes while the instance ends is told why.

        Raises WireError where another process has the same id.
        """
        if self._returning is not None and process_id in self._left_out and self._last_word is None:
            self._returning.admit(process_id, wire)
            return
        channel = Channel(
            wire,
            _heartbeat,
            lambda body: self._take(process_id, body),
            lambda end: self._lost(process_id, channel, end),
            self._options.heartbeat_s,
        )
        with self._changed:
            last_word = self._last_word
            known = self._channels.setdefault(process_id, channel) is not channel
        if known:
            refuse(wire, process_id)
        channel.start()
        if last_word is not None:
            channel.send_last(last_word)
        _log.info("process %d has come from %s", process_id, address)

    def _take(self, process_id: int, body: bytes) -> None:
        if process_id in self._left_out:
            return
        message = messages.decode_for_leader(body)
        match message:
            case Heartbeat():
                self._reached[process_id] = message.launched
            case Digest():
                self._reached[process_id] = max(self._reached[process_id], message.number)
                self._diverged(self._book.follow(process_id, message.number, message.digest), message.number)
            case Hello():
                if self._generation.is_over_for(message.last):
                    self._fail(f"process {process_id} has been in {message.last}: {self._generation} is over")
                elif self._compare(process_id, self._fields, message.fields) is None:
                    _log.info("process %d is pid %d on %s", process_id, message.pid, message.host)
                    if not self._strays(process_id, message.host):
                        self._note(process_id, message)
            case WorkEvent():
                self.events.put(message.kind, self._places[process_id], message.body)
            case Checked() | Loaded() | Compiled() | Ready():
                self._note(process_id, message)
            case Drain():
                _log.info("process %d asks to end: %s", process_id, message.reason)
                self._on_drain(message.reason)
            case FollowerFailed():
                _log.error("process %d: %s", process_id, message.text)
                self._fail(f"process {process_id} has failed ({message.kind})")

    def _note(self, process_id: int, message: messages.ToLeader) -> None:
        with self._changed:
            self._said[type(message)][process_id] = message
            self._changed.notify_all()

    def _compare(self, process_id: int, mine: Fields, theirs: Fields) -> ClusterError | None:
        """Ends the instance where the fields differ; returns the error to raise, None where they agree."""
        found = differences(mine, theirs, process_id)
        return self._fail(f"process {process_id} is not configured as process {LEADER}: {found}") if found else None

    def _strays(self, process_id: int, host: str) -> bool:
        """Returns whether another process of its node runs on another host; ends the instance if so."""
        said = {p: m.host for p, m in self._said[Hello].items() if isinstance(m, Hello)}
        hosts = {LEADER: socket.gethostname()} | said
        other = next((p for p in self._options.node_of(process_id) if hosts.get(p, host) != host), None)
        if other is not None:
            self._fail(
                f"process {process_id} is on {host} and process {other} on {hosts[other]}, but with "
                f"processes_per_node {self._options.processes_per_node} they are one node, which is one host: start "
                f"processes {self._options.node_of(process_id).start} to {self._options.node_of(process_id)[-1]} on it "
                "(under Slurm with --distribution=block)"
            )
        return other is not None

    def _diverged(self, process_id: int | None, number: int) -> None:
        if process_id is not None:
            self._fail(f"process {process_id} has other results than process {LEADER} in step {number}")

    def _lost(self, process_id: int, channel: Channel, end: str) -> None:
        """Ends the instance, unless the process had not said anything yet: it may have given up waiting, and return."""
        with self._changed:
            is_new = channel.closed and process_id not in self._said[Hello]
            if is_new and self._channels.get(process_id) is channel:
                del self._channels[process_id]
        if is_new:
            _log.warning("process %d %s, before its first message", process_id, end)
        elif not self._ending and process_id not in self._left_out:
            self._fail(f"process {process_id} {end}")

    def _watch(self) -> None:
        """Looks for followers that are silent or late. Time in which this process was suspended does not count."""
        interval = min(0.25, self._options.cluster_silence_timeout / 8)
        last = time.monotonic()
        while self._failure is None and not self._ending:
            time.sleep(interval)
            now = time.monotonic()
            late, last = now - last > interval + self._silence_s / 2, now
            if self._returning is not None and (back := self._returning.due()):
                verb = "has" if len(back) == 1 else "have"
                self._fail(f"{_processes(back)} of {self._options.num_processes} {verb} come back: all start anew")
            elif late:
                self._forgiven = now
                self._book.forgive()
                for channel in list(self._channels.values()):
                    channel.forgive()
            else:
                self._judge(now)

    def _judge(self, now: float) -> None:
        """Ends the instance where a follower is silent or late at `now`.

        `now` is read before, since this process may be suspended at any point, here too.
        """
        limit = self._silence_s
        for process_id, channel in list(self._channels.items()):
            if now - channel.last_heard_s > limit and process_id in self._followers:
                self._fail(f"process {process_id} has been silent for {limit:g} s: it hangs, or its host is gone")
        number, since = self._launched
        for process_id, reached in self._reached.items():
            if reached < number and now - max(since, self._forgiven) > limit:
                self._fail(f"process {process_id} has not launched step {number} for {limit:g} s: it hangs")
        if late := self._book.late(now - limit):
            self._fail(f"process {late[0]} has not reported step {late[1]} for {limit:g} s: it hangs")

    def _wait_for(self, kind: type, doing: str, timeout_s: float | None = None) -> frozenset[int]:
        """Waits until all followers have said `kind`; returns those that have not when the time is over.

        Raises ClusterError once the instance has failed.
        """
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
        for process_id in self._channels:
            self._post(process_id, body)

    def _post(self, process_id: int, body: bytes) -> None:
        try:
            self._channels[process_id].send(body)
        except ChannelError as error:
            raise self._fail(f"process {process_id} {error}") from None

    def _check(self) -> None:
        if self._failure is not None:
            raise ClusterError(self._failure)

    def _fail(self, reason: str) -> ClusterError:
        """Ends the instance, unless an earlier reason does already; returns the error to raise."""
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


def _processes(ids: frozenset[int]) -> str:
    shown = ", ".join(map(str, sorted(ids)))
    return f"process {shown}" if len(ids) == 1 else f"processes {shown}"
