"""Asks other instances how far the requests of meetings are, and where their pages will be.

While somebody waits for meetings of an address, one thread with one connection asks for all of them at once, again and
again. So a decode instance may wait for as many meetings as it has requests, and each wait has a bound.
"""

import dataclasses
import logging
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from dsv3.kv_cache.transfer import protocol
from dsv3.kv_cache.transfer.meetings import Stage
from dsv3.kv_cache.transfer.protocol import Ask, PeerError, Told

COMES_S = 5.0
"""So long a meeting may be unknown: the router may hand the request to the decode instance first."""
BEGINS_S = 30.0
"""So long a request may wait in the prefill instance before it is computed here."""

_PAUSE_S = 0.02
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Wait:
    meeting: int
    found: Future[str]
    since: float = dataclasses.field(default_factory=time.monotonic)

    def settle(self, stage: Stage, addresses: list[str]) -> bool:
        """Ends the wait where the stage says so or its time is over; returns whether it has ended."""
        waited = time.monotonic() - self.since
        if stage == "begun":
            self.found.set_result(",".join(addresses))
        elif stage == "gone":
            self.found.set_exception(PeerError(f"the request of meeting {self.meeting} was given up there"))
        elif waited > (COMES_S if stage == "unknown" else BEGINS_S):
            what = "no request has come with" if stage == "unknown" else "the queue still holds"
            self.found.set_exception(PeerError(f"{what} meeting {self.meeting} there, after {waited:.0f} s"))
        return self.found.done()


class Finder:
    """Finds meetings at addresses, to which `connect` returns a connection; it raises OSError where there is none."""

    def __init__(self, connect: Callable[[str], ssl.SSLSocket]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._waits: dict[str, list[_Wait]] = {}  # by address; each of these has a thread

    def find(self, address: str, meeting: int) -> Future[str]:
        """Gives the addresses of the instance once it computes the meeting's request, with commas between.

        Gives PeerError where it does not in time, or the address does not answer.
        """
        wait = _Wait(meeting, Future())
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
                    protocol.send(connection, Ask([wait.meeting for wait in waits]))
                    self._settle(address, waits, protocol.receive(connection, Told))
                    time.sleep(_PAUSE_S)
        except Exception as error:  # whatever it is, nobody waits for a thread that has ended
            if not isinstance(error, OSError):
                _log.exception("an instance cannot be asked")
            self._give_up(address, error)

    def _pending(self, address: str) -> list[_Wait]:
        with self._lock:
            waits = self._waits[address]
            if not waits:
                del self._waits[address]
            return waits[: protocol.MAX_MEETINGS]

    def _settle(self, address: str, waits: list[_Wait], told: Told | None) -> None:
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
