"""Publishes KV cache events over ZMQ: a PUB socket per rank, and a ROUTER socket to replay missed batches.

    PUB      (topic, number, payload)
    ROUTER   ("", number of the first wanted) -> ("", number, payload) of each, then ("", -1, "")

Numbers are 8 bytes, big endian, and count the batches of a rank. A missing number was lost on the way or dropped here;
its consumer drops what it knows of the rank, or requests the batch on the ROUTER socket.
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

_TICK_MS = 20  # how long a batch of an idle engine waits
_BATCHES_PER_POLL = 64
_log = logging.getLogger(__name__)


class Publisher:
    """Publishes the events in `queue` from a thread, until `close` or its own end.

    Raises ValueError where an endpoint cannot be opened.
    """

    def __init__(self, config: KvEventsConfig, num_ranks: int, page_size: int) -> None:
        self.queue = EventQueue(config.max_queue_size)
        context = zmq.Context()
        try:
            ranks = [_RankSockets(context, config, rank) for rank in range(num_ranks)]
        except ValueError:
            context.destroy(linger=0)
            raise
        stop = threading.Event()
        arguments = context, ranks, self.queue, EventEncoder(num_ranks, page_size), stop
        thread = threading.Thread(target=_serve, args=arguments, name="kv-events", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, stop, thread)
        """Sends queued batches and closes the sockets."""


class _RankSockets:
    """One rank's sockets, and its last batches."""

    def __init__(self, context: zmq.Context, config: KvEventsConfig, rank: int) -> None:
        self._topic, self._next = config.topic.encode(), 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        address = endpoint_of(config.endpoint, rank)
        listens = not address.startswith("tcp://") or "*" in address or "::" in address
        _open(self._pub, "endpoint", address, listens)
        self.replay_socket: zmq.Socket | None = None
        if config.replay_endpoint is not None:
            self.replay_socket = context.socket(zmq.ROUTER)
            self.replay_socket.set_hwm(config.buffer_steps + 1)  # a whole replay for each client; beyond, ZMQ drops
            _open(self.replay_socket, "replay_endpoint", endpoint_of(config.replay_endpoint, rank), True)

    def send(self, payload: bytes) -> None:
        """Sends a batch to all subscribers; slow ones miss it."""
        number = self._next.to_bytes(8, "big")
        self._next += 1
        self._sent.append((number, payload))
        self._pub.send_multipart((self._topic, number, payload))

    def skip(self, count: int) -> None:
        """Leaves out the numbers of dropped batches."""
        self._next += count

    def replay(self) -> None:
        """Answers one request for a replay."""
        assert self.replay_socket is not None
        client, *_, first = self.replay_socket.recv_multipart()
        for number, payload in self._sent:
            if number >= first:
                self.replay_socket.send_multipart((client, b"", number, payload))
        self.replay_socket.send_multipart((client, b"", END, b""))


def _open(socket: zmq.Socket, field: str, address: str, listens: bool) -> None:
    socket.linger = 0
    try:
        socket.bind(address) if listens else socket.connect(address)
    except zmq.ZMQError as error:
        raise ValueError(
            f"kv_events_config: {field}: {address!r} cannot be opened: {error}; give a free address of this host"
        ) from None


def _serve(
    context: zmq.Context, ranks: list[_RankSockets], queue: EventQueue, encoder: EventEncoder, stop: threading.Event
) -> None:
    poller = zmq.Poller()
    by_socket = {rank.replay_socket: rank for rank in ranks if rank.replay_socket is not None}
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    has_more = ending = False
    while has_more or not ending:
        ending = stop.is_set()
        pause = 0 if has_more or ending else _TICK_MS
        for socket, _ in poller.poll(pause) if by_socket else ():
            _guarded(by_socket[socket].replay)
        if not by_socket:
            stop.wait(pause / 1e3)
        queue.end_batch()
        has_more = all(_guarded(lambda: _send_next(ranks, queue, encoder)) for _ in range(_BATCHES_PER_POLL))
    context.destroy(linger=100)


def _send_next(ranks: list[_RankSockets], queue: EventQueue, encoder: EventEncoder) -> bool:
    batch = queue.pop()
    if batch is None:
        return False
    for rank, payload in encoder.messages(batch):
        ranks[rank].send(payload)
    if batch.dropped:
        for each in ranks:
            each.skip(batch.dropped)
    return True


def _guarded(work: Callable[[], bool | None]) -> bool | None:
    """Calls `work` and logs its exception, so that a malformed request does not end the thread."""
    try:
        return work()
    except Exception:
        _log.exception("KV events: a message could not be handled")
        return True


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(2.0)
