"""Fetches pages from other instances; what does not verify is not taken, and ends the connection."""

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
from dsv3.kv_cache.tiers.counts import Carried, TierCounts
from dsv3.kv_cache.transfer import protocol
from dsv3.kv_cache.transfer.nixl import MemoryReader
from dsv3.kv_cache.transfer.protocol import (
    Ask,
    BootstrapStages,
    HelloAnswer,
    Land,
    Locate,
    Located,
    PeerError,
    PeerHello,
    Stage,
    Want,
)
from dsv3.processes.certificates import credentials_of, tls_context

COMES_S = 5.0
"""So long a meeting may be unknown: the router may hand the request to the decode instance first."""

BEGINS_S = 30.0
"""So long a request may wait in the prefill instance before it is computed here."""

_PAUSE_S = 0.02
_ROUND_S = 0.05  # between two rounds of questions, while none of the processes has the next page
_CONNECT_S = 3.0
_MOST_IDLE = 16  # connections kept for the next fetch
_AVOID_S = 10.0  # a peer that has failed
_MOST_AVOIDED = 256
_log = logging.getLogger(__name__)

FetchOne = Callable[[str, Sequence[Key], float, Land], int]
"""Fetches from one address; `dsv3.kv_cache.transfer.client.Peers.fetch` says how."""


@dataclasses.dataclass(eq=False)
class _PendingRoom:
    bootstrap_room: int
    found: Future[str]
    since: float = dataclasses.field(default_factory=time.monotonic)

    def settle(self, stage: Stage, addresses: list[str]) -> bool:
        """Ends the wait where the stage says so or its time is over; returns whether it has ended."""
        waited = time.monotonic() - self.since
        if stage == "begun":
            self.found.set_result(",".join(addresses))
        elif stage == "gone":
            self.found.set_exception(PeerError(f"the request of meeting {self.bootstrap_room} was given up there"))
        elif waited > (COMES_S if stage == "unknown" else BEGINS_S):
            what = "no request has come with" if stage == "unknown" else "the queue still holds"
            self.found.set_exception(PeerError(f"{what} meeting {self.bootstrap_room} there, after {waited:.0f} s"))
        return self.found.done()


