"""What an engine tells about itself."""

import bisect
import dataclasses
from typing import Any

HOST_TIME_BOUNDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
"""Upper bounds in seconds of the histogram's buckets; the last bucket has none."""


@dataclasses.dataclass(frozen=True)
class ExpertStats:
    """Numbers of routed experts on several devices; counts and bytes are totals since the start, as far as read out.

    `balancedness` is the mean over the layers of mean over maximum of the devices' loads, for the load of the last
    steps on the experts' present places, and `balancedness_min` that of the most uneven layer. `rebalances` counts
    decisions carried out, `moved` slots that got another expert, `checksum_failures` layers that stayed because a
    checksum differed. `extra_rounds` of dispatch were needed beyond those that no step can do without. `in_node_bytes`
    have gone from device to device of a node for dispatch and combine, `cross_node_bytes` to another node, in all.
    """

    balancedness: float
    balancedness_min: float
    rebalances: int
    moved: int
    checksum_failures: int
    extra_rounds: int
    in_node_bytes: int
    cross_node_bytes: int


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

    @property
    def experts(self) -> ExpertStats | None:
        """Numbers of experts on several devices, None where each device has all of them."""
        return self.jobs.get("experts")


class HostTime:
    """Histogram of the host's time in a step."""

    def __init__(self) -> None:
        self.total = 0.0
        self.counts = [0] * (len(HOST_TIME_BOUNDS) + 1)

    def observe(self, seconds: float) -> None:
        self.total += seconds
        self.counts[bisect.bisect_left(HOST_TIME_BOUNDS, seconds)] += 1
