"""Client of KV transfer: fetches pages from other instances; one that does not verify ends the connection."""

import contextlib
import dataclasses
import logging
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec
import numpy as np

from dsv3.kv_cache.page_keys import HEADER_BYTES, Key
from dsv3.kv_cache.tiers.counts import CarrierStats
from dsv3.kv_cache.transfer import protocol
from dsv3.kv_cache.transfer.nixl import MemoryReader
from dsv3.kv_cache.transfer.protocol import (
    BootstrapStages,
    FetchPages,
    HelloAnswer,
    Locate,
    Located,
    OnPage,
    PeerError,
    PeerHello,
    PollRooms,
    Stage,
)
from dsv3.processes.certificates import credentials_of, tls_context

UNKNOWN_ROOM_TIMEOUT_S = 5.0
"""How long a bootstrap room may be unknown: a router may send the request to the decode instance first."""

QUEUED_TIMEOUT_S = 30.0
"""How long a request may wait in the prefill instance before it is computed here."""

_PAUSE_S = 0.02  # between two polls
_ROUND_S = 0.05  # between two rounds over the processes of an instance, while none has the next page
_CONNECT_S = 3.0
_CLOSED = "it closed the connection"
_MAX_IDLE = 16  # connections kept for the next fetch
_RETRY_AFTER_S = 10.0  # for a peer that has failed
_MAX_FAILED = 256
_log = logging.getLogger(__name__)

FetchOne = Callable[[str, Sequence[Key], float, OnPage], int]
"""Fetches from one address, as `Peers.fetch` does."""


@dataclasses.dataclass(eq=False)
class _PendingRoom:
    bootstrap_room: int
    found: Future[str]
    since: float = dataclasses.field(default_factory=time.monotonic)

    def update(self, stage: Stage, addresses: list[str]) -> bool:
        """Sets the result where the stage or the timeout decides it; returns whether it is set."""
        waited = time.monotonic() - self.since
        if stage == "begun":
            self.found.set_result(",".join(addresses))
        elif stage == "gone" or waited > (UNKNOWN_ROOM_TIMEOUT_S if stage == "unknown" else QUEUED_TIMEOUT_S):
            what = {"unknown": "has no request", "queued": "is still queued", "gone": "was aborted"}[stage]
            self.found.set_exception(PeerError(f"room {self.bootstrap_room} {what} there after {waited:.0f} s"))
        return self.found.done()


