"""What an engine tells about itself."""

import bisect
import dataclasses
from typing import Any

HOST_TIME_BOUNDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
"""Upper bounds in seconds of the histogram's buckets; the last bucket has none."""


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A snapshot; token and event counts are totals since the start.

    `cache_usage` is the share of pages that somebody owns. `prefix_queries` counts prompt tokens looked up,
    `prefix_hits` those found. `host_time_counts` is the histogram, over `HOST_TIME_BOUNDS`, of the host's time in a
    step without its wait for the device; `host_time_sum` its total in seconds. `jobs` has a record for each kind of
    work that keeps numbers of its own, by its name.
    """

    running: int
    waiting: int
    pages_in_use: int
    cache_usage: float
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    recompilations: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    host_time_sum: float
    host_time_counts: tuple[int, ...]
    jobs: dict[str, Any] = dataclasses.field(default_factory=dict)


class HostTime:
    """Histogram of the host's time in a step."""

    def __init__(self) -> None:
        self.total = 0.0
        self.counts = [0] * (len(HOST_TIME_BOUNDS) + 1)

    def observe(self, seconds: float) -> None:
        self.total += seconds
        self.counts[bisect.bisect_left(HOST_TIME_BOUNDS, seconds)] += 1
