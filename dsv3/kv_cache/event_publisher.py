"""Sends events over ZMQ: a PUB socket per rank, and a ROUTER socket that repeats what somebody has missed.

    PUB      (topic, number, payload)
    ROUTER   ("", number of the first wanted) -> ("", number, payload) of each, then ("", -1, "")

Numbers are 8 bytes, big endian, and count the batches of a rank. One that is missing was lost on the way or dropped
here; what it said is not known, so its consumer forgets all, or asks for it on the ROUTER socket.
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable

import zmq

from dsv3.config.publishing import KvEventsConfig, endpoint_of
from dsv3.kv_cache.events import EventEncoder, EventQueue

END = (-1).to_bytes(8, "big", signed=True)
"""The number behind the last batch of a replay."""

_TICK_MS = 20  # an idle engine's batch waits so long
_SENT_AT_ONCE = 64  # batches between two looks at the sockets
_log = logging.getLogger(__name__)


class Publisher:
    """Sends what `record` takes, from a thread of its own, until `close` or its own end.

    Raises ValueError where an endpoint cannot be had.
    """

    def __init__(self, config: KvEventsConfig, num_ranks: int, page_size: int) -> None:
        self.record = EventQueue(config.max_queue_size)
        context = zmq.Context()
        try:
            outlets = [_Outlet(context, config, rank) for rank in range(num_ranks)]
        except ValueError:
            context.destroy(linger=0)
            raise
        stop = threading.Event()
        arguments = context, outlets, self.record, EventEncoder(num_ranks, page_size), stop
        thread = threading.Thread(target=_serve, args=arguments, name="kv-events", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, stop, thread)
        """Sends what waits, and lets go of the endpoints."""


class _Outlet:
    """One rank's sockets, and its last batches."""

    def __init__(self, context: zmq.Context, config: KvEventsConfig, rank: int) -> None:
        self._topic, self._next = config.topic.encode(), 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        address = endpoint_of(config.endpoint, rank)
        listens = not address.startswith("tcp://") or "*" in address or "::" in address
        _attach(self._pub, "endpoint", address, listens)
        self.replay: zmq.Socket | None = None
        if config.replay_endpoint is not None:
            self.replay = context.socket(zmq.ROUTER)
            self.replay.set_hwm(config.buffer_steps + 1)  # a whole replay for each client; beyond, ZMQ drops
            _attach(self.replay, "replay_endpoint", endpoint_of(config.replay_endpoint, rank), True)

    def send(self, payload: bytes) -> None:
        """Sends a batch to all subscribers; those that do not keep up miss it."""
        number = self._next.to_bytes(8, "big")
        self._next += 1
        self._sent.append((number, payload))
        self._pub.send_multipart((self._topic, number, payload))

    def skip(self, count: int) -> None:
        """Leaves out the numbers of lost batches."""
        self._next += count

    def repeat(self) -> None:
        """Answers one request for what was sent before."""
        assert self.replay is not None
        client, *_, first = self.replay.recv_multipart()
        for number, payload in self._sent:
            if number >= first:
                self.replay.send_multipart((client, b"", number, payload))
        self.replay.send_multipart((client, b"", END, b""))


def _attach(socket: zmq.Socket, field: str, address: str, listens: bool) -> None:
    socket.linger = 0
    try:
        socket.bind(address) if listens else socket.connect(address)
    except zmq.ZMQError as error:
        raise ValueError(f"kv_events_config: {field}: {address!r} cannot be had: {error}") from None


def _serve(
    context: zmq.Context, outlets: list[_Outlet], record: EventQueue, encoder: EventEncoder, stop: threading.Event
) -> None:
    poller = zmq.Poller()
    asking = {outlet.replay: outlet for outlet in outlets if outlet.replay is not None}
    for socket in asking:
        poller.register(socket, zmq.POLLIN)
    has_more = ending = False
    while has_more or not ending:
        ending = stop.is_set()
        pause = 0 if has_more or ending else _TICK_MS
        for socket, _ in poller.poll(pause) if asking else ():
            _guarded(asking[socket].repeat)
        if not asking:
            stop.wait(pause / 1e3)
        record.close()
        has_more = all(_guarded(lambda: _send_next(outlets, record, encoder)) for _ in range(_SENT_AT_ONCE))
    context.destroy(linger=100)


def _send_next(outlets: list[_Outlet], record: EventQueue, encoder: EventEncoder) -> bool:
    batch = record.take()
    if batch is None:
        return False
    for rank, payload in encoder.messages(batch):
        outlets[rank].send(payload)
    if batch.lost:
        for outlet in outlets:
            outlet.skip(batch.lost)
    return True


def _guarded(work: Callable[[], bool | None]) -> bool | None:
    """Calls `work`; the thread outlives what a stranger sends."""
    try:
        return work()
    except Exception:
        _log.exception("KV events: a message could not be handled")
        return True


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(2.0)
