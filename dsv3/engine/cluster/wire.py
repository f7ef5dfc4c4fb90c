"""Encrypted frames between processes that share a secret: TLS 1.3 with certificates made from it on both sides.

TLS prevents forged, changed, replayed, dropped and reflected data. Frames are those of `dsv3.processes.frames`,
encrypted in parts of at most 1 MiB. The first message of a follower is its process id; the leader's answer is empty, or
the reason for refusing the process.
"""

import contextlib
import logging
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator

from dsv3.config.options import LEADER, ClusterOptions
from dsv3.engine.errors import ClusterError
from dsv3.processes import frames
from dsv3.processes.certificates import Credentials, tls_context
from dsv3.processes.peer_listener import PeerListener

# A follower gets only its ranks' part of a command, some kilobytes. Bitmasks are larger: 126.3 MiB for 8 ranks of 256
# constrained rows of 4 tokens over a vocabulary of 129,280; `dsv3.scheduler.structured_output` bounds them.
MAX_MESSAGE_BYTES = 512 * 2**20
"""The longest message. It bounds the memory that another process can make this one allocate."""

HANDSHAKE_S = 5.0
"""Seconds in which a follower must prove that it knows the key."""

PATIENCE_S = 15.0
"""Seconds that a follower waits for the leader's answer: longer, so that the leader decides first."""

_log = logging.getLogger("dsv3.cluster")
_PROCESS_ID = struct.Struct("<I")
_PART_BYTES = 2**20  # what TLS encrypts at once, and so what a connection's buffers hold
_MAX_REFUSAL_BYTES = 1000
_READ_BYTES, _RECORD_BYTES = 2**18, 2**14
_AT_ONCE = socket.MSG_DONTWAIT


class WireError(Exception):
    """The other process has the wrong identity, or sent an invalid frame; the message has details."""


class NoAnswer(WireError):
    """The connection ended or timed out before the other process authenticated; a retry may succeed."""


