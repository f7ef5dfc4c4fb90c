"""Frames between processes that share a secret, over TLS 1.3 in which each shows a certificate made from it.

TLS encrypts, and sees to it that nothing is forged, changed, replayed, dropped in between or sent back. Frames are
those of `dsv3.processes.frames`, of which TLS gets at most 1 MiB at once. The first message of a follower is its
process id, and the leader's answer is empty, or says why it refuses the process.
"""

import contextlib
import logging
import math
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from dsv3.config.options import LEADER, ClusterOptions
from dsv3.engine.errors import ClusterError
from dsv3.processes import frames
from dsv3.processes.certificates import Credentials, tls_context
from dsv3.processes.unauthenticated import UnauthenticatedConnections, listen

# A follower gets only its ranks' part of a command: 17 kB for 16 chunks of 4,096 tokens over 18 hosts
# (`python -m benchmarks.cluster_send`). Masks take most: 126.3 MiB for 8 ranks of 256 rows of 4 tokens, all held to
# grammars over a vocabulary of 129,280, and `dsv3.scheduler.structured_output` bounds them.
MAX_MESSAGE_BYTES = 512 * 2**20
"""The longest message. It bounds what another process can make this one hold; `Channel.send` refuses a longer one."""

HANDSHAKE_S = 5.0
"""Seconds that a follower has to prove that it knows the key."""

PATIENCE_S = 15.0
"""Seconds that a follower waits for the leader's answer: longer, so that the leader has decided before."""

_log = logging.getLogger("dsv3.cluster")
_PROCESS_ID = struct.Struct("<I")
_PART_BYTES = 2**20  # what TLS encrypts at once, and so what a connection's buffers hold
_MAX_REFUSAL_BYTES = 1000
_READ_BYTES, _RECORD_BYTES = 2**18, 2**14
_AT_ONCE = socket.MSG_DONTWAIT
_MAX_WARNINGS = 20
_PAUSE_S = 0.1  # after an error of accept, such as no free descriptor; strangers give theirs back within HANDSHAKE_S


class WireError(Exception):
    """The other process is not what it should be, or has sent what is no frame; the message says which."""


class Unanswered(WireError):
    """The connection ended, or time was over, before the other process has said who it is; another try may succeed."""


