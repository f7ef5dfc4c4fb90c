"""Gives pages to other instances: what the host's memory holds, and what comes there while they wait.

Nothing is reserved for anyone. A page lies in the host's memory like every other and leaves it by age; whoever comes
too late computes it.

A *meeting* is a request that a router hands to two instances at once, under a number (SGLang's `bootstrap_room`). The
prefill instance notes here how far its request is, and the decode instance asks (`client.py`). Pages are named by their
content and not by meetings, so a number that is wrong costs time and no answer.
"""

import contextlib
import logging
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from dsv3.kv_cache.page_keys import header_of
from dsv3.kv_cache.tiers.host_pool import HostPool, Place
from dsv3.kv_cache.transfer import protocol
from dsv3.kv_cache.transfer.protocol import (
    Ask,
    BootstrapStages,
    HelloAnswer,
    Locate,
    Located,
    PeerError,
    PeerHello,
    Question,
    Stage,
    Want,
)
from dsv3.processes.certificates import credentials_of, tls_context
from dsv3.processes.unauthenticated import UnauthenticatedConnections, listen

_MOST_PEERS = 256
_MAX_WARNINGS = 20
_PAUSE_S = 0.1  # after an error of accept, such as no free descriptor
_MOST_BOOTSTRAP_ROOMS = 2**16
_log = logging.getLogger(__name__)


class BootstrapRooms:
    """The meetings of an instance whose processes give pages at `addresses`; any thread may ask.

    The oldest are forgotten where there are too many. Requests without a meeting have None, which changes nothing.
    """

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        self.addresses = list(addresses)
        self._lock = threading.Lock()
        self._stages: OrderedDict[int, Stage] = OrderedDict()

    def open(self, bootstrap_room: int | None) -> None:
        """Notes that a request waits; a meeting that has begun stays so, as several prompts may share it."""
        if bootstrap_room is None:
            return
        with self._lock:
            if self._stages.get(bootstrap_room) != "begun":
                self._note(bootstrap_room, "queued")

    def begin(self, bootstrap_room: int | None) -> None:
        """Notes that a request has a slot."""
        if bootstrap_room is None:
            return
        with self._lock:
            self._note(bootstrap_room, "begun")

    def leave(self, bootstrap_room: int | None) -> None:
        """Notes that a request has ended, wherever it was."""
        if bootstrap_room is None:
            return
        with self._lock:
            if self._stages.get(bootstrap_room) == "queued":
                self._note(bootstrap_room, "gone")

    def stages(self, bootstrap_rooms: Sequence[int]) -> list[Stage]:
        """Returns how far each of `bootstrap_rooms` is."""
        with self._lock:
            return [self._stages.get(bootstrap_room, "unknown") for bootstrap_room in bootstrap_rooms]

    def _note(self, bootstrap_room: int, stage: Stage) -> None:
        self._stages[bootstrap_room] = stage
        if len(self._stages) > _MOST_BOOTSTRAP_ROOMS:
            self._stages.popitem(last=False)


class PageServer:
    """Serves the pages of `host_pool` to whoever knows `secret` and is like `hello`; listens at `host`:`port`.

    Tells how far the requests of `bootstrap_rooms` are, and where pages lie if their memory is `shared`. Raises
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
        self._unauthenticated, self._peers = UnauthenticatedConnections(), threading.BoundedSemaphore(_MOST_PEERS)
        self._warnings = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.pages_sent = self.pages_located = 0
        self._listener = _listen(host, port)
        threading.Thread(target=self._accept, name="kv-serve", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port where it listens."""
        host, port, *_ = self._listener.getsockname()
        return host, port

    def close(self) -> None:
        """Ends listening; connections go on."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
                guard = connection.dup()  # TLS takes the socket over, and a stranger that is displaced loses it
                self._unauthenticated.add(guard, address[0])
                threading.Thread(target=self._greet, args=(connection, guard, address[0]), daemon=True).start()
            except (OSError, RuntimeError) as error:  # no descriptor, or no thread
                if not self._closed.wait(_PAUSE_S):
                    self._warn(f"cannot take a connection: {error}")

    def _greet(self, connection: socket.socket, guard: socket.socket, address: str) -> None:
        try:
            connection.settimeout(protocol.HANDSHAKE_S)
            with self._context.wrap_socket(connection, server_side=True) as tls:
                other = protocol.receive(tls, PeerHello)
                self._unauthenticated.remove(guard)
                if other is not None:
                    self._admit(tls, other)
        except (OSError, ssl.SSLError) as error:
            self._warn(f"{address}: {error}")
        finally:
            self._unauthenticated.remove(guard)
            for each in (guard, connection):
                each.close()

    def _admit(self, tls: ssl.SSLSocket, other: PeerHello) -> None:
        """Serves an instance that is like this one, as long as it asks."""
        refusal = protocol.difference(self._hello, other)
        if not refusal and not self._peers.acquire(blocking=False):
            refusal = f"{_MOST_PEERS} others are being served"
        agent = self._agent if other.reads and not refusal else b""
        protocol.send(tls, HelloAnswer(refusal, agent))
        if refusal:
            raise PeerError(f"refused an instance: {refusal}")
        try:
            buffer = np.empty(self._hello.value_bytes, np.uint8)
            while (question := self._next(tls)) is not None:
                tls.settimeout(protocol.STALL_S)
                if isinstance(question, Ask):
                    stages = self.bootstrap_rooms.stages(question.bootstrap_rooms[: protocol.MAX_BOOTSTRAP_ROOMS])
                    protocol.send(tls, BootstrapStages(stages, self.bootstrap_rooms.addresses))
                elif isinstance(question, Locate):
                    protocol.send(tls, Located(self._places(question)))
                else:
                    self._serve(tls, question, buffer)
        finally:
            self._peers.release()

    def _next(self, tls: ssl.SSLSocket) -> Question | None:
        tls.settimeout(protocol.IDLE_S)
        try:
            return protocol.receive_question(tls)
        except TimeoutError:
            return None

    def _places(self, asked: Locate) -> list[Place]:
        keys = asked.keys[: protocol.MAX_KEYS] if self._agent else []
        if not keys or not self._host_pool.wait_for(keys[0], min(asked.patience_s, protocol.MAX_PATIENCE_S)):
            return []
        places = []
        for key in keys:
            if (place := self._host_pool.place_of(key)) is None:
                break
            places.append(place)
        self.pages_located += len(places)
        return places

    def _serve(self, tls: ssl.SSLSocket, want: Want, buffer: np.ndarray) -> None:
        for key in want.keys[: protocol.MAX_KEYS]:
            there = self._host_pool.wait_for(key, min(want.patience_s, protocol.MAX_PATIENCE_S))
            if not there or not self._host_pool.get(key, buffer):
                break
            tls.sendall(protocol.HAVE + header_of(key, buffer).pack())
            tls.sendall(memoryview(buffer))
            self.pages_sent += 1
        tls.sendall(protocol.NO_MORE)

    def _warn(self, text: str) -> None:
        with self._lock:
            self._warnings += 1
        if self._warnings <= _MAX_WARNINGS:
            _log.warning("%s", text)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        raise ValueError(
            f"transfer_address: cannot listen at {host}:{port}: {error.strerror or error}; give a free port here"
        ) from None
