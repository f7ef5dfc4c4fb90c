"""Sends and receives messages of the other processes of the instance, and measures their silence.

One thread serves all connections of this process: one or two threads for each of 143 followers took the leader four
times the processor time. ZeroMQ's CURVE took the sending thread 2.3 times as long as these TLS frames, bounded messages
instead of bytes, and hid a hung process. Messages wait in a bounded queue, so no caller waits for
the network. A last message is acknowledged: the other process closes its end once it has read it (`Channel.closed`).
"""

import contextlib
import logging
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from dsv3.engine.cluster.wire import MAX_MESSAGE_BYTES, Wire, WireError

_MAX_BUFFERED_BYTES = 2 * MAX_MESSAGE_BYTES
_log = logging.getLogger("dsv3.cluster")


class ChannelError(Exception):
    """A message cannot be sent. The text completes "process 3 ..."."""


class Channel:
    """The connection to one other process, over a wire.

    `heartbeat` returns the body that is sent when nothing was for `heartbeat_s` seconds. `on_message` is called with
    each body received, `on_end` once with how the connection ended ("has ended ..."); both on the thread of all
    connections, after `start`, so they must not wait. Messages received before the end are delivered first.
    `last_received_s` is when the last message arrived, on the monotonic clock. `closed` is set when nothing
    more can arrive: the other process has closed its end, or the connection is broken.
    """

    def __init__(
        self,
        wire: Wire,
        heartbeat: Callable[[], bytes],
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
        heartbeat_s: float,
    ) -> None:
        self._wire, self._heartbeat, self._heartbeat_s = wire, heartbeat, heartbeat_s
        self.connection = wire.connection
        self._on_message, self._on_end = on_message, on_end
        self._queue: deque[bytes | None] = deque()
        self._lock = threading.Lock()
        self._buffered = 0
        self.last_received_s = self._last_sent_s = time.monotonic()
        self._send_error = ""
        self._has_started = self._waits = self._has_ended = False
        self._sends = self._reads = True
        self.closed = threading.Event()

    def start(self) -> None:
        """Starts sending and receiving."""
        self._has_started = True
        _LOOP.post(self)

    def send(self, body: bytes) -> None:
        """Queues a message, without waiting. Raises ChannelError for a message too long, and for a full queue."""
        if len(body) > MAX_MESSAGE_BYTES:
            raise ChannelError(
                f"cannot be sent a message of {len(body)} bytes, at most {MAX_MESSAGE_BYTES} can be sent"
            )
        with self._lock:
            full = self._buffered + len(body) > _MAX_BUFFERED_BYTES
            self._buffered += 0 if full else len(body)
        if full:
            raise ChannelError(f"does not read its messages: {self._buffered} bytes are queued")
        self._put(body)

    def send_last(self, body: bytes) -> None:
        """Queues a last message, however full the queue. Later messages are dropped."""
        with self._lock:
            self._buffered += len(body)
        self._put(body, None)

    def _put(self, *bodies: bytes | None) -> None:
        self._queue.extend(bodies)
        if self._has_started:
            _LOOP.post(self)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be sent or received. A half-closed connection may still be written to."""
        return not self._sends and not self._reads

    def read(self) -> None:
        """Delivers the messages that have arrived. After an invalid one, the rest is dropped."""
        try:
            if self._has_ended:
                self._wire.drop()
                return
            for body in self._wire.receive_available():
                self.last_received_s = time.monotonic()
                self._deliver(body)
        except (EOFError, OSError):
            self._reads = False
            self.closed.set()
            self._end(self._send_error or "has ended, or the connection to it is broken")
        except WireError as error:
            self._end(f"sent an invalid frame: {error}")

    def _deliver(self, body: bytes) -> None:
        if self._has_ended:
            return
        try:
            self._on_message(body)
        except Exception as error:
            self._end(f"sent an invalid message ({type(error).__name__}: {error})")

    def pump(self) -> int:
        """Sends what the socket takes; returns the selector's events at which to call `read`, or this again."""
        try:
            self._waits = self._sends and self._pump()
        except Exception as error:
            self._fail(error)
        return (selectors.EVENT_READ if self._reads else 0) | (selectors.EVENT_WRITE if self._waits else 0)

    def beat(self, now: float) -> float:
        """Sends a heartbeat if one is due; returns when to call this again."""
        due = self._last_sent_s + self._heartbeat_s
        if not self._sends:
            return math.inf
        if now < due:
            return due
        self._last_sent_s = now
        if not self._queue and not self._waits:
            try:
                self._wire.enqueue(self._heartbeat())
            except Exception as error:
                self._fail(error)
        return now + self._heartbeat_s

    def _pump(self) -> bool:
        """Returns whether something waits for space in the socket."""
        waits = self._wire.pump()
        while self._queue and not waits:
            body = self._queue.popleft()
            if body is None:
                self._sends = False
                self._wire.end()
                return False
            with self._lock:
                self._buffered -= len(body)
            self._wire.enqueue(body)
            self._last_sent_s = time.monotonic()
            waits = self._wire.pump()
        return waits

    def _fail(self, error: Exception) -> None:
        """Stops sending. `on_end` is called after the messages that have arrived already."""
        if not isinstance(error, ConnectionError):
            self._send_error = f"can no longer be sent to ({type(error).__name__}: {error})"
            _log.debug("sending failed", exc_info=error)
        self._sends = self._waits = False
        self._wire.end_receiving()

    def _end(self, text: str) -> None:
        """Reports the end of the connection, once.

        Later messages are read and dropped. Unread bytes would make the kernel reset the connection when this process
        ends, and a reset may overtake the last message.
        """
        if not self._has_ended:
            self._has_ended = True
            try:
                self._on_end(text)
            except Exception:
                _log.exception("reporting the end of a connection failed: %s", text)


