"""Processes that rejoin a group that has started without them. They wait here, connected, for the next group.

Nothing that they send affects the group that serves.
"""

import logging
import threading
import time
from collections.abc import Callable

from dsv3.config.options import LEADER, ClusterOptions
from dsv3.engine.cluster import messages
from dsv3.engine.cluster.channel import Channel
from dsv3.engine.cluster.messages import Heartbeat, Hello, Stop, Wait
from dsv3.engine.cluster.wire import Wire, WireError
from dsv3.engine.fingerprint import Fields, differences

_log = logging.getLogger("dsv3.cluster")
REFUSAL_S = 5.0
"""Bound of the wait for a refused process to close its connection."""


class RejoiningProcesses:
    """Processes that an instance's group lacks; `fields` are the leader's fingerprint, `clock` returns seconds."""

    def __init__(self, options: ClusterOptions, fields: Fields, clock: Callable[[], float] = time.monotonic) -> None:
        self._options, self._fields, self._clock = options, fields, clock
        self._lock = threading.Lock()
        self._channels: dict[int, Channel] = {}
        self._hosts: dict[int, str] = {}  # hosts, by process
        self._serving_since: float | None = None

    @property
    def channels(self) -> list[Channel]:
        """Connections to processes that wait, and to those that have sent nothing yet."""
        with self._lock:
            return list(self._channels.values())

    def on_serving(self) -> None:
        """Starts the interval after which the group may be formed anew."""
        self._serving_since = self._clock()

    def admit(self, process_id: int, wire: Wire) -> None:
        """Lets a process wait. Raises WireError where one with its id waits already."""
        channel = Channel(
            wire,
            lambda: messages.encode(Heartbeat()),
            lambda body: self._on_message(process_id, body),
            lambda _: self._forget(process_id, channel),
            self._options.heartbeat_s,
        )
        with self._lock:
            known = self._channels.setdefault(process_id, channel) is not channel
        if known:
            refuse(wire, process_id)
        channel.start()

    def ready(self) -> frozenset[int]:
        """Returns the processes to form the group anew with: none until it has served for the interval.

        These are of nodes all of whose processes are back, on one host. A process that has been silent for longer than
        a starting process may be is dropped, and may come again.
        """
        self._drop_silent()
        interval = self._options.cluster_grow_interval
        if self._serving_since is None or self._clock() - self._serving_since < interval:
            return frozenset()
        with self._lock:
            return frozenset(filter(self._is_whole, self._hosts))

    def _is_whole(self, process_id: int) -> bool:
        hosts = [self._hosts.get(other) for other in self._options.node_of(process_id)]
        return None not in hosts and len(set(hosts)) == 1

    def _on_message(self, process_id: int, body: bytes) -> None:
        """Makes a process wait after its first message; ignores its other messages."""
        message = messages.decode_for_leader(body)
        if not isinstance(message, Hello):
            return
        channel = self._channels[process_id]
        if found := differences(self._fields, message.fields, process_id):
            reason = f"process {process_id} is not configured as process {LEADER}: {found}"
            _log.warning("it cannot rejoin: %s", reason)
            channel.send_last(messages.encode(Stop(reason)))
            return
        channel.send(messages.encode(Wait()))
        with self._lock:
            self._hosts[process_id] = message.host
        _log.info("process %d waits to rejoin (pid %d on %s)", process_id, message.pid, message.host)

    def _drop_silent(self) -> None:
        limit = time.monotonic() - self._options.starting_silence_s
        with self._lock:
            silent = [(i, channel) for i, channel in self._channels.items() if channel.last_received_s < limit]
        for process_id, channel in silent:
            channel.send_last(messages.encode(Stop("it was silent for too long")))
            self._forget(process_id, channel)

    def _forget(self, process_id: int, channel: Channel) -> None:
        with self._lock:
            if self._channels.get(process_id) is channel:
                del self._channels[process_id]
                self._hosts.pop(process_id, None)


def refuse(wire: Wire, process_id: int) -> None:
    """Refuses a process whose id is taken; raises WireError with the reason."""
    wire.send(messages.encode(Stop(f"another process has --process_id {process_id} already")))
    wire.end()
    wire.discard(REFUSAL_S)
    raise WireError(f"it claims to be process {process_id}, which is connected already")
