"""What an engine tells about itself."""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

HOST_TIME_BOUNDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
"""Upper bounds in seconds of the histogram's buckets; the last bucket has none."""

STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""The same for the tokens of a step; vLLM's."""


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A snapshot; token and event counts are totals since the start.

    `cache_usage` is the share of pages that somebody owns. `prefix_queries` counts prompt tokens looked up,
    `prefix_hits` those found. `host_time_counts` is the histogram, over `HOST_TIME_BOUNDS`, of the host's time in a
    step without its wait for the device; `host_time_sum` its total in seconds. `step_tokens_counts` is the
    same over `STEP_TOKENS_BOUNDS`, of the tokens of prompts and answers that a step gave. `jobs` has a record for each
    kind of work that keeps numbers of its own, by its name.
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
    step_tokens_counts: tuple[int, ...] = ()
    jobs: dict[str, Any] = dataclasses.field(default_factory=dict)


class Histogram:
    """Counts of values between `bounds`, and their total."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.total = 0.0
        self.counts = [0] * (len(bounds) + 1)
        self._bounds = bounds

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.total += value
        self.counts[bisect.bisect_left(self._bounds, value)] += 1


class HostTime(Histogram):
    """Histogram of the host's time in a step."""

    def __init__(self) -> None:
        super().__init__(HOST_TIME_BOUNDS)
