"""Processes that come back to a gang that has gone on without them. They wait here, connected, for the next gang.

Nothing they do or say harms the gang that serves.
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
"""The bound for the farewell of a process that is turned away."""


class RejoiningProcesses:
    """Those of an instance's processes that are `missing` in its gang; `fields` are the leader's fingerprint.

    `clock` gives seconds.
    """

    def __init__(
        self,
        options: ClusterOptions,
        fields: Fields,
        missing: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.missing = missing
        self._options, self._fields, self._clock = options, fields, clock
        self._lock = threading.Lock()
        self._channels: dict[int, Channel] = {}
        self._back: dict[int, str] = {}  # hosts, by process
        self._serving_since: float | None = None

    @property
    def channels(self) -> list[Channel]:
        """Connections to those that wait, and to those that have not said anything yet."""
        with self._lock:
            return list(self._channels.values())

    def serve(self) -> None:
        """Notes that the gang serves from now on."""
        self._serving_since = self._clock()

    def admit(self, process_id: int, wire: Wire) -> None:
        """Lets a process wait. Raises WireError where one with its number waits already."""
        channel = Channel(
            wire,
            lambda: messages.encode(Heartbeat()),
            lambda body: self._take(process_id, body),
            lambda _: self._forget(process_id, channel),
            self._options.heartbeat_s,
        )
        with self._lock:
            known = self._channels.setdefault(process_id, channel) is not channel
        if known:
            refuse(wire, process_id)
        channel.start()

    def due(self) -> frozenset[int]:
        """Returns the processes to form the gang anew with: none until it has served for the interval.

        These are of nodes all of whose processes are there again, on one host.
        One that has been silent for as long as a process may be that starts is forgotten, so that it may come again.
        """
        self._drop_silent()
        interval = self._options.cluster_grow_interval
        if self._serving_since is None or self._clock() - self._serving_since < interval:
            return frozenset()
        with self._lock:
            return frozenset(filter(self._is_whole, self._back))

    def _is_whole(self, process_id: int) -> bool:
        hosts = [self._back.get(other) for other in self._options.node_of(process_id)]
        return None not in hosts and len(set(hosts)) == 1

    def _take(self, process_id: int, body: bytes) -> None:
        """Has a process wait once it has said who it is; what else it says counts for nothing."""
        message = messages.decode_for_leader(body)
        if not isinstance(message, Hello):
            return
        channel = self._channels[process_id]
        if found := differences(self._fields, message.fields, process_id):
            reason = f"process {process_id} is not configured as process {LEADER}: {found}"
            _log.warning("it comes back and cannot take part: %s", reason)
            channel.send_last(messages.encode(Stop(reason)))
            return
        channel.send(messages.encode(Wait()))
        with self._lock:
            self._back[process_id] = message.host
        _log.info("process %d has come back (pid %d on %s)", process_id, message.pid, message.host)

    def _drop_silent(self) -> None:
        limit = time.monotonic() - self._options.starting_silence_s
        with self._lock:
            silent = [(i, channel) for i, channel in self._channels.items() if channel.last_heard_s < limit]
        for process_id, channel in silent:
            channel.send_last(messages.encode(Stop("it has been silent for too long")))
            self._forget(process_id, channel)

    def _forget(self, process_id: int, channel: Channel) -> None:
        with self._lock:
            if self._channels.get(process_id) is channel:
                del self._channels[process_id]
                self._back.pop(process_id, None)


def refuse(wire: Wire, process_id: int) -> None:
    """Turns a process away whose number another one has; raises WireError, which says so."""
    wire.send(messages.encode(Stop(f"another process has --process_id {process_id} already")))
    wire.end()
    wire.discard(REFUSAL_S)
    raise WireError(f"it says to be process {process_id}, which is here already")
