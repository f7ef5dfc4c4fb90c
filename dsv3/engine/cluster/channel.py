"""Carries messages to and from another process of the instance, on threads of its own, and notices its silence.

A message waits in a bounded queue, so no caller waits for the network. A last message is acknowledged: the other
process closes its end once it has read it, and `wait_closed` waits for that.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable

from dsv3.engine.cluster.wire import MAX_MESSAGE_BYTES, Wire, WireError

_MAX_BUFFERED_BYTES = 2 * MAX_MESSAGE_BYTES
_log = logging.getLogger("dsv3.cluster")


class ChannelError(Exception):
    """A message cannot be sent. The text completes "process 3 ..."."""


class Channel:
    """The connection to one other process, over a wire.

    `heartbeat` returns the body that is sent when nothing was for `heartbeat_s` seconds. `on_message` is called with
    each body that comes, `on_end` once with what has become of the other process ("has ended ..."); both on the
    receiving thread, from `start` on. What has come before the end is handed to `on_message` first. `last_heard_s` is
    when the other process was last heard, on the monotonic clock.
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
        self._on_message, self._on_end = on_message, on_end
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._buffered = 0
        self.last_heard_s = time.monotonic()
        self._send_error = ""
        self._closed = threading.Event()

    def start(self) -> None:
        """Begins to send and to receive."""
        for target in (self._send, self._receive):
            threading.Thread(target=target, name=f"channel{target.__name__}", daemon=True).start()

    @property
    def closed(self) -> bool:
        """Whether nothing more can come: the other process has closed its end, or the connection is broken."""
        return self._closed.is_set()

    def forgive(self) -> None:
        """Counts the silence from now on."""
        self.last_heard_s = time.monotonic()

    def send(self, body: bytes) -> None:
        """Queues a message, without waiting. Raises ChannelError where it is too long or too much waits already."""
        if len(body) > MAX_MESSAGE_BYTES:
            raise ChannelError(
                f"cannot be sent a message of {len(body)} bytes, at most {MAX_MESSAGE_BYTES} can be sent"
            )
        with self._lock:
            full = self._buffered + len(body) > _MAX_BUFFERED_BYTES
            self._buffered += 0 if full else len(body)
        if full:
            raise ChannelError(f"does not read what is sent to it: {self._buffered} bytes wait")
        self._queue.put(body)

    def send_last(self, body: bytes) -> None:
        """Queues a last message, whatever waits already. What is sent afterwards is dropped."""
        with self._lock:
            self._buffered += len(body)
        self._queue.put(body)
        self._queue.put(None)

    def wait_closed(self, timeout_s: float) -> bool:
        """Waits until the other process has closed its end, at most `timeout_s` seconds; returns whether it has."""
        return self._closed.wait(timeout_s)

    def _send(self) -> None:
        try:
            while (body := self._next()) is not None:
                self._wire.send(body)
            self._wire.end()
        except Exception as error:
            if not isinstance(error, ConnectionError):
                self._send_error = f"cannot be sent to any more ({type(error).__name__}: {error})"
                _log.debug("sending failed", exc_info=True)
            self._wire.end_receiving()  # the receiver tells of it, after what has already come

    def _next(self) -> bytes | None:
        """Returns the next body to send, a heartbeat if there is none for long, None after the last one."""
        try:
            body = self._queue.get(timeout=self._heartbeat_s)
        except queue.Empty:
            return self._heartbeat()
        if body is not None:
            with self._lock:
                self._buffered -= len(body)
        return body

    def _receive(self) -> None:
        try:
            while (body := self._wire.receive()) is not None:
                self.last_heard_s = time.monotonic()
                self._on_message(body)
            self._closed.set()
            end = self._send_error or "has ended, or the connection to it is broken"
        except WireError as error:
            end = f"sent what is no message: {error}"
        except Exception as error:
            end = f"sent a message that cannot be taken ({type(error).__name__}: {error})"
        self._on_end(end)
        # Bytes that nobody reads would make the kernel reset the connection when this process ends, and a reset may
        # overtake the last message.
        self._wire.discard()
        self._closed.set()
