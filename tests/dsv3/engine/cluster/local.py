"""Instances on this machine: free ports, a key, and leaders and followers that a test plays."""

import contextlib
import queue
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dsv3.config.options import ClusterOptions
from dsv3.engine.cluster import messages
from dsv3.engine.cluster.leader import Leader
from dsv3.engine.cluster.link import Incarnation
from dsv3.engine.cluster.wire import Wire, accept, connect
from dsv3.engine.errors import ClusterError
from dsv3.files import read_key
from dsv3.processes.certificates import Credentials, credentials_of

FRAME_OVERHEAD = 5 + 4 + 1 + 16  # a record's head, the length, the record's kind, its tag
FIELDS = {"weights": "abc", "code": "1"}


def free_port() -> int:
    """A free port whose next one is free too, and that the system does not use for offload_queue connections meanwhile.

    Those come from 32768 on. An instance binds its ports seconds after this, and much later on a busy machine.
    """
    while True:
        port = random.SystemRandom().randrange(16384, 32767)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


def write_key(directory: Path) -> str:
    """A key file."""
    path = directory / "cluster.key"
    path.write_text("0123456789abcdef" * 3)
    path.chmod(0o600)
    return str(path)


def options(directory: Path, num_processes: int, process_id: int = 0, **changes) -> ClusterOptions:
    """Options of a process in an instance on ports of its own."""
    fields = {"coordinator": f"127.0.0.1:{free_port()}", "cluster_key_file": write_key(directory)} | changes
    return ClusterOptions(num_processes=num_processes, process_id=process_id, **fields)


class Follower:
    """One end of a control connection, driven by a test."""

    def __init__(
        self,
        cluster: ClusterOptions,
        process_id: int,
        fields: dict[str, str] | None = None,
        connection: socket.socket | None = None,
        last: Incarnation | None = None,
        host: str = "host",
    ):
        self.wire: Wire = connect(connection or dial(cluster), credentials(cluster), process_id)
        self.send(messages.Hello(FIELDS if fields is None else fields, host, 1, last))

    def send(self, message: messages.ToLeader) -> None:
        self.wire.send(messages.encode(message))

    def received(self) -> Iterator[messages.ToFollower]:
        """All messages, without heartbeats, until the leader ends the connection."""
        while (body := self.wire.receive()) is not None:
            message = messages.decode_for_follower(body)
            if not isinstance(message, messages.Heartbeat):
                yield message


def credentials(cluster: ClusterOptions) -> Credentials:
    """The credentials of the instance's processes."""
    return credentials_of(read_key(cluster.cluster_key_file))


def wires(leader: socket.socket, follower: socket.socket) -> tuple[Wire, Wire]:
    """The wires over both ends of a connection: the leader's, and that of follower 1."""
    key = credentials_of(b"0123456789abcdef" * 3)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, leader, key, 2)
        connected = connect(follower, key, 1)
        return accepted.result()[1], connected


def dial(cluster: ClusterOptions) -> socket.socket:
    """A connection to the control port."""
    return socket.create_connection(cluster.control_address, timeout=30)


class Led:
    """A leader that waits for its followers on a thread, and its callbacks."""

    def __init__(self, cluster: ClusterOptions):
        self.cluster = cluster
        self.failures: queue.Queue[str] = queue.Queue()
        self.drains: queue.Queue[str] = queue.Queue()
        self.leader = Leader(cluster, FIELDS, self._fail, self.drains.put)
        self.error: Exception | None = None
        self._followers: list[Follower] = []
        self._thread = threading.Thread(target=self._gather, daemon=True)
        self._thread.start()

    def follower(self, process_id: int, **settings) -> Follower:
        self._followers.append(Follower(self.cluster, process_id, **settings))
        return self._followers[-1]

    def close(self) -> None:
        """Ends the followers, for which the leader would wait, and then the leader."""
        for follower in self._followers:
            follower.wire.close()
        self.leader.end()

    def gathered(self) -> Exception | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.error

    def failure(self) -> str:
        return self.failures.get(timeout=30)

    def _fail(self, reason: str) -> None:
        self.failures.put(reason)
        self.leader.end(reason)

    def _gather(self) -> None:
        try:
            self.leader.wait_for_followers()
        except ClusterError as error:
            self.error = error
