"""Server of KV transfer: sends pages of the host pool, also those that arrive there while a client waits.

Nothing is reserved for a client. A page in the host pool is evicted by age like every other; a client that comes too
late computes it.

A bootstrap room (SGLang's word) is the number of a request that a router sends to two instances at once. The prefill
instance records here how far its request is, and the decode instance polls (`client.py`). Pages are named by content
and not by room, so a wrong number costs time and never gives a wrong answer.
"""

import functools
import logging
import socket
import ssl
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dsv3.kv_cache.page_keys import make_header
from dsv3.kv_cache.tiers.host_pool import HostPool, PayloadAddress
from dsv3.kv_cache.transfer import protocol
from dsv3.kv_cache.transfer.protocol import (
    BootstrapStages,
    FetchPages,
    HelloAnswer,
    Locate,
    Located,
    PeerError,
    PeerHello,
    PeerRequest,
    PollRooms,
    Stage,
)
from dsv3.processes.certificates import credentials_of, tls_context
from dsv3.processes.peer_listener import PeerListener, Serve

_MAX_PEERS = 256
_MAX_BOOTSTRAP_ROOMS = 2**16
_log = logging.getLogger(__name__)


class BootstrapRooms:
    """Stages of the bootstrap rooms of an instance whose processes serve pages at `addresses`. Thread-safe.

    The oldest are dropped beyond a limit. Requests without a room pass None, which changes nothing.
    """

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        self.addresses = list(addresses)
        self._lock = threading.Lock()
        self._stages: OrderedDict[int, Stage] = OrderedDict()

    def update(self, bootstrap_room: int | None, stage: Stage) -> None:
        """Records that a request of the room is queued, has begun (has a slot), or is gone (has ended).

        A room that has begun stays so, as several prompts may share it.
        """
        if bootstrap_room is None:
            return
        with self._lock:
            before = self._stages.get(bootstrap_room)
            if (stage == "queued" and before == "begun") or (stage == "gone" and before != "queued"):
                return
            self._stages[bootstrap_room] = stage
            if len(self._stages) > _MAX_BOOTSTRAP_ROOMS:
                self._stages.popitem(last=False)

    def stages(self, bootstrap_rooms: Sequence[int]) -> list[Stage]:
        with self._lock:
            return [self._stages.get(bootstrap_room, "unknown") for bootstrap_room in bootstrap_rooms]


class PageServer:
    """Serves the pages of `host_pool` to clients with the same `secret` and `hello`; listens at `host`:`port`.

    Answers the stages of `bootstrap_rooms`, and page addresses if `agent` has the host pool registered. Raises
    ValueError where it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        hello: PeerHello,
        host_pool: HostPool,
        bootstrap_rooms: BootstrapRooms | None = None,
        agent: bytes = b"",
    ) -> None:
        self._agent = agent
        self.bootstrap_rooms = BootstrapRooms() if bootstrap_rooms is None else bootstrap_rooms
        self._context, self._hello, self._host_pool = tls_context(credentials_of(secret), True), hello, host_pool
        self._peers = threading.BoundedSemaphore(_MAX_PEERS)
        self.pages_sent = self.pages_located = 0
        serve = functools.partial(_serve_if_alive, weakref.WeakMethod(self._serve))
        try:
            self._listener = PeerListener(host, port, serve, "KV transfer", _log)
        except OSError as error:
            raise ValueError(
                f"transfer_address: cannot listen at {host}:{port}: {error.strerror or error}; give a free port here"
            ) from None
        self._listener.open()
        self.close = weakref.finalize(self, self._listener.close)
        """Stops listening; open connections continue. The end of the server's engine does so too."""

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.address

    def _serve(self, connection: socket.socket, address: str, on_authenticated: Callable[[], None]) -> None:
        connection.settimeout(protocol.HANDSHAKE_S)
        with self._context.wrap_socket(connection, server_side=True) as tls:
            other = protocol.receive(tls, PeerHello)
            on_authenticated()
            if other is not None:
                self._serve_peer(tls, other)

    def _serve_peer(self, tls: ssl.SSLSocket, other: PeerHello) -> None:
        """Serves the requests of an instance with the same identity until it disconnects."""
        refusal = protocol.difference(self._hello, other)
        is_admitted = not refusal and self._peers.acquire(blocking=False)
        if not refusal and not is_admitted:
            refusal = f"{_MAX_PEERS} connections are being served, which is the limit"
        try:
            protocol.send(tls, HelloAnswer(refusal, self._agent if other.reads and not refusal else b""))
            if refusal:
                raise PeerError(f"refused an instance: {refusal}")
            buffer = np.empty(self._hello.payload_bytes, np.uint8)
            while (request := self._next(tls)) is not None:
                tls.settimeout(protocol.STALL_S)
                if isinstance(request, PollRooms):
                    stages = self.bootstrap_rooms.stages(request.bootstrap_rooms[: protocol.MAX_BOOTSTRAP_ROOMS])
                    protocol.send(tls, BootstrapStages(stages, self.bootstrap_rooms.addresses))
                elif isinstance(request, Locate):
                    protocol.send(tls, Located(self._locate(request)))
                else:
                    self._send_pages(tls, request, buffer)
        finally:
            if is_admitted:
                self._peers.release()

    def _next(self, tls: ssl.SSLSocket) -> PeerRequest | None:
        tls.settimeout(protocol.IDLE_S)
        try:
            return protocol.receive_request(tls)
        except TimeoutError:
            return None

    def _locate(self, request: Locate) -> list[PayloadAddress]:
        keys = request.keys[: protocol.MAX_KEYS] if self._agent else []
        if not keys or not self._host_pool.wait_for(keys[0], min(request.patience_s, protocol.MAX_PATIENCE_S)):
            return []
        addresses = []
        for key in keys:
            if (address := self._host_pool.address_of(key)) is None:
                break
            addresses.append(address)
        self.pages_located += len(addresses)
        return addresses

    def _send_pages(self, tls: ssl.SSLSocket, request: FetchPages, buffer: np.ndarray) -> None:
        for key in request.keys[: protocol.MAX_KEYS]:
            is_stored = self._host_pool.wait_for(key, min(request.patience_s, protocol.MAX_PATIENCE_S))
            if not is_stored or not self._host_pool.get(key, buffer):
                break
            tls.sendall(protocol.PAGE_FOLLOWS + make_header(key, buffer).pack())
            tls.sendall(memoryview(buffer))
            self.pages_sent += 1
        tls.sendall(protocol.END_OF_PAGES)


def _serve_if_alive(serve: weakref.WeakMethod[Serve], connection: socket.socket, *given: Any) -> None:
    """Serves a connection. The listener's thread keeps no server, nor the host memory of an engine that is gone."""
    with connection:
        if (alive := serve()) is not None:
            alive(connection, *given)
