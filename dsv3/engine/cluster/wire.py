"""Sends frames between two processes that share a secret: mutual challenge and response, then a MAC on every frame.

First both ends prove that they know the key, by HMAC-SHA256 over two fresh nonces. Each direction then has its own
key, derived from the nonces. The MAC of a frame covers the frame's number, so a frame cannot be forged, changed,
replayed, dropped or sent back. Nothing is encrypted. A frame is its length (4 bytes, little endian), its MAC (32 bytes)
and its body.
"""

import contextlib
import hashlib
import hmac
import math
import secrets
import socket
import struct
import time

# A bound against garbage, far above any command: a follower gets only its ranks' part of one, 17 kB for 16 chunks of
# 4,096 tokens over 18 hosts (`python -m benchmarks.cluster_send`).
MAX_FRAME_BYTES = 64 * 2**20
"""The longest body. It bounds the memory that a wrong length field can ask for; `Channel.send` refuses a longer one."""

HANDSHAKE_S = 5.0
"""Seconds that a follower has to prove that it knows the key."""

PATIENCE_S = 15.0
"""Seconds that a follower waits for the leader's answer: longer, so that the leader has decided before."""

_MAGIC = b"dsv3 cluster 1\n"
_NONCE_BYTES = _MAC_BYTES = 32
_HEAD = struct.Struct("<I32s")
_PROOF = struct.Struct("<I32s32s")  # process id, the follower's nonce, MAC
_SEQUENCE = struct.Struct("<QI")
_REFUSAL = bytes(_MAC_BYTES)  # in place of the leader's proof: a refused process does not try again


class WireError(Exception):
    """The other process is not what it should be, or has sent what is no frame; the message says which."""


class Unanswered(WireError):
    """The connection ended, or time was over, before the other process has said who it is; another try may succeed."""


class Wire:
    """An authenticated connection to another process. One thread may send and one receive."""

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._connection = connection
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0
        connection.settimeout(None)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, body: bytes) -> None:
        """Sends a frame. Raises OSError when the connection has ended, WireError for a body that no frame holds."""
        if len(body) > MAX_FRAME_BYTES:
            raise WireError(f"a message of {len(body)} bytes, at most {MAX_FRAME_BYTES} fit a frame")
        mac = _frame_mac(self._send_key, self._sent, body)
        self._sent += 1
        self._connection.sendall(_HEAD.pack(len(body), mac) + body)

    def receive(self) -> bytes | None:
        """Returns the body of the next frame, None when the connection has ended.

        Raises WireError for a frame that is too long or that the other process has not made.
        """
        try:
            head = _read(self._connection, _HEAD.size)
            length, mac = _HEAD.unpack(head)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES} are taken")
            body = _read(self._connection, length)
        except (EOFError, OSError):
            return None
        if not hmac.compare_digest(mac, _frame_mac(self._receive_key, self._received, body)):
            raise WireError("a frame's MAC is wrong")
        self._received += 1
        return body

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


def accept(connection: socket.socket, key: bytes, num_processes: int) -> tuple[int, Wire]:
    """Shakes hands as the leader; returns the other process's id and the wire to it.

    Raises WireError for a process that does not prove within `HANDSHAKE_S` that it knows the key. Such a process learns
    nothing but a nonce, and that it is refused.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    ours = secrets.token_bytes(_NONCE_BYTES)
    try:
        connection.settimeout(HANDSHAKE_S)
        connection.sendall(_MAGIC + ours)
        process_id, theirs, mac = _PROOF.unpack(_read(connection, _PROOF.size, deadline))
        transcript = _transcript(process_id, ours, theirs)
        if not hmac.compare_digest(mac, _mac(key, b"follower", transcript)):
            connection.sendall(_REFUSAL)
            raise WireError("it does not know the key")
        if not 0 < process_id < num_processes:
            connection.sendall(_REFUSAL)
            raise WireError(f"process id {process_id} is not from 1 to {num_processes - 1}")
        connection.sendall(_mac(key, b"leader", transcript))
    except (OSError, EOFError) as error:
        raise WireError(f"it did not complete the handshake ({_text(error)})") from None
    return process_id, Wire(connection, _mac(key, b"to follower", transcript), _mac(key, b"to leader", transcript))


def connect(connection: socket.socket, key: bytes, process_id: int) -> Wire:
    """Shakes hands as follower `process_id`; returns the wire to the leader.

    Raises WireError for a leader that does not know the key or refuses this process, Unanswered where the connection
    ends before that is known, or after `PATIENCE_S`.
    """
    deadline = time.monotonic() + PATIENCE_S
    ours = secrets.token_bytes(_NONCE_BYTES)
    try:
        hello = _read(connection, len(_MAGIC) + _NONCE_BYTES, deadline)
        if not hello.startswith(_MAGIC):
            raise WireError("something else answers at the leader's control port")
        transcript = _transcript(process_id, hello[len(_MAGIC) :], ours)
        connection.settimeout(PATIENCE_S)
        connection.sendall(_PROOF.pack(process_id, ours, _mac(key, b"follower", transcript)))
        answer = _read(connection, _MAC_BYTES, deadline)
    except (OSError, EOFError) as error:
        raise Unanswered(f"the leader did not complete the handshake ({_text(error)})") from None
    if answer == _REFUSAL:
        raise WireError("the leader refused this process: are cluster_key_file and num_processes the same there?")
    if not hmac.compare_digest(answer, _mac(key, b"leader", transcript)):
        raise WireError("whoever listens at the leader's control port does not know the key")
    return Wire(connection, _mac(key, b"to leader", transcript), _mac(key, b"to follower", transcript))


def _transcript(process_id: int, leader_nonce: bytes, follower_nonce: bytes) -> bytes:
    return _MAGIC + process_id.to_bytes(4, "little") + leader_nonce + follower_nonce


def _mac(key: bytes, purpose: bytes, data: bytes) -> bytes:
    return hmac.digest(key, purpose + b"\0" + data, hashlib.sha256)


def _frame_mac(key: bytes, sequence: int, body: bytes) -> bytes:
    mac = hmac.new(key, _SEQUENCE.pack(sequence, len(body)), hashlib.sha256)
    mac.update(body)
    return mac.digest()


def _read(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Returns exactly `count` bytes. Raises EOFError if the connection ends before, TimeoutError past the deadline."""
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        part = connection.recv(min(count - len(data), 2**20))
        if not part:
            raise EOFError("the connection ended")
        data += part
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError("timed out")
    return bytes(data)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