class RoomFinder:
    """Polls the stages of bootstrap rooms. `connect` returns a connection to an address, or raises OSError."""

    def __init__(self, connect: Callable[[str], ssl.SSLSocket]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._pending_rooms: dict[str, list[_PendingRoom]] = {}  # by address; each of these has a thread

    def find(self, address: str, bootstrap_room: int) -> Future[str]:
        """Returns a future of the addresses for `Peers.fetch`, set once the instance computes the room's request.

        The future raises PeerError on a timeout, or where the address does not answer as it should.
        """
        room = _PendingRoom(bootstrap_room, Future())
        with self._lock:
            rooms = self._pending_rooms.get(address)
            if rooms is not None:
                rooms.append(room)
                return room.found
            self._pending_rooms[address] = [room]
        try:
            threading.Thread(target=self._poll, args=(address,), name="kv-find", daemon=True).start()
        except RuntimeError as error:
            self._fail_all(address, error)
        return room.found

    def _poll(self, address: str) -> None:
        """Polls until no room of the address is pending."""
        try:
            with self._connect(address) as connection:
                connection.settimeout(protocol.STALL_S)
                while rooms := self._next_rooms(address):
                    protocol.send(connection, PollRooms([room.bootstrap_room for room in rooms]))
                    self._update_rooms(address, rooms, protocol.receive(connection, BootstrapStages))
                    time.sleep(_PAUSE_S)
        except Exception as error:  # of any kind: no request may wait for a thread that has ended
            if not isinstance(error, OSError):
                _log.exception("bootstrap rooms of %s cannot be polled", address)
            self._fail_all(address, error)

    def _next_rooms(self, address: str) -> list[_PendingRoom]:
        with self._lock:
            rooms = self._pending_rooms[address]
            if not rooms:
                del self._pending_rooms[address]
            return rooms[: protocol.MAX_BOOTSTRAP_ROOMS]

    def _update_rooms(self, address: str, rooms: list[_PendingRoom], answer: BootstrapStages | None) -> None:
        if answer is None or len(answer.stages) != len(rooms):
            raise PeerError(_CLOSED if answer is None else "it answers for other bootstrap rooms")
        ended = {room for room, stage in zip(rooms, answer.stages, strict=True) if room.update(stage, answer.addresses)}
        with self._lock:
            self._pending_rooms[address] = [room for room in self._pending_rooms[address] if room not in ended]

    def _fail_all(self, address: str, error: Exception) -> None:
        """Fails all pending rooms of an address."""
        with self._lock:
            rooms = [room for room in self._pending_rooms.pop(address, []) if not room.found.done()]
        for room in rooms:
            room.found.set_exception(PeerError(f"{address}: {error}"))


class Peers:
    """Other instances with the same `secret` and `hello`; `reader` reads their memory where both can. Thread-safe."""

    def __init__(self, secret: bytes, hello: PeerHello, reader: MemoryReader | None = None) -> None:
        self._context, self._hello = tls_context(credentials_of(secret), False), hello
        self._reader, self.carrier_stats = reader, CarrierStats() if reader is None else reader.carrier_stats
        self._lock = threading.Lock()
        self._idle: OrderedDict[ssl.SSLSocket, tuple[str, float]] = OrderedDict()  # address, and since when
        self._failed_until: OrderedDict[str, float] = OrderedDict()  # by address
        self.rooms = RoomFinder(self._connect_unless_failed)

    def fetch(self, address: str, keys: Sequence[Key], patience_s: float, on_page: OnPage) -> int:
        """Fetches pages in the order of `keys` and calls `on_page` with each; returns how many have arrived.

        Each page has been verified, and its array is reused after the call. Waits `patience_s` seconds for each that
        `address` lacks: "host:port", or those of an instance's processes, comma-separated. Raises PeerError where it
        cannot be reached, refuses, or sends pages that do not verify; pages that arrived before have been delivered.
        """
        if "," in address:
            return fetch_from_any(self.fetch, address.split(","), keys, patience_s, on_page)
        self._require_not_failed(address)
        try:
            return self._fetch(address, keys, patience_s, on_page)
        except OSError as error:
            self._mark_failed(address)
            raise PeerError(f"{address}: {error}") from None

    def _fetch(self, address: str, keys: Sequence[Key], patience_s: float, on_page: OnPage) -> int:
        row = np.empty(self._hello.payload_bytes, np.uint8)
        count = 0
        while count < len(keys):
            wanted = keys[count : count + protocol.MAX_KEYS]
            arrived = self._fetch_some(address, wanted, patience_s, row, on_page)
            count += arrived
            if arrived < len(wanted):
                break
        return count

    def _fetch_some(
        self, address: str, keys: Sequence[Key], patience_s: float, row: np.ndarray, on_page: OnPage
    ) -> int:
        """Fetches the pages of one request, over an idle connection if there is one that the server has kept, too."""
        arrived: list[Key] = []

        def on_arrival(key: Key, payload: np.ndarray) -> None:
            on_page(key, payload)
            arrived.append(key)

        if (idle := self._idle_connection(address)) is not None:
            with contextlib.suppress(OSError):
                return self._exchange(idle, address, keys, patience_s, row, on_arrival)
            if arrived:
                raise PeerError("the connection broke")
        return self._exchange(self._connect(address), address, keys, patience_s, row, on_arrival)

    def _exchange(
        self,
        connection: ssl.SSLSocket,
        address: str,
        keys: Sequence[Key],
        patience_s: float,
        row: np.ndarray,
        on_page: OnPage,
    ) -> int:
        try:
            connection.settimeout(patience_s + protocol.STALL_S)
            arrived, is_over = self._read(connection, address, keys, patience_s, on_page)
            if not is_over:
                protocol.send(connection, FetchPages(list(keys[arrived:]), patience_s))
                arrived += self._receive_pages(connection, address, keys[arrived:], row, on_page)
        except BaseException:
            connection.close()
            raise
        self._return_connection(connection, address)
        return arrived

    def _read(
        self, connection: ssl.SSLSocket, address: str, keys: Sequence[Key], patience_s: float, on_page: OnPage
    ) -> tuple[int, bool]:
        """Reads pages from the server's memory; returns how many, and whether sockets have nothing to add."""
        arrived = 0
        while arrived < len(keys) and self._reader is not None and self._reader.can_read(address):
            protocol.send(connection, Locate(list(keys[arrived:]), patience_s))
            located = protocol.receive(connection, Located)
            if located is None:
                raise PeerError(_CLOSED)
            addresses = located.addresses[: len(keys) - arrived]
            if not addresses:
                return arrived, True
            count = self._reader.read(address, keys[arrived:], addresses, on_page)
            arrived += count
            if count < len(addresses):
                return arrived, False
        return arrived, arrived == len(keys)

    def _receive_pages(
        self, connection: ssl.SSLSocket, address: str, keys: Sequence[Key], row: np.ndarray, on_page: OnPage
    ) -> int:
        count, seconds = 0, 0.0
        try:
            while (more := protocol.read(connection, 1) != protocol.END_OF_PAGES) and count < len(keys):
                started = time.monotonic()
                self._receive_page(connection, keys[count], row, on_page)
                count, seconds = count + 1, seconds + time.monotonic() - started
        finally:
            self.carrier_stats.record(address, "sockets", count * row.size, seconds)
        if more:
            raise PeerError("it sent more pages than requested")
        return count

    def _receive_page(self, connection: ssl.SSLSocket, key: Key, row: np.ndarray, on_page: OnPage) -> None:
        header = protocol.read_payload_header(protocol.read(connection, HEADER_BYTES))
        if header.length != row.size:
            raise PeerError(f"a page has {header.length} bytes, not {row.size}")
        protocol.read_into(connection, memoryview(row))
        if not header.covers(key, row):
            raise PeerError("a page is damaged, or not the requested one")
        on_page(key, row)

    def _connect_unless_failed(self, address: str) -> ssl.SSLSocket:
        self._require_not_failed(address)
        try:
            return self._connect(address)
        except OSError:
            self._mark_failed(address)
            raise

    def _require_not_failed(self, address: str) -> None:
        if time.monotonic() < self._failed_until.get(address, 0.0):
            raise PeerError(f"{address} failed less than {_RETRY_AFTER_S:.0f} s ago")

    def _connect(self, address: str) -> ssl.SSLSocket:
        host, _, port = address.rpartition(":")
        try:
            connection: socket.socket = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
        except ValueError as error:  # UnicodeError is one: IDNA has no such name
            raise PeerError(f"not a host and port ({error})") from None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(protocol.HANDSHAKE_S)
            connection = tls = self._context.wrap_socket(connection)
            reads = self._reader is not None and self._reader.accepts(address)
            protocol.send(tls, msgspec.structs.replace(self._hello, reads=reads))
            answer = protocol.receive(tls, HelloAnswer)
            if answer is None or answer.refusal:
                raise PeerError(_CLOSED if answer is None else f"it refused: {answer.refusal}")
        except BaseException:
            connection.close()
            raise
        if self._reader is not None:
            self._reader.set_agent(address, answer.agent)
        return tls

    def _idle_connection(self, address: str) -> ssl.SSLSocket | None:
        if self._reader is not None and self._reader.is_suspension_over(address):
            return None
        with self._lock:
            found = [each for each, (other, _) in self._idle.items() if other == address]
            if not found:
                return None
            _, since = self._idle.pop(found[-1])
        if time.monotonic() - since < protocol.IDLE_S / 2:
            return found[-1]
        found[-1].close()
        return self._idle_connection(address)

    def _return_connection(self, connection: ssl.SSLSocket, address: str) -> None:
        with self._lock:
            self._idle[connection] = address, time.monotonic()
            oldest = next(iter(self._idle)) if len(self._idle) > _MAX_IDLE else None
            if oldest is not None:
                del self._idle[oldest]
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.close()

    def _mark_failed(self, address: str) -> None:
        with self._lock:
            self._failed_until[address] = time.monotonic() + _RETRY_AFTER_S
            self._failed_until.move_to_end(address)
            if len(self._failed_until) > _MAX_FAILED:
                self._failed_until.popitem(last=False)


def fetch_from_any(
    fetch: FetchOne, addresses: Sequence[str], keys: Sequence[Key], patience_s: float, on_page: OnPage
) -> int:
    """Fetches pages of an instance of several processes, each of which serves those of its own ranks.

    They arrive in the order of `keys` from whichever of `addresses` has them; returns how many. Requests the next page
    alone from one address after the other; the one that has it most likely has the rest, and gets a request for all.
    Waits `patience_s` for each page that none has yet. Raises OSError where pages are missing and an address has
    failed; pages that arrived before have been delivered.
    """
    arrived, last, left = 0, time.monotonic(), list(addresses)
    failure: OSError | None = None

    def on_arrival(key: Key, payload: np.ndarray) -> None:
        nonlocal arrived, last
        on_page(key, payload)
        arrived, last = arrived + 1, time.monotonic()

    while left and arrived < len(keys):
        before = arrived
        for address in list(left):
            try:
                if fetch(address, keys[arrived : arrived + 1], 0.0, on_arrival):
                    fetch(address, keys[arrived:], patience_s, on_arrival)
                    left.sort(key=address.__ne__)  # first in the next round
                    break
            except OSError as error:
                left.remove(address)
                failure = error
        if arrived == before:
            if time.monotonic() - last > patience_s:
                break
            time.sleep(_ROUND_S)
    if failure is not None and arrived < len(keys):
        raise failure
    return arrived
