"""The other end of a wire: what is sent to it waits in a bounded queue, and its silence is noticed."""

import queue
import threading
import time
from collections.abc import Callable

from dsv3.engine.cluster.wire import Wire, WireError

HEARTBEAT_S = 1.0
_MAX_BUFFERED_BYTES = 256 * 2**20


class PeerLost(Exception):
    """The peer cannot be spoken to any more; the message completes "process 3 ..."."""


class Peer:
    """A connected process. `heartbeat` gives the body that is sent when there was nothing to say for `HEARTBEAT_S`.

    `on_message` is called with each body that comes, `on_end` once with what has become of the peer; both on the
    peer's own threads.
    """

    def __init__(
        self,
        wire: Wire,
        heartbeat: Callable[[], bytes],
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._wire, self._heartbeat = wire, heartbeat
        self._on_message, self._on_end = on_message, on_end
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._buffered = 0
        self._last_heard = time.monotonic()
        self._sender = threading.Thread(target=self._send, name="peer sender", daemon=True)
        self._receiver = threading.Thread(target=self._receive, name="peer receiver", daemon=True)
        self._sender.start()
        self._receiver.start()

    @property
    def silent_s(self) -> float:
        """Seconds since the peer was last heard."""
        return time.monotonic() - self._last_heard

    def forgive(self) -> None:
        """Counts the peer's silence from now on."""
        self._last_heard = time.monotonic()

    def send(self, body: bytes) -> None:
        """Queues a message, without waiting; raises PeerLost when too much waits already."""
        with self._lock:
            self._buffered += len(body)
            full = self._buffered > _MAX_BUFFERED_BYTES
        if full:
            raise PeerLost("does not read what is sent to it")
        self._queue.put(body)

    def send_last(self, body: bytes) -> None:
        """Queues a last message; what is sent afterwards is dropped."""
        self._queue.put(body)
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits until the peer has closed its end, at most `timeout_s`."""
        self._receiver.join(timeout_s)

    def _send(self) -> None:
        while True:
            try:
                body = self._queue.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                body = self._heartbeat()
            else:
                if body is None:
                    return self._wire.end()
                with self._lock:
                    self._buffered -= len(body)
            try:
                self._wire.send(body)
            except OSError:
                return  # the receiver sees the end of the connection too

    def _receive(self) -> None:
        try:
            while (body := self._wire.receive()) is not None:
                self._last_heard = time.monotonic()
                self._on_message(body)
            end = "has ended, or the connection to it is broken"
        except WireError as error:
            end = f"sent what is no message: {error}"
        except Exception as error:
            end = f"sent a message that cannot be taken ({type(error).__name__}: {error})"
        self._on_end(end)