class Finder:
    """Finds meetings at addresses, to which `connect` returns a connection; it raises OSError where there is none."""

    def __init__(self, connect: Callable[[str], ssl.SSLSocket]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._waits: dict[str, list[_PendingRoom]] = {}  # by address; each of these has a thread

    def find(self, address: str, bootstrap_room: int) -> Future[str]:
        """Gives the addresses of the instance once it computes the meeting's request, with commas between.

        Gives PeerError where it does not in time, or the address does not answer.
        """
        wait = _PendingRoom(bootstrap_room, Future())
        with self._lock:
            waits = self._waits.get(address)
            if waits is not None:
                waits.append(wait)
                return wait.found
            self._waits[address] = [wait]
        try:
            threading.Thread(target=self._ask, args=(address,), name="kv-find", daemon=True).start()
        except RuntimeError as error:
            self._give_up(address, error)
        return wait.found

    def _ask(self, address: str) -> None:
        """Asks until nobody waits."""
        try:
            with self._connect(address) as connection:
                connection.settimeout(protocol.STALL_S)
                while waits := self._pending(address):
                    protocol.send(connection, Ask([wait.bootstrap_room for wait in waits]))
                    self._settle(address, waits, protocol.receive(connection, BootstrapStages))
                    time.sleep(_PAUSE_S)
        except Exception as error:  # whatever it is, nobody waits for a thread that has ended
            if not isinstance(error, OSError):
                _log.exception("an instance cannot be asked")
            self._give_up(address, error)

    def _pending(self, address: str) -> list[_PendingRoom]:
        with self._lock:
            waits = self._waits[address]
            if not waits:
                del self._waits[address]
            return waits[: protocol.MAX_BOOTSTRAP_ROOMS]

    def _settle(self, address: str, waits: list[_PendingRoom], told: BootstrapStages | None) -> None:
        if told is None or len(told.stages) != len(waits):
            raise PeerError("it hung up" if told is None else "it answers for other meetings")
        ended = {wait for wait, stage in zip(waits, told.stages, strict=True) if wait.settle(stage, told.addresses)}
        with self._lock:
            self._waits[address] = [wait for wait in self._waits[address] if wait not in ended]

    def _give_up(self, address: str, error: Exception) -> None:
        """Ends all waits of an address."""
        with self._lock:
            waits = [wait for wait in self._waits.pop(address, []) if not wait.found.done()]
        for wait in waits:
            wait.found.set_exception(PeerError(f"{address}: {error}"))


class Peers:
    """Other instances that know `secret` and are like `hello`, read by `reader` where both can. Any thread may call."""

    def __init__(self, secret: bytes, hello: PeerHello, reader: MemoryReader | None = None) -> None:
        self._context, self._hello = tls_context(credentials_of(secret), False), hello
        self._reader, self._carried = reader, Carried() if reader is None else reader.carried
        self._lock = threading.Lock()
        self._idle: OrderedDict[ssl.SSLSocket, tuple[str, float]] = OrderedDict()  # address, and since when
        self._avoided: OrderedDict[str, float] = OrderedDict()  # until when
        self._finder = Finder(self._connect_unless_avoided)

    def find(self, address: str, bootstrap_room: int) -> Future[str]:
        """Gives the addresses for `fetch` once the instance at `address` computes the request of `bootstrap_room`.

        Gives PeerError where it does not in time (`dsv3.kv_cache.transfer.client`), or does not answer as it should.
        """
        return self._finder.find(address, bootstrap_room)

    def fetch(self, address: str, keys: Sequence[Key], patience_s: float, land: Land) -> int:
        """Fetches pages in the order of `keys` and hands each to `land`; returns how many have come.

        Each page has been verified, and its array is written again after the call. Waits `patience_s` for each that
        `address` does not have yet: "host:port", or those of an instance's processes with commas between. Raises
        PeerError where it cannot be reached, refuses, or sends what does not verify; what came before has been landed.
        """
        if "," in address:
            return fetch_from_any(self.fetch, address.split(","), keys, patience_s, land)
        self._require_not_avoided(address)
        try:
            return self._fetch(address, keys, patience_s, land)
        except OSError as error:
            self._avoid(address)
            raise PeerError(f"{address}: {error}") from None

    def counted(self, counts: TierCounts) -> TierCounts:
        """Returns `counts` with what each carrier has brought."""
        return self._carried.counted(counts)

    def _fetch(self, address: str, keys: Sequence[Key], patience_s: float, land: Land) -> int:
        row = np.empty(self._hello.value_bytes, np.uint8)
        count = 0
        while count < len(keys):
            wanted = keys[count : count + protocol.MAX_KEYS]
            came = self._fetch_some(address, wanted, patience_s, row, land)
            count += came
            if came < len(wanted):
                break
        return count

    def _fetch_some(self, address: str, keys: Sequence[Key], patience_s: float, row: np.ndarray, land: Land) -> int:
        """Fetches what one Want asks for, over a kept connection if there is one that the other side has kept too."""
        landed: list[Key] = []

        def note(key: Key, value: np.ndarray) -> None:
            land(key, value)
            landed.append(key)

        if (kept := self._kept(address)) is not None:
            with contextlib.suppress(OSError):
                return self._exchange(kept, address, keys, patience_s, row, note)
            if landed:
                raise PeerError("the connection broke")
        return self._exchange(self._connect(address), address, keys, patience_s, row, note)

    def _exchange(
        self,
        connection: ssl.SSLSocket,
        address: str,
        keys: Sequence[Key],
        patience_s: float,
        row: np.ndarray,
        land: Land,
    ) -> int:
        try:
            connection.settimeout(patience_s + protocol.STALL_S)
            came, is_over = self._read(connection, address, keys, patience_s, land)
            if not is_over:
                protocol.send(connection, Want(list(keys[came:]), patience_s))
                came += self._take(connection, address, keys[came:], row, land)
        except BaseException:
            connection.close()
            raise
        self._keep(connection, address)
        return came

    def _read(
        self, connection: ssl.SSLSocket, address: str, keys: Sequence[Key], patience_s: float, land: Land
    ) -> tuple[int, bool]:
        """Reads pages out of the other side's memory; returns how many, and whether sockets have nothing to add."""
        came = 0
        while came < len(keys) and self._reader is not None and self._reader.knows(address):
            protocol.send(connection, Locate(list(keys[came:]), patience_s))
            located = protocol.receive(connection, Located)
            if located is None:
                raise PeerError("it hung up")
            places = located.places[: len(keys) - came]
            if not places:
                return came, True
            landed = self._reader.read(address, keys[came:], places, land)
            came += landed
            if landed < len(places):
                return came, False
        return came, came == len(keys)

    def _take(self, connection: ssl.SSLSocket, address: str, keys: Sequence[Key], row: np.ndarray, land: Land) -> int:
        count, seconds = 0, 0.0
        try:
            while (more := protocol.read(connection, 1) != protocol.NO_MORE) and count < len(keys):
                started = time.monotonic()
                self._take_one(connection, keys[count], row, land)
                count, seconds = count + 1, seconds + time.monotonic() - started
        finally:
            self._carried.note(address, "sockets", count * row.size, seconds)
        if more:
            raise PeerError("more pages than were asked for")
        return count

    def _take_one(self, connection: ssl.SSLSocket, key: Key, row: np.ndarray, land: Land) -> None:
        header = protocol.read_value_header(protocol.read(connection, HEADER_BYTES))
        if header.length != row.size:
            raise PeerError(f"a page of {header.length} bytes, not {row.size}")
        protocol.read_into(connection, memoryview(row))
        if not header.covers(key, row):
            raise PeerError("a page that is damaged, or not the one asked for")
        land(key, row)

    def _connect_unless_avoided(self, address: str) -> ssl.SSLSocket:
        self._require_not_avoided(address)
        try:
            return self._connect(address)
        except OSError:
            self._avoid(address)
            raise

    def _require_not_avoided(self, address: str) -> None:
        if time.monotonic() < self._avoided.get(address, 0.0):
            raise PeerError(f"{address} has failed a moment ago")

    def _connect(self, address: str) -> ssl.SSLSocket:
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
        except ValueError as error:  # UnicodeError is one: IDNA has no such name
            raise PeerError(f"no host and port ({error})") from None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(protocol.HANDSHAKE_S)
            tls = self._context.wrap_socket(connection)
            reads = self._reader is not None and self._reader.wants(address)
            protocol.send(tls, msgspec.structs.replace(self._hello, reads=reads))
            answer = protocol.receive(tls, HelloAnswer)
        except BaseException:
            connection.close()
            raise
        if answer is None or answer.refusal:
            tls.close()
            raise PeerError("it hung up" if answer is None else f"it refused: {answer.refusal}")
        if self._reader is not None:
            self._reader.meet(address, answer.agent)
        return tls

    def _kept(self, address: str) -> ssl.SSLSocket | None:
        if self._reader is not None and self._reader.is_rested(address):
            return None
        with self._lock:
            found = [each for each, (other, _) in self._idle.items() if other == address]
            if not found:
                return None
            _, since = self._idle.pop(found[-1])
        if time.monotonic() - since < protocol.IDLE_S / 2:
            return found[-1]
        found[-1].close()
        return self._kept(address)

    def _keep(self, connection: ssl.SSLSocket, address: str) -> None:
        with self._lock:
            self._idle[connection] = address, time.monotonic()
            oldest = next(iter(self._idle)) if len(self._idle) > _MOST_IDLE else None
            if oldest is not None:
                del self._idle[oldest]
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.close()

    def _avoid(self, address: str) -> None:
        with self._lock:
            self._avoided[address] = time.monotonic() + _AVOID_S
            self._avoided.move_to_end(address)
            if len(self._avoided) > _MOST_AVOIDED:
                self._avoided.popitem(last=False)


def fetch_from_any(
    fetch: FetchOne, addresses: Sequence[str], keys: Sequence[Key], patience_s: float, land: Land
) -> int:
    """Fetches pages of an instance of several processes, each of which gives those of its own ranks.

    They come in the order of `keys` from whichever of `addresses` has them; returns how many have come. Asks one after
    the other for the next page alone. Who gives it has most likely computed those behind it too, and is asked for all.
    Waits `patience_s` for each page that nobody has yet. Raises OSError where pages are missing and an address has
    failed; what came before has been landed.
    """
    came, last, left = 0, time.monotonic(), list(addresses)
    failure: OSError | None = None

    def note(key: Key, value: np.ndarray) -> None:
        nonlocal came, last
        land(key, value)
        came, last = came + 1, time.monotonic()

    while left and came < len(keys):
        before = came
        for address in list(left):
            try:
                if fetch(address, keys[came : came + 1], 0.0, note):
                    fetch(address, keys[came:], patience_s, note)
                    left.sort(key=address.__ne__)  # it is asked first from now on
                    break
            except OSError as error:
                left.remove(address)
                failure = error
        if came == before:
            if time.monotonic() - last > patience_s:
                break
            time.sleep(_ROUND_S)
    if failure is not None and came < len(keys):
        raise failure
    return came
