"""Statistics of the offload tiers, and the measured rates that decide between loading and computing."""

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
"""The transports of pages from other instances, in the order of counts per carrier."""

_WEIGHT = 0.2  # of a new measurement in a rate
_RATE_VALID_S = 60.0
_LOG_INTERVAL_S = 60.0
_MAX_ROUTES = 256  # pairs of address and carrier
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class TierCounts:
    """Totals of one tier since the start.

    `queries` counts tokens that were looked up, `hits` those that were loaded. A load is one batch of pages. `dropped`
    pages were not stored in time, or at all; `damaged` ones did not verify. Pages of other instances are also counted
    per carrier.
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

    def record_load(self, size: int, seconds: float) -> None:
        self.loaded_bytes += size
        self.load_seconds += seconds
        self.loads[bisect.bisect_left(LOAD_BOUNDS, seconds)] += 1

    def record_store(self, size: int, seconds: float) -> None:
        self.stored_bytes += size
        self.store_seconds += seconds


def total(counts: Sequence[TierCounts]) -> TierCounts:
    """Returns the sum of the counts of several hosts' tiers."""
    columns = zip(*(dataclasses.astuple(each) for each in counts), strict=True)
    sums: list[Any] = [list(map(sum, zip(*c, strict=True))) if isinstance(c[0], list) else sum(c) for c in columns]
    return TierCounts(*sums)


class Rate:
    """Units per second, as a running mean of recent measurements. Any thread may call."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._now = threading.Lock(), now
        self._value: float | None = None
        self._measured = 0.0

    @property
    def value(self) -> float | None:
        """The rate; None without a measurement in the last minute, so that a tier that was slow once is tried again."""
        return self._value if self._now() - self._measured < _RATE_VALID_S else None

    def update(self, units: float, seconds: float) -> None:
        """Adds a measurement; one without duration is ignored."""
        if seconds <= 0 or units <= 0:
            return
        with self._lock:
            before, self._measured = self.value, self._now()
            self._value = units / seconds if before is None else before + _WEIGHT * (units / seconds - before)


def is_loading_faster(tokens: int, size: int, load: float | None, compute: float | None) -> bool:
    """Returns whether loading `size` bytes takes less time than computing their `tokens` tokens.

    `load` is in bytes per second, `compute` in tokens per second; an unmeasured one counts as faster, so that it is
    tried.
    """
    if load is None or compute is None:
        return True
    return size / load < tokens / compute


@dataclasses.dataclass
class _Route:
    logged_at: float = float("-inf")
    size: int = 0
    seconds: float = 0.0


class CarrierStats:
    """Totals per carrier since the start. Any thread may call; `now` returns the time in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._counts = TierCounts()
        self._routes: OrderedDict[tuple[str, Carrier], _Route] = OrderedDict()

    def record(self, address: str, carrier: Carrier, size: int, seconds: float) -> None:
        """Adds `size` bytes of verified pages from `address`, without the time that pages were waited for.

        Logs the carrier and its rate the first time, and then once per minute.
        """
        if not size:
            return
        i = CARRIERS.index(carrier)
        with self._lock:
            self._counts.carried_bytes[i] += size
            self._counts.carried_seconds[i] += seconds
            route = self._route(address, carrier)
            route.size, route.seconds = route.size + size, route.seconds + seconds
            if self._now() - route.logged_at < _LOG_INTERVAL_S:
                return
            rate = route.size / max(route.seconds, 1e-9)
            self._routes[address, carrier] = _Route(self._now())
        _log.info("pages of %s come by %s: %.0f MB/s", address, carrier, rate / 1e6)

    def record_failure(self, carrier: Carrier) -> None:
        with self._lock:
            self._counts.carrier_failures[CARRIERS.index(carrier)] += 1

    def with_carriers(self, counts: TierCounts) -> TierCounts:
        mine = self._counts
        with self._lock:
            return dataclasses.replace(
                counts,
                carried_bytes=list(mine.carried_bytes),
                carried_seconds=list(mine.carried_seconds),
                carrier_failures=list(mine.carrier_failures),
            )

    def _route(self, address: str, carrier: Carrier) -> _Route:
        route = self._routes.setdefault((address, carrier), _Route())
        self._routes.move_to_end((address, carrier))
        if len(self._routes) > _MAX_ROUTES:
            self._routes.popitem(last=False)
        return route
