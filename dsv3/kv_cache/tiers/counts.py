"""What the tiers count, and the rates by which loading and computing are compared."""

import bisect
import dataclasses
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

LOAD_BOUNDS = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Upper bounds in seconds of the histogram of loads; the last bucket has none."""

Carrier = Literal["sockets", "nixl"]

CARRIERS: tuple[Carrier, ...] = ("sockets", "nixl")
"""What pages come by from other instances; the order of counts per carrier."""

_WEIGHT = 0.2  # of a new measurement in a rate
_LATELY_S = 60.0
_TELL_S = 60.0
_MOST_WAYS = 256  # an address and a carrier
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class TierCounts:
    """Totals of one tier since the start.

    `queries` counts tokens that were looked for, `hits` those that were loaded. A load is one batch of pages.
    `dropped` pages could not be kept in time, or at all; `damaged` ones did not verify. Pages of other instances are
    counted per carrier, too.
    """

    queries: int = 0
    hits: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    loads: list[int] = dataclasses.field(default_factory=lambda: [0] * (len(LOAD_BOUNDS) + 1))
    stored_bytes: int = 0
    store_seconds: float = 0.0
    dropped: int = 0
    failures: int = 0
    damaged: int = 0
    evictions: int = 0
    bytes_held: int = 0
    carried_bytes: list[int] = dataclasses.field(default_factory=lambda: [0] * len(CARRIERS))
    carried_seconds: list[float] = dataclasses.field(default_factory=lambda: [0.0] * len(CARRIERS))
    carrier_failures: list[int] = dataclasses.field(default_factory=lambda: [0] * len(CARRIERS))

    def note_load(self, size: int, seconds: float) -> None:
        """Adds a batch of `size` bytes."""
        self.loaded_bytes += size
        self.load_seconds += seconds
        self.loads[bisect.bisect_left(LOAD_BOUNDS, seconds)] += 1

    def note_store(self, size: int, seconds: float) -> None:
        """Adds `size` bytes written."""
        self.stored_bytes += size
        self.store_seconds += seconds


def total(counts: Sequence[TierCounts]) -> TierCounts:
    """Returns the counts of several hosts' tiers together."""
    columns = zip(*(dataclasses.astuple(each) for each in counts), strict=True)
    return TierCounts(*(_sum(column) for column in columns))


def _sum(column: Sequence[Any]) -> Any:
    """Returns the sum of numbers, or of lists of them place by place."""
    return list(map(sum, zip(*column, strict=True))) if isinstance(column[0], list) else sum(column)


class Rate:
    """Units per second, as measured lately. Any thread may call."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._now = threading.Lock(), now
        self._value: float | None = None
        self._measured = 0.0

    @property
    def value(self) -> float | None:
        """The rate; None without a measurement of the last minute, so that what was slow once is tried again."""
        return self._value if self._now() - self._measured < _LATELY_S else None

    def note(self, units: float, seconds: float) -> None:
        """Takes in a measurement; one without duration says nothing."""
        if seconds <= 0 or units <= 0:
            return
        with self._lock:
            before, self._measured = self.value, self._now()
            self._value = units / seconds if before is None else before + _WEIGHT * (units / seconds - before)


def loading_pays(tokens: int, size: int, load: float | None, compute: float | None) -> bool:
    """Returns whether loading `size` bytes takes less time than computing their `tokens` tokens.

    `load` is in bytes per second, `compute` in tokens per second; what has not been measured yet is tried.
    """
    if load is None or compute is None:
        return True
    return size / load < tokens / compute


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