class _Loop:
    """Serves the channels of this process on one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: socket.socket | None = None
        self._posted: deque[Channel] = deque()
        self._is_awake = False

    def post(self, channel: Channel) -> None:
        """Makes the thread serve a channel: it is new, or has something to send."""
        self._posted.append(channel)
        wake = self._wake or self._begin()
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(BlockingIOError):
                wake.send(b"\0")

    def _begin(self) -> socket.socket:
        """Starts the thread, once; returns the socket that wakes it."""
        with self._lock:
            if self._wake is None:
                woken, self._wake = socket.socketpair()
                woken.setblocking(False)
                self._wake.setblocking(False)
                threading.Thread(target=self._run, args=(woken,), name="channels", daemon=True).start()
            return self._wake

    def _run(self, woken: socket.socket) -> None:
        selector, channels = selectors.DefaultSelector(), dict[Channel, int]()
        selector.register(woken, selectors.EVENT_READ)
        beat_at = math.inf
        while True:
            for key, events in selector.select(None if beat_at == math.inf else max(0.0, beat_at - time.monotonic())):
                if key.data is None:
                    woken.recv(2**10)
                    self._is_awake = False  # before reading _posted: a later post wakes this thread again
                else:
                    if events & selectors.EVENT_READ:
                        key.data.read()
                    _serve(selector, channels, key.data)
            while self._posted:
                channel = self._posted.popleft()
                if channel not in channels:
                    beat_at = 0.0
                    channel.read()
                _serve(selector, channels, channel)
            if (now := time.monotonic()) >= beat_at:
                beat_at = math.inf
                for channel in list(channels):
                    beat_at = min(beat_at, channel.beat(now))
                    _serve(selector, channels, channel)


def _serve(selector: selectors.BaseSelector, channels: dict[Channel, int], channel: Channel) -> None:
    """Sends what can be sent, and registers the channel's next events; `channels` have the events so far."""
    events, before = channel.pump(), channels.get(channel, 0)
    if events and events == before:
        return
    channels[channel] = events
    if channel.is_over:
        del channels[channel]
    with contextlib.suppress(OSError, ValueError):  # this process has closed the connection
        if before and events:
            selector.modify(channel.connection, events, channel)
        elif before and not events:
            selector.unregister(channel.connection)
        elif events and not before:
            _register(selector, channel, events)


def _register(selector: selectors.BaseSelector, channel: Channel, events: int) -> None:
    try:
        selector.register(channel.connection, events, channel)
    except KeyError:  # the descriptor belonged to a connection that this process has closed
        selector.unregister(channel.connection)
        selector.register(channel.connection, events, channel)


_LOOP = _Loop()
