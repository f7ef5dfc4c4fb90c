"""Sends frames between two processes that share a secret, over TLS 1.3 in which each shows a certificate made from it.

TLS encrypts, and sees to it that nothing is forged, changed, replayed, dropped in between or sent back. Frames are
those of `dsv3.processes.frames`, of which TLS gets at most 1 MiB at once. The first message of a follower is its
process id, and the leader's answer is empty, or says why it refuses the process.
"""

import contextlib
import math
import socket
import ssl
import struct
import threading
import time

from dsv3.processes import frames
from dsv3.processes.certificates import Credentials, tls_context

# A follower gets only its ranks' part of a command: 17 kB for 16 chunks of 4,096 tokens over 18 hosts
# (`python -m benchmarks.cluster_send`). Masks take most: 126.3 MiB for 8 ranks of 256 rows of 4 tokens, all held to
# grammars over a vocabulary of 129,280, and `dsv3.scheduler.masks` bounds them.
MAX_MESSAGE_BYTES = 512 * 2**20
"""The longest message. It bounds what another process can make this one hold; `Channel.send` refuses a longer one."""

HANDSHAKE_S = 5.0
"""Seconds that a follower has to prove that it knows the key."""

PATIENCE_S = 15.0
"""Seconds that a follower waits for the leader's answer: longer, so that the leader has decided before."""

_PROCESS_ID = struct.Struct("<I")
_PART_BYTES = 2**20  # what TLS encrypts at once, and so what a connection's buffers hold
_MAX_REFUSAL_BYTES = 1000
_READ_BYTES, _RECORD_BYTES = 2**18, 2**14


class WireError(Exception):
    """The other process is not what it should be, or has sent what is no frame; the message says which."""


class Unanswered(WireError):
    """The connection ended, or time was over, before the other process has said who it is; another try may succeed."""


class Wire:
    """An encrypted connection to another process. One thread may send and one receive.

    The TLS state is used by both under a lock, and never waits for the network: OpenSSL's connections are not to be
    used by two threads at once.
    """

    def __init__(self, connection: socket.socket, credentials: Credentials, is_server: bool) -> None:
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls_context(credentials, is_server).wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._lock = threading.Lock()
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def shake_hands(self, deadline: float) -> None:
        """Proves to each side that the other knows the key.

        Raises ssl.SSLError where one does not, EOFError when the connection ends, OSError when it breaks or time is
        over.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(deadline)
                self._fill(deadline)
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush(deadline)  # tells the other side so
                raise
            else:
                self._flush(deadline)
                return

    def send(self, body: bytes) -> None:
        """Sends a message. Raises OSError when the connection has ended, WireError for one that is too long."""
        if len(body) > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {len(body)} bytes, at most {MAX_MESSAGE_BYTES} can be sent")
        rest = memoryview(body)
        self._send_part(frames.head(len(body)) + rest[:_PART_BYTES])
        for start in range(_PART_BYTES, len(body), _PART_BYTES):
            self._send_part(rest[start : start + _PART_BYTES])

    def _send_part(self, part: bytes | memoryview) -> None:
        with self._lock:
            self._tls.write(part)
        self._flush()

    def receive(self, deadline: float | None = None, limit: int = MAX_MESSAGE_BYTES) -> bytes | None:
        """Returns the next message, None when the connection has ended.

        Raises WireError for one that is longer than `limit` or that the other process has not made.
        """
        try:
            length = frames.body_length(self._read(frames.HEAD_BYTES, deadline), limit)
            return self._read(length, deadline)
        except frames.FrameError as error:
            raise WireError(str(error)) from None
        except ssl.SSLError as error:
            raise WireError(f"what came is no frame of the other process ({error.reason or error})") from None
        except (EOFError, OSError):
            return None

    def end(self) -> None:
        """Tells the other process that nothing more will be sent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def end_receiving(self) -> None:
        """Lets `receive` return what has come already, then None."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def discard(self, timeout_s: float = math.inf) -> None:
        """Reads and drops what comes until the other process closes its end, at most `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                if left < math.inf:
                    self._connection.settimeout(left)
                if not self._connection.recv(2**16):
                    return

    def close(self) -> None:
        """Ends the connection; `receive` returns None in a thread that waits there."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, count: int, deadline: float | None) -> bytes:
        """Returns exactly `count` bytes; raises EOFError if the connection ends before, TimeoutError too late."""
        data = bytearray()
        while len(data) < count:
            try:
                with self._lock:
                    part = self._tls.read(min(count - len(data), _RECORD_BYTES))
            except ssl.SSLWantReadError:
                self._fill(deadline)
                continue
            if not part:
                raise EOFError("the connection ended")
            data += part
        return bytes(data)

    def _fill(self, deadline: float | None) -> None:
        """Waits for encrypted bytes."""
        self._set_timeout(deadline)
        received = self._connection.recv(_READ_BYTES)
        if not received:
            raise EOFError("the connection ended")
        with self._lock:
            self._incoming.write(received)

    def _flush(self, deadline: float | None = None) -> None:
        """Sends the encrypted bytes that wait."""
        with self._lock:
            waiting = self._outgoing.read()
        if waiting:
            self._set_timeout(deadline)
            self._connection.sendall(waiting)

    def _set_timeout(self, deadline: float | None) -> None:
        if deadline is None:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left)


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
            raise EOFError("it has not said its process id")
        [process_id] = _PROCESS_ID.unpack(body)
        if not 0 < process_id < num_processes:
            refusal = f"process id {process_id} is not from 1 to {num_processes - 1}"
            wire.send(refusal.encode())
            raise WireError(refusal)
        wire.send(b"")
    except ssl.SSLError as error:
        raise WireError(f"it does not know the key, or is no process of an instance ({error.reason})") from None
    except (OSError, EOFError) as error:
        raise WireError(f"it did not complete the handshake ({_text(error)})") from None
    connection.settimeout(None)
    return process_id, wire


def connect(connection: socket.socket, credentials: Credentials, process_id: int) -> Wire:
    """Shakes hands as follower `process_id`; returns the wire to the leader.

    Raises WireError for a leader that does not know the key or refuses this process, Unanswered where the connection
    ends before that is known, or after `PATIENCE_S`.
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
        raise Unanswered(f"the leader did not complete the handshake ({_text(error)})") from None
    if refusal is None:
        raise Unanswered("the leader ended the connection, or did not answer in time")
    if refusal:
        raise WireError(f"the leader refused this process: {refusal.decode(errors='replace')}")
    connection.settimeout(None)
    return wire


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