class Wire:
    """An encrypted connection to another process, used by one thread at a time.

    Before a channel has it, `send` and `receive` wait for the network. Its channel calls `enqueue`, `pump` and
    `receive_available`, which do not.
    """

    def __init__(self, connection: socket.socket, credentials: Credentials, is_server: bool) -> None:
        self.connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls_context(credentials, is_server).wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._splitter = frames.Splitter()
        self._bodies: deque[bytes] = deque()  # received messages
        self._parts: deque[bytes | memoryview] = deque()  # plaintext to send
        self._unsent = memoryview(b"")  # ciphertext to send
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def shake_hands(self, deadline: float) -> None:
        """Proves to each side that the other knows the key.

        Raises ssl.SSLError where one does not, EOFError when the connection ends, OSError when it breaks or times out.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(deadline)
                self._read_socket(deadline)
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush(deadline)  # sends the TLS alert
                raise
            else:
                self._flush(deadline)
                return

    def send(self, body: bytes) -> None:
        """Sends a message. Raises OSError when the connection has ended, WireError for one that is too long."""
        self.enqueue(body)
        while self.pump(wait=True):
            pass

    def receive(self, deadline: float | None = None, limit: int = MAX_MESSAGE_BYTES) -> bytes | None:
        """Returns the next message, None when the connection has ended.

        Raises WireError for one that is longer than `limit` or invalid.
        """
        try:
            while not self._bodies:
                if not self._decrypt(limit):
                    self._read_socket(deadline)
            return self._bodies.popleft()
        except (EOFError, OSError):
            return None

    def enqueue(self, body: bytes) -> None:
        """Queues a message for `pump`. Raises WireError for one that is too long."""
        if len(body) > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {len(body)} bytes, at most {MAX_MESSAGE_BYTES} can be sent")
        rest = memoryview(body)
        self._parts.append(frames.head(len(body)) + rest[:_PART_BYTES])
        self._parts += (rest[start : start + _PART_BYTES] for start in range(_PART_BYTES, len(body), _PART_BYTES))

    def pump(self, wait: bool = False) -> bool:
        """Sends a part of the queue, as much as the socket takes at once; returns whether anything is left.

        With `wait` it waits until the socket takes some. Raises OSError when the connection has ended.
        """
        unsent = self._unsent
        if not unsent:
            if self._parts:
                self._tls.write(self._parts.popleft())
            unsent = memoryview(self._outgoing.read())
        if unsent:
            with contextlib.suppress(BlockingIOError):
                unsent = unsent[self.connection.send(unsent, 0 if wait else _AT_ONCE) :]
        self._unsent = unsent
        return bool(unsent or self._parts)

    def receive_available(self) -> Iterator[bytes]:
        """Yields the messages that have arrived; then raises EOFError or OSError if the connection has ended.

        Raises WireError for an invalid frame, likewise.
        """
        yield from self._decrypted()
        with contextlib.suppress(BlockingIOError):
            self._incoming.write(self._recv(_AT_ONCE))
            yield from self._decrypted()

    def drop(self) -> None:
        """Drops what has arrived. Raises EOFError or OSError when the connection has ended."""
        with contextlib.suppress(BlockingIOError):
            self._recv(_AT_ONCE)

    def end(self) -> None:
        """Closes the sending side."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def end_receiving(self) -> None:
        """Closes the receiving side; messages that have arrived can still be read."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def discard(self, timeout_s: float) -> None:
        """Reads and drops data until the other process closes its end, at most `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                self.connection.settimeout(left)
                if not self.connection.recv(2**16):
                    return

    def close(self) -> None:
        """Closes the connection."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _decrypted(self) -> Iterator[bytes]:
        while self._bodies or self._decrypt(MAX_MESSAGE_BYTES):
            while self._bodies:
                yield self._bodies.popleft()

    def _decrypt(self, limit: int) -> bool:
        """Decrypts one record of the received bytes; returns False where there is no complete one."""
        self._splitter.limit = limit
        try:
            part = self._tls.read(_RECORD_BYTES)
            if not part:
                raise EOFError("the connection ended")
            for body in self._splitter.add(part):
                self._bodies.append(bytes(body))
        except ssl.SSLWantReadError:
            return False
        except frames.FrameError as error:
            raise WireError(str(error)) from None
        except ssl.SSLError as error:
            raise WireError(f"an invalid TLS record was received ({error.reason or error})") from None
        return True

    def _read_socket(self, deadline: float | None) -> None:
        self._set_timeout(deadline)
        self._incoming.write(self._recv())

    def _recv(self, flags: int = 0) -> bytes:
        received = self.connection.recv(_READ_BYTES, flags)
        if not received:
            raise EOFError("the connection ended")
        return received

    def _flush(self, deadline: float) -> None:
        """Sends pending bytes of the handshake."""
        if waiting := self._outgoing.read():
            self._set_timeout(deadline)
            self.connection.sendall(waiting)

    def _set_timeout(self, deadline: float | None) -> None:
        if deadline is None:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.connection.settimeout(left)


def accept(connection: socket.socket, credentials: Credentials, num_processes: int) -> tuple[int, Wire]:
    """Shakes hands as the leader; returns the other process's id and the wire to it.

    Raises WireError for a process that does not prove within `HANDSHAKE_S` that it knows the key.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    try:
        wire = Wire(connection, credentials, is_server=True)
        wire.shake_hands(deadline)
        body = wire.receive(deadline, _PROCESS_ID.size)
        if body is None or len(body) != _PROCESS_ID.size:
            raise EOFError("it has not sent its process id")
        [process_id] = _PROCESS_ID.unpack(body)
        if not 0 < process_id < num_processes:
            refusal = f"process id {process_id} is not from 1 to {num_processes - 1}"
            wire.send(refusal.encode())
            raise WireError(refusal)
        wire.send(b"")
    except ssl.SSLError as error:
        raise WireError(f"it has another key, or is not a process of an instance ({error.reason})") from None
    except (OSError, EOFError) as error:
        raise WireError(f"it did not complete the handshake ({_text(error)})") from None
    connection.settimeout(None)
    return process_id, wire


def connect(connection: socket.socket, credentials: Credentials, process_id: int) -> Wire:
    """Shakes hands as follower `process_id`; returns the wire to the leader.

    Raises WireError for a leader that has another key or refuses this process, NoAnswer where the connection ends
    before, or after `PATIENCE_S`.
    """
    deadline = time.monotonic() + PATIENCE_S
    try:
        wire = Wire(connection, credentials, is_server=False)
        wire.shake_hands(deadline)
        wire.send(_PROCESS_ID.pack(process_id))
        refusal = wire.receive(deadline, _MAX_REFUSAL_BYTES)
    except ssl.SSLCertVerificationError:
        raise WireError("the leader has another key: is cluster_key_file the same there?") from None
    except ssl.SSLError as error:
        raise WireError(f"something else answers at the leader's control port ({error.reason})") from None
    except (OSError, EOFError) as error:
        raise NoAnswer(f"the leader did not complete the handshake ({_text(error)})") from None
    if refusal is None:
        raise NoAnswer("the leader ended the connection, or did not answer in time")
    if refusal:
        raise WireError(f"the leader refused this process: {refusal.decode(errors='replace')}")
    connection.settimeout(None)
    return wire


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def control_listener(
    options: ClusterOptions, credentials: Credentials, on_peer: Callable[[int, Wire, str], None]
) -> PeerListener:
    """Returns the listener of the control port; raises ClusterError where it cannot listen.

    `on_peer` is called with each authenticated process: its id, its wire, its address. It may raise WireError to refuse
    the process. It is called on the connection's own thread.
    """

    def serve(connection: socket.socket, address: str, on_authenticated: Callable[[], None]) -> None:
        process_id, wire = accept(connection, credentials, options.num_processes)
        on_authenticated()
        on_peer(process_id, wire, address)

    host, port = options.control_address
    try:
        return PeerListener(host, port, serve, "control port", _log)
    except OSError as error:
        raise ClusterError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; --coordinator must be an address of "
            f"process {LEADER}'s host, with that port and the next one free"
        ) from None
