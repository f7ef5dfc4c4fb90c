"""What carries pages from other instances, and how fast: counted for `/metrics`, and told in the log."""

import dataclasses
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from dsv3.kv_cache.tiers.counts import CARRIERS, Carrier, TierCounts

_TELL_S = 60.0
_MOST_WAYS = 256  # an address and a carrier
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Way:
    told: float = float("-inf")
    size: int = 0
    seconds: float = 0.0


class Carried:
    """Totals per carrier since the start. Any thread may note; `now` says the time in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._counts = TierCounts()
        self._ways: OrderedDict[tuple[str, Carrier], _Way] = OrderedDict()

    def note(self, address: str, carrier: Carrier, size: int, seconds: float) -> None:
        """Adds `size` bytes of verified pages from `address`, waits for pages to be computed left out.

        Logs the carrier and its rate the first time, and then once per minute.
        """
        if not size:
            return
        i = CARRIERS.index(carrier)
        with self._lock:
            self._counts.carried_bytes[i] += size
            self._counts.carried_seconds[i] += seconds
            way = self._way(address, carrier)
            way.size, way.seconds = way.size + size, way.seconds + seconds
            if self._now() - way.told < _TELL_S:
                return
            rate = way.size / max(way.seconds, 1e-9)
            self._ways[address, carrier] = _Way(self._now())
        _log.info("pages of %s come by %s: %.0f MB/s", address, carrier, rate / 1e6)

    def fail(self, carrier: Carrier) -> None:
        """Adds a transfer that did not bring what it should have."""
        with self._lock:
            self._counts.carrier_failures[CARRIERS.index(carrier)] += 1

    def counted(self, counts: TierCounts) -> TierCounts:
        """Returns `counts` with the totals per carrier."""
        mine = self._counts
        with self._lock:
            return dataclasses.replace(
                counts,
                carried_bytes=list(mine.carried_bytes),
                carried_seconds=list(mine.carried_seconds),
                carrier_failures=list(mine.carrier_failures),
            )

    def _way(self, address: str, carrier: Carrier) -> _Way:
        way = self._ways.setdefault((address, carrier), _Way())
        self._ways.move_to_end((address, carrier))
        if len(self._ways) > _MOST_WAYS:
            self._ways.popitem(last=False)
        return way
