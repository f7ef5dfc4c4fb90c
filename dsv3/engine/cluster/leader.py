"""Leads the other processes of an instance: admits them, sends them commands, detects failures.

Its own threads accept, receive, send and watch. A main thread that compiles, loads or hangs in a collective delays none
of them. The first failure of any process ends the instance: `on_failure` is called with it, once.
"""

import dataclasses
import logging
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.config.options import LEADER, ClusterOptions
from dsv3.engine.cluster import messages
from dsv3.engine.cluster.channel import Channel, ChannelError
from dsv3.engine.cluster.digest import Orders, StepDigests, chained, first_difference
from dsv3.engine.cluster.flight_recorder import FlightRecorder, FlightRecords
from dsv3.engine.cluster.link import FIRST, Incarnation
from dsv3.engine.cluster.rejoin import RejoiningProcesses, refuse
from dsv3.engine.cluster.wire import Wire, control_listener
from dsv3.engine.errors import ClusterError
from dsv3.engine.fingerprint import Fields, differences
from dsv3.engine.job import StepCommand, WorkEvents
from dsv3.engine.kernel_checks import KernelFallback, merge_fallbacks
from dsv3.files import read_key
from dsv3.processes.certificates import credentials_of

_log = logging.getLogger("dsv3.cluster")
_REMIND_S = 30.0  # interval of the log line that names missing processes
# Before its process ends, the leader waits until every follower has read the shutdown message and has ended. That takes
# milliseconds, and about a second on a busy host. These are the bounds: for an orderly end and after a failure.
_SHUTDOWN_S = 4.0  # API server 0 kills this process 5 s after an orderly stop
_FAILURE_SHUTDOWN_S = 10.0
# A collective may raise a little before the leader's receiving thread has seen the broken connection that caused it.
_EXPLANATION_S = 2.0
_TOO_LATE = messages.encode(messages.Stop("it connected too late: the others have started without it; it may rejoin"))


