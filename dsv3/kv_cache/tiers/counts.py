"""What the tiers count, and the rates by which loading and computing are compared."""

import bisect
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

LOAD_BOUNDS = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Upper bounds in seconds of the histogram of loads; the last bucket has none."""

Carrier = Literal["sockets", "nixl"]
CARRIERS: tuple[Carrier, ...] = ("sockets", "nixl")
"""What pages come by from other instances; the order of counts per carrier."""

_WEIGHT = 0.2  # of a new measurement in a rate
_LATELY_S = 60.0


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
