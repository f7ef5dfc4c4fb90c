"""Lets processes in at the control port: listens, shakes hands, and keeps strangers from keeping others out.

Each connection is greeted on a thread of its own. Those that have proved nothing yet are bounded in number. When there
are too many, the address that has most of them loses its oldest one: a stranger displaces itself, and a process that is
displaced comes again.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from dsv3.config.options import LEADER, ClusterOptions
from dsv3.engine.cluster.wire import Wire, WireError, accept
from dsv3.engine.errors import ClusterError
from dsv3.processes.certificates import Credentials
from dsv3.processes.strangers import Strangers, listen

_log = logging.getLogger("dsv3.cluster")
_MAX_WARNINGS = 20
_PAUSE_S = 0.1  # after an error of accept, such as no free descriptor; strangers give theirs back within HANDSHAKE_S


class Entrance:
    """The control port. `admit` is called with each process that has proved itself: its id, its wire, its address.

    `admit` may raise WireError to refuse the process. It is called on the connection's own thread. The constructor
    listens and raises ClusterError where it cannot; `open` begins to accept.
    """

    def __init__(
        self, options: ClusterOptions, credentials: Credentials, admit: Callable[[int, Wire, str], None]
    ) -> None:
        self._credentials, self._num_processes, self._admit = credentials, options.num_processes, admit
        self._strangers = Strangers()
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
        self._strangers.add(connection, address)
        self._count(1)
        try:
            threading.Thread(target=self._greet, args=(connection, address), name="greeting", daemon=True).start()
        except RuntimeError:
            self._refuse(connection)
            raise

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            process_id, wire = accept(connection, self._credentials, self._num_processes)
            self._strangers.remove(connection)
            self._admit(process_id, wire, address)
            self._count(-1)
        except (WireError, OSError, RuntimeError) as error:  # the last where there is no thread for it
            self._refuse(connection)
            self._warn(f"refused a connection from {address}: {error}")

    def _refuse(self, connection: socket.socket) -> None:
        self._strangers.remove(connection)
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