class Leader:
    """The leader's connections to the followers.

    `on_failure` is called when the instance must end, with a reason that is safe to show to clients; `on_drain` when a
    follower was asked to end. Both are called on the leader's own threads. The constructor listens and
    `wait_for_followers` accepts: no follower can fail before the caller has arranged that `end` is called. Raises
    ClusterError where it cannot listen. `work_events` are the followers' events for planners, `recorder` is what this
    process does.
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
        self._rejoining: RejoiningProcesses | None = None
        self._channels: dict[int, Channel] = {}
        self._received: defaultdict[type, dict[int, messages.ToLeader]] = defaultdict(dict)
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._explained = threading.Event()
        self._ending = False
        self._shutdown_message: bytes | None = None
        self._digests, self._digest = StepDigests(self._followers), b""
        self._launched = (-1, 0.0)  # the last step this process has launched, and when
        self._reached = dict.fromkeys(self._followers, -1)  # the last step each follower is known to have launched
        self.recorder, self._records, self._is_stalled = FlightRecorder(), FlightRecords(), False
        self._ranks: dict[int, range] = {}
        self.work_events = WorkEvents()
        self._numbers: dict[int, int] = {}  # by process: its id among those that have started
        self._silence_s = options.starting_silence_s
        self._resumed_at = 0.0  # when this process was last found to have been suspended
        credentials = credentials_of(read_key(options.cluster_key_file))
        self._listener = control_listener(options, credentials, self._on_peer)

    def wait_for_followers(self) -> ClusterOptions:
        """Waits until every follower has connected with the leader's fingerprint, then starts them.

        Returns this process's options among the processes that start: in a group that replaces an earlier one, these
        are the processes whose whole node has come within `cluster_return_timeout`. Otherwise, or where a process of
        the leader's own node is missing, raises ClusterError at the timeout, naming the missing processes. Raises it
        always where fingerprints differ, or processes of one node run on several hosts.
        """
        address = "{}:{}".format(*self._listener.address)
        self._listener.open()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        _log.info("waiting for %d processes at %s", len(self._followers), address)
        returning_s = self._options.cluster_return_timeout if self._generation.number else None
        timeout_s = returning_s or self._options.cluster_start_timeout
        missing = self._followers - self._wait_for(messages.Hello, "to connect", timeout_s).keys()
        if missing and (returning_s is None or missing & frozenset(self._options.node_of(LEADER))):
            raise self._fail(
                f"{_processes(missing)} of {self._options.num_processes} did not connect within {timeout_s:g} s "
                f"(listening at {address})"
            )
        return self._begin_without(missing)

    def _begin_without(self, missing: frozenset[int]) -> ClusterOptions:
        """Starts the others, renumbered where some are missing; these may rejoin later."""
        number = None
        missing = frozenset(other for process_id in missing for other in self._options.node_of(process_id))
        if not missing:
            self._listener.close()
        else:
            _log.warning("starting without %s of %d", _processes(missing), self._options.num_processes)
            number = 1 + self._leave_out(missing)
        self._numbers = {process_id: number for number, process_id in enumerate(sorted(self._followers), 1)}
        for process_id, new_id in self._numbers.items():
            begin = messages.Begin(self._generation, number, LEADER if number is None else new_id)
            self._post(process_id, messages.encode(begin))
        return dataclasses.replace(self._options, num_processes=number or self._options.num_processes)

    def _leave_out(self, missing: frozenset[int]) -> int:
        """Drops processes that have not connected and sent Hello; returns the number of followers left."""
        with self._changed:
            self._rejoining = RejoiningProcesses(self._options, self._fields)
            self._left_out, self._followers = missing, self._followers - missing
            late = [self._channels.pop(process_id) for process_id in missing & self._channels.keys()]
        self._digests, self._reached = StepDigests(self._followers), dict.fromkeys(self._followers, -1)
        for channel in late:
            channel.send(messages.encode(messages.Wait()))
            channel.send_last(_TOO_LATE)
        return len(self._followers)

    def merge_kernel_checks(self, own: Mapping[str, KernelFallback]) -> dict[str, KernelFallback]:
        """Waits until every follower has checked its kernels; returns and broadcasts what all processes replace.

        `own` is what the leader would replace.
        """
        others = self._wait_for(messages.Checked, "to check their kernels")
        replaced = merge_fallbacks({LEADER: own} | {process_id: each.replaced for process_id, each in others.items()})
        self._broadcast(messages.encode(messages.Checked(replaced)))
        return replaced

    def wait_loaded(self, fields: Fields) -> int:
        """Waits until every follower has its weights; returns the number of cache pages that all can hold.

        Raises ClusterError where a follower's fields differ from the leader's.
        """
        loaded = self._wait_for(messages.Loaded, "to load the weights")
        for process_id, message in sorted(loaded.items()):
            if error := self._compare(process_id, fields, message.fields):
                raise error
        return min((message.num_pages for message in loaded.values()), default=sys.maxsize)

    def transfer_addresses(self, own: str | None) -> tuple[str, ...]:
        """Returns each process's address for other instances, this one's being `own`; empty where none has one.

        Call it after `wait_loaded`. Raises ClusterError where only some have one, or two have the same.
        """
        found = {LEADER: own or ""} | {p: m.transfer_address for p, m in self._messages(messages.Loaded).items()}
        addresses = tuple(address for _, address in sorted(found.items()))
        if not any(addresses):
            return ()
        if missing := frozenset(process_id for process_id, address in found.items() if not address):
            raise self._fail(f"transfer_address: {_processes(missing)} has none, but others have; set one for each")
        if len(set(addresses)) < len(addresses):
            raise self._fail(f"transfer_address: two processes have the same one: {', '.join(addresses)}")
        return addresses

    def send_limits(self, config: EngineConfig) -> None:
        """Sends the followers the limits that all processes use."""
        self._ranks = {process_id: config.ranks_of(number) for process_id, number in self._numbers.items()}
        self._broadcast(messages.encode(messages.Build(config)))

    def wait_compiled(self, orders: Orders) -> None:
        """Waits until every follower has compiled, then makes all launch their programs for the first time.

        `orders` are those of the leader's programs. Raises ClusterError where a follower's programs launch collectives
        in another order: XLA has scheduled them differently there, and the processes would hang.
        """
        others = self._wait_for(messages.Compiled, "to compile")
        differ = {p: found for p, m in others.items() if (found := first_difference(orders, m.orders)) is not None}
        if differ:
            name, index = differ[min(differ)]
            alike = frozenset(process_id for process_id, found in differ.items() if found == (name, index))
            own = orders[name][index] if index < len(orders[name]) else "none"
            raise self._fail(
                f"{_processes(alike)} and process {LEADER} launch the collectives of {name} in different orders, and "
                f"would hang: the first that differs is number {index + 1}, in process {LEADER} {own}; remove "
                "instance-* and programs-* in --compilation_cache_dir on every host, so that all compile anew"
            )
        self._broadcast(messages.encode(messages.Compiled()))

    def wait_ready(self) -> None:
        """Waits until every follower has launched its programs, then starts all; less silence is allowed then."""
        self._wait_for(messages.Ready, "to launch their programs for the first time")
        self._broadcast(messages.encode(messages.Ready()))
        self._silence_s = self._options.cluster_silence_timeout
        if self._rejoining is not None:
            self._rejoining.on_serving()

    def send(self, command: StepCommand) -> None:
        """Sends each follower the part of a command that its ranks need, without waiting.

        Raises ClusterError once the instance has failed, and where a part is too long for a message, which ends the
        instance.
        """
        self._check()
        for process_id, ranks in self._ranks.items():
            self._post(process_id, messages.encode(messages.step_of(command.part(ranks))))

    def operate(self, operation: messages.Operate) -> None:
        """Sends every follower an operation, without waiting. Raises ClusterError once the instance has failed."""
        with self._changed:
            self._received[messages.Operated].clear()
        self._broadcast(messages.encode(operation))

    def wait_operated(self) -> str:
        """Waits until every follower has executed the operation; returns the first error, "" without one."""
        found = sorted(self._wait_for(messages.Operated, "to execute an operation").items())
        return next((f"process {process_id}: {each.error}" for process_id, each in found if each.error), "")

    def on_launched(self, number: int) -> None:
        """Records that this process has launched step `number`; every follower should do so soon."""
        self._launched, self.recorder.launched = (number, time.monotonic()), number

    def on_results(self, number: int, results: list[np.ndarray]) -> None:
        """Records this process's results of step `number`. Raises ClusterError once the instance has failed."""
        self.recorder.fetched = number
        self._digest = chained(self._digest, number, results)
        self._add_digest(LEADER, number, self._digest)
        self._check()

    def explain(self, error: Exception) -> Exception:
        """Returns what to raise for an error of a step: the failure of the process that caused it, if there is one.

        Waits for that failure at most `_EXPLANATION_S` seconds.
        """
        self._explained.wait(_EXPLANATION_S)
        return error if self._failure is None else ClusterError(self._failure)

    def end(self, failure: str | None = None) -> None:
        """Sends the followers a shutdown message, orderly or with a `failure`, and waits until they have ended.

        The wait is at most `_FAILURE_SHUTDOWN_S` seconds after a failure, else `_SHUTDOWN_S`. Silent followers are not
        waited for.
        """
        self._listener.close()
        with self._changed:
            self._ending = True
            self._shutdown_message = self._shutdown_message or messages.encode(messages.Stop(failure))
            channels = self._all_channels()
        for channel in channels:
            channel.send_last(self._shutdown_message)
        deadline = time.monotonic() + (_SHUTDOWN_S if failure is None else _FAILURE_SHUTDOWN_S)
        with self._changed:
            while self._has_listeners() and time.monotonic() < deadline:
                self._changed.wait(0.02)

    def _has_listeners(self) -> bool:
        """Returns whether a follower, or a process in its handshake, may still read the shutdown message."""
        since_s = time.monotonic() - self._silence_s
        listening = [c for c in self._all_channels() if not c.closed.is_set() and c.last_received_s >= since_s]
        return bool(listening) or self._listener.is_serving

    def _all_channels(self) -> list[Channel]:
        """Returns the connections to followers, and to processes that wait to rejoin."""
        return [*self._channels.values(), *(self._rejoining.channels if self._rejoining is not None else ())]

    def _on_peer(self, process_id: int, wire: Wire, address: str) -> None:
        """Admits an authenticated process; while the instance ends, it gets the shutdown message.

        Raises WireError where another process has the same id.
        """
        if self._rejoining is not None and process_id in self._left_out and self._shutdown_message is None:
            self._rejoining.admit(process_id, wire)
            return
        channel = Channel(
            wire,
            _heartbeat,
            lambda body: self._on_message(process_id, body),
            lambda end: self._on_disconnect(process_id, channel, end),
            self._options.heartbeat_s,
        )
        with self._changed:
            last_word = self._shutdown_message
            known = self._channels.setdefault(process_id, channel) is not channel
        if known:
            refuse(wire, process_id)
        channel.start()
        if last_word is not None:
            channel.send_last(last_word)
        _log.info("process %d has connected from %s", process_id, address)

    def _on_message(self, process_id: int, body: bytes) -> None:
        if process_id in self._left_out:
            return
        message = messages.decode_for_leader(body)
        match message:
            case messages.Heartbeat():
                self._reached[process_id] = message.launched
                self._records.update(process_id, message)
            case messages.Digest():
                self._reached[process_id] = max(self._reached[process_id], message.number)
                self._add_digest(process_id, message.number, message.digest)
            case messages.Hello():
                if self._generation.is_over_for(message.last):
                    self._fail(f"process {process_id} was in {message.last} already: {self._generation} is over")
                elif self._compare(process_id, self._fields, message.fields) is None:
                    _log.info("process %d is pid %d on %s", process_id, message.pid, message.host)
                    if not self._spans_hosts(process_id, message.host):
                        self._record(process_id, message)
            case messages.WorkEvent():
                self.work_events.publish(message.kind, self._numbers[process_id], message.body)
            case messages.Checked() | messages.Loaded() | messages.Compiled() | messages.Ready() | messages.Operated():
                self._record(process_id, message)
            case messages.Drain():
                _log.info("process %d asks to end: %s", process_id, message.reason)
                self._on_drain(message.reason)
            case messages.FollowerFailed():
                _log.error("process %d: %s", process_id, message.text)
                self._fail(f"process {process_id} has failed ({message.kind})")

    def _messages[M](self, kind: type[M]) -> dict[int, M]:
        return {process_id: each for process_id, each in self._received[kind].items() if isinstance(each, kind)}

    def _record(self, process_id: int, message: messages.ToLeader) -> None:
        with self._changed:
            self._received[type(message)][process_id] = message
            self._changed.notify_all()

    def _compare(self, process_id: int, mine: Fields, theirs: Fields) -> ClusterError | None:
        """Ends the instance where the fields differ; returns the error to raise, None where they are equal."""
        found = differences(mine, theirs, process_id)
        return self._fail(f"process {process_id} is not configured as process {LEADER}: {found}") if found else None

    def _spans_hosts(self, process_id: int, host: str) -> bool:
        """Returns whether another process of its node runs on another host; ends the instance if so."""
        hosts = {LEADER: socket.gethostname()} | {p: m.host for p, m in self._messages(messages.Hello).items()}
        other = next((p for p in self._options.node_of(process_id) if hosts.get(p, host) != host), None)
        if other is not None:
            self._fail(
                f"process {process_id} is on {host} and process {other} on {hosts[other]}, but with "
                f"processes_per_node {self._options.processes_per_node} they are one node, which is one host: start "
                f"processes {self._options.node_of(process_id).start} to {self._options.node_of(process_id)[-1]} on it "
                "(under Slurm with --distribution=block)"
            )
        return other is not None

    def _add_digest(self, process_id: int, number: int, digest: bytes) -> None:
        if (wrong := self._digests.add(process_id, number, digest)) is not None:
            self._fail(f"process {wrong} has other results than process {LEADER} in step {number}")

    def _on_disconnect(self, process_id: int, channel: Channel, end: str) -> None:
        """Ends the instance, unless the process had not sent anything yet: it may have timed out, and come again."""
        with self._changed:
            is_new = channel.closed.is_set() and process_id not in self._received[messages.Hello]
            if is_new and self._channels.get(process_id) is channel:
                del self._channels[process_id]
        if is_new:
            _log.warning("process %d %s, before its first message", process_id, end)
        elif not self._ending and process_id not in self._left_out:
            self._fail(f"process {process_id} {end}")

    def _watch(self) -> None:
        """Checks followers' deadlines periodically. Time in which this process was suspended does not count."""
        interval = min(0.25, self._options.cluster_silence_timeout / 8)
        last = time.monotonic()
        while self._failure is None and not self._ending:
            time.sleep(interval)
            now = time.monotonic()
            late, last = now - last > interval + self._silence_s / 2, now
            if self._rejoining is not None and (back := self._rejoining.ready()):
                verb = "has" if len(back) == 1 else "have"
                self._fail(f"{_processes(back)} of {self._options.num_processes} {verb} rejoined: all restart")
            elif late:
                self._resumed_at = now
                self._digests.reset_deadlines()
                for channel in list(self._channels.values()):
                    channel.last_received_s = time.monotonic()
            else:
                self._check_deadlines(now)

    def _check_deadlines(self, now: float) -> None:
        """Ends the instance where a follower is silent or late at `now`.

        `now` is read before, since this process may be suspended at any point, here too.
        """
        limit = self._silence_s
        for process_id, channel in list(self._channels.items()):
            if now - channel.last_received_s > limit and process_id in self._followers:
                self._fail_hung(f"process {process_id} has been silent for {limit:g} s: it hangs, or its host is gone")
        number, since = self._launched
        since = max(since, self._resumed_at)
        for process_id, reached in self._reached.items():
            if reached < number and now - since > limit:
                self._fail_hung(f"process {process_id} has not launched step {number} for {limit:g} s: it hangs")
        if late := self._digests.overdue(now - limit):
            self._fail_hung(f"process {late[0]} has not reported step {late[1]} for {limit:g} s: it hangs")
        stall_s, was_stalled = self._options.starting_silence_s, self._is_stalled
        self._is_stalled = self.recorder.fetched < number and now - since > stall_s
        if self._is_stalled and not was_stalled:
            self._log_records(f"step {number} has no results after {stall_s:g} s")

    def _fail_hung(self, reason: str) -> None:
        if self._failure is None:
            self._log_records(reason)
        self._fail(reason)

    def _log_records(self, reason: str) -> None:
        self._records.update(LEADER, self.recorder.heartbeat())
        lines = self._records.lines([LEADER, *sorted(self._followers)])
        _log.error("%s; what each process does:\n  %s", reason, "\n  ".join(lines))

    def _wait_for[M](self, kind: type[M], doing: str, timeout_s: float | None = None) -> dict[int, M]:
        """Waits for a message of type `kind` from all followers; returns those that have come, by process.

        Raises ClusterError once the instance has failed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        remind = time.monotonic() + _REMIND_S
        with self._changed:
            while missing := self._followers - self._received[kind].keys():
                self._check()
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    break
                if now >= remind:
                    _log.info("waiting for %s %s", _processes(missing), doing)
                    remind = now + _REMIND_S
                self._changed.wait(min(1.0, deadline - now if deadline is not None else 1.0))
            self._check()
            return self._messages(kind)

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
        """Ends the instance, unless an earlier failure does already; returns the error to raise."""
        with self._changed:
            first, self._failure = self._failure is None, self._failure or reason
            self._changed.notify_all()
        self._explained.set()
        if first and not self._ending:
            _log.error("the instance ends: %s", reason)
            threading.Thread(target=self._on_failure, args=(reason,), daemon=True).start()
        return ClusterError(self._failure)


def _heartbeat() -> bytes:
    return messages.encode(messages.Heartbeat())


def _processes(ids: frozenset[int]) -> str:
    shown = ", ".join(map(str, sorted(ids)))
    return f"process {shown}" if len(ids) == 1 else f"processes {shown}"