class Wire:
    """An encrypted connection to another process, used by one thread at a time.

    Before a channel has it, `send` and `receive` wait for the network. Its channel calls `put`, `pump` and `take`,
    which do not.
    """

    def __init__(self, connection: socket.socket, credentials: Credentials, is_server: bool) -> None:
        self.connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls_context(credentials, is_server).wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._splitter = frames.Splitter()
        self._bodies: deque[bytes] = deque()  # have come, and wait to be received
        self._parts: deque[bytes | memoryview] = deque()  # wait to be encrypted
        self._unsent = memoryview(b"")  # is encrypted, and waits for room in the socket
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
        self.put(body)
        while self.pump(wait=True):
            pass

    def receive(self, deadline: float | None = None, limit: int = MAX_MESSAGE_BYTES) -> bytes | None:
        """Returns the next message, None when the connection has ended.

        Raises WireError for one that is longer than `limit` or that the other process has not made.
        """
        try:
            while not self._bodies:
                if not self._decrypt(limit):
                    self._fill(deadline)
            return self._bodies.popleft()
        except (EOFError, OSError):
            return None

    def put(self, body: bytes) -> None:
        """Queues a message for `pump`. Raises WireError for one that is too long."""
        if len(body) > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {len(body)} bytes, at most {MAX_MESSAGE_BYTES} can be sent")
        rest = memoryview(body)
        self._parts.append(frames.head(len(body)) + rest[:_PART_BYTES])
        self._parts += (rest[start : start + _PART_BYTES] for start in range(_PART_BYTES, len(body), _PART_BYTES))

    def pump(self, wait: bool = False) -> bool:
        """Sends a part of what is queued, as much as the socket takes at once; returns whether anything is left.

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

    def take(self) -> Iterator[bytes]:
        """Yields the messages that have come. Raises EOFError or OSError behind them when the connection has ended.

        Raises WireError for what is no message, likewise.
        """
        yield from self._come()
        with contextlib.suppress(BlockingIOError):
            self._incoming.write(self._received(_AT_ONCE))
            yield from self._come()

    def drop(self) -> None:
        """Drops what has come. Raises EOFError or OSError when the connection has ended."""
        with contextlib.suppress(BlockingIOError):
            self._received(_AT_ONCE)

    def end(self) -> None:
        """Tells the other process that nothing more will be sent."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def end_receiving(self) -> None:
        """Lets `receive` and `take` return what has come already, then no more."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def discard(self, timeout_s: float = math.inf) -> None:
        """Reads and drops what comes until the other process closes its end, at most `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                if left < math.inf:
                    self.connection.settimeout(left)
                if not self.connection.recv(2**16):
                    return

    def close(self) -> None:
        """Ends the connection for both processes."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _come(self) -> Iterator[bytes]:
        while self._bodies or self._decrypt(MAX_MESSAGE_BYTES):
            while self._bodies:
                yield self._bodies.popleft()

    def _decrypt(self, limit: int) -> bool:
        """Reads a record of what has come; returns False where there is no whole one."""
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
            raise WireError(f"what came is no frame of the other process ({error.reason or error})") from None
        return True

    def _fill(self, deadline: float | None) -> None:
        """Waits for encrypted bytes."""
        self._set_timeout(deadline)
        self._incoming.write(self._received())

    def _received(self, flags: int = 0) -> bytes:
        received = self.connection.recv(_READ_BYTES, flags)
        if not received:
            raise EOFError("the connection ended")
        return received

    def _flush(self, deadline: float) -> None:
        """Sends what the handshake has to say."""
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


class Entrance:
    """The control port: listens, shakes hands, and keeps strangers from keeping others out.

    Each connection is greeted on a thread of its own. Those that have proved nothing yet are bounded in number. When
    there are too many, the address that has most of them loses its oldest one: a stranger displaces itself, and a
    process that is displaced comes again. `admit` is called with each process that has proved itself: its id, its
    wire, its address.

    `admit` may raise WireError to refuse the process. It is called on the connection's own thread. The constructor
    listens and raises ClusterError where it cannot; `open` begins to accept.
    """

    def __init__(
        self, options: ClusterOptions, credentials: Credentials, admit: Callable[[int, Wire, str], None]
    ) -> None:
        self._credentials, self._num_processes, self._admit = credentials, options.num_processes, admit
        self._unauthenticated = UnauthenticatedConnections()
        self._lock = threading.Lock()
        self._greetings = self._warnings = 0
        self._closed = threading.Event()
        self._listener = _listen(options)

    @property
    def address(self) -> str:
        """Host and port."""
        return "{}:{}".format(*self._listener.getsockname()[:2])

    @property
    def is_busy(self) -> bool:
        """Whether a connection is being greeted, admitted or refused."""
        return self._greetings > 0

    def open(self) -> None:
        """Begins to accept connections."""
        threading.Thread(target=self._accept, name="entrance", daemon=True).start()

    def close(self) -> None:
        """Ends listening; connections that have come are still greeted."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone leaves a thread in accept, and the port open
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
                self._begin(connection, address[0])
            except (OSError, RuntimeError) as error:  # no descriptor, or no thread
                if not self._closed.wait(_PAUSE_S):
                    self._warn(f"cannot take a connection: {error}")

    def _begin(self, connection: socket.socket, address: str) -> None:
        self._unauthenticated.add(connection, address)
        self._count(1)
        try:
            threading.Thread(target=self._greet, args=(connection, address), name="greeting", daemon=True).start()
        except RuntimeError:
            self._refuse(connection)
            raise

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            process_id, wire = accept(connection, self._credentials, self._num_processes)
            self._unauthenticated.remove(connection)
            self._admit(process_id, wire, address)
            self._count(-1)
        except (WireError, OSError, RuntimeError) as error:  # the last where there is no thread for it
            self._refuse(connection)
            self._warn(f"refused a connection from {address}: {error}")

    def _refuse(self, connection: socket.socket) -> None:
        self._unauthenticated.remove(connection)
        connection.close()
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            self._greetings += change

    def _warn(self, text: str) -> None:
        with self._lock:
            self._warnings += 1
        if self._warnings <= _MAX_WARNINGS:
            _log.warning("%s", text)


def _listen(options: ClusterOptions) -> socket.socket:
    host, port = options.control_address
    try:
        return listen(host, port)
    except OSError as error:
        raise ClusterError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; --coordinator must be an address of process "
            f"{LEADER}'s host, with that port and the next one free"
        ) from None
