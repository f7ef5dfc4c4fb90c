"""The last minutes of a server for its dashboard: one row of numbers per second, and rates computed from them.

An API server records a row per second from numbers that it has anyway: the engine's stats, which arrive ten times per
second, and the counts of all API servers. So every API server shows the same data at no cost for the engine. Snapshots
of steps are requested only while a client asks, at most once per second and API server; the client gets the latest
one, so that a slow step delays no response.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from dsv3.engine.step_log import EngineSnapshot, StepRecord
from dsv3.scheduler.listing import RequestList
from dsv3.server.engine.client import EngineClient, EngineUnavailable
from dsv3.server.engine.messages import Inspection, number_in
from dsv3.server.protocol.errors import unavailable
from dsv3.server.serving.metrics import SECONDS, TIERS, Metrics

_POLL_INTERVAL_S = 0.9
_SNAPSHOT_MAX_AGE_S = 10.0
_PROFILE_WAIT_S = 30.0
_NUM_SLOW = 8
_LISTING_WAIT_S = 10.0  # a step of a large prompt may take seconds
_NO_ANSWER = "the engine has not answered within {:g} s; try again"


class SnapshotPoller:
    """Requests snapshots, lists and profiles from the engine; keeps the latest snapshot."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._requested_at = self._received_at = float("-inf")
        self._snapshot: EngineSnapshot | None = None
        self._polling: asyncio.Task[None] | None = None
        self._listing: asyncio.Task[RequestList] | None = None
        self._has_profile_call = False

    def snapshot(self) -> EngineSnapshot | None:
        """Returns the latest snapshot, None if it is too old; requests the next one."""
        now = time.monotonic()
        if now - self._requested_at > _POLL_INTERVAL_S and (self._polling is None or self._polling.done()):
            self._requested_at, self._polling = now, asyncio.create_task(self._poll())
        return self._snapshot if now - self._received_at < _SNAPSHOT_MAX_AGE_S else None

    async def requests(self) -> RequestList:
        """Returns what the engine runs; concurrent calls share a reply. Raises ApiError 503 without one in time."""
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._inspect("requests", _LISTING_WAIT_S, "listing_timeout"))
            self._listing.add_done_callback(lambda task: task.cancelled() or task.exception())  # else asyncio logs it
        return await asyncio.shield(self._listing)

    async def profile(self, what: Literal["start_profile", "stop_profile"]) -> list[StepRecord]:
        """Starts a profile in the engine, or stops it and returns its steps; raises ApiError 503 as `requests`."""
        if self._has_profile_call:
            raise unavailable("another request is starting or stopping a profile; try again", "profile_busy")
        self._has_profile_call = True
        try:
            return await self._inspect(what, _PROFILE_WAIT_S, "profile_timeout")
        finally:
            self._has_profile_call = False

    async def _poll(self) -> None:
        with contextlib.suppress(EngineUnavailable):
            self._snapshot = await self._engine.inspect("snapshot")
            self._received_at = time.monotonic()

    async def _inspect(self, what: Inspection, wait_s: float, code: str) -> Any:
        try:
            return await asyncio.wait_for(self._engine.inspect(what), wait_s)
        except EngineUnavailable as error:
            raise unavailable(str(error), "engine_unavailable", retry_after=5) from None
        except TimeoutError:
            raise unavailable(_NO_ANSWER.format(wait_s), code) from None


KEPT_S = 600
RATE_S = 5
"""Seconds over which a rate is computed."""
SHARE_S = 30
"""Seconds over which a share or a percentile is computed."""

_GAUGES = ("running", "waiting", "cache_usage", "pages_num_loading", "experts_balancedness", "experts_balancedness_min")
_TIER_COUNTERS = tuple(f"pages_tiers_{tier}_hits" for tier in TIERS)
_COUNTERS = (
    *("steps", "host_time_sum", "prefix_queries", "prefix_hits", "draft_num_drafts", "draft_num_draft_tokens"),
    *("draft_num_accepted_tokens", "preemptions", *_TIER_COUNTERS),
)
_TOTALS = ("prompt_tokens", "generation_tokens", "stop", "length", "abort", "error")
_LATENCIES = ("ttft", "itl")
_SCALARS = (*_GAUGES, *_COUNTERS, *_TOTALS)
_COLUMNS = {name: 1 + i for i, name in enumerate(_SCALARS)}
_BUCKETS = len(SECONDS) + 1
_FIRST_BUCKET = {name: 1 + len(_SCALARS) + i * _BUCKETS for i, name in enumerate(_LATENCIES)}
_WIDTH = 1 + len(_SCALARS) + len(_LATENCIES) * _BUCKETS
PERCENTILES = (50, 90, 99)


class MetricsHistory:
    """A ring buffer of the last `KEPT_S` rows, one per second; numbers that the server does not have are nan.

    It also has the traced requests of that time that have waited longest for their first token: what to look up.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._rows = np.full((KEPT_S, _WIDTH), np.nan)
        self._count = 0
        self._second = -math.inf
        self._slow_requests: list[dict[str, Any]] = []

    def record(self, now: float) -> None:
        """Appends a row if a new second has begun; `now` is the Unix time in seconds."""
        if math.floor(now) > self._second:
            self._second = math.floor(now)
            self._rows[self._count % KEPT_S] = self._row(now)
            self._count += 1

    def add_request(self, now: float, request_id: str, trace_id: str, first_token_s: float, seconds: float) -> None:
        """Records a traced request that has ended at `now`, in Unix time, if it is one of the slowest."""
        entry = {"at": now, "id": request_id, "trace_id": trace_id, "first_token_s": first_token_s, "seconds": seconds}
        found = [*self.slow_requests(now), entry]
        self._slow_requests = sorted(found, key=lambda each: -each["first_token_s"])[:_NUM_SLOW]

    def slow_requests(self, now: float) -> list[dict[str, Any]]:
        """Returns the slowest requests of the last `KEPT_S`, the slowest first."""
        return [each for each in self._slow_requests if each["at"] >= now - KEPT_S]

    def series(self, since: float = 0.0) -> dict[str, list[float]]:
        """Returns `compute_series` of the rows after the Unix time `since`."""
        rows = self._rows[: self._count] if self._count <= KEPT_S else np.roll(self._rows, -self._count, 0)
        rows = rows[rows[:, 0] > since - SHARE_S - 2]
        new = int((rows[:, 0] > since).sum())
        return {name: _rounded(values[len(values) - new :]) for name, values in compute_series(rows).items()}

    def _row(self, now: float) -> np.ndarray:
        stats, (totals, buckets) = self._metrics.stats, self._metrics.counted()
        scalars = [number_in(stats, name, math.nan) for name in (*_GAUGES, *_COUNTERS)]
        scalars += [totals[name] for name in _TOTALS]
        return np.concatenate([[round(now, 1)], scalars, *(buckets[name] for name in _LATENCIES)])


def compute_series(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns time series `[n]` by name; those that the server does not have are left out.

    Rates are per second, over the last `RATE_S`; shares and percentiles (in seconds) cover the last `SHARE_S` and are
    nan without events.
    """
    rate, grown = _Over(rows, RATE_S), _Over(rows, SHARE_S)
    found = {
        "time": rows[:, 0],
        **{name: rows[:, _COLUMNS[name]] for name in _GAUGES},
        "requests_per_second": _divided(rate("stop") + rate("length"), rate.seconds),
        "failed_per_second": _divided(rate("abort") + rate("error"), rate.seconds),
        "prompt_tokens_per_second": _divided(rate("prompt_tokens"), rate.seconds),
        "generation_tokens_per_second": _divided(rate("generation_tokens"), rate.seconds),
        "steps_per_second": _divided(rate("steps"), rate.seconds),
        "host_seconds_per_step": _divided(rate("host_time_sum"), rate("steps")),
        "preemptions_per_second": _divided(rate("preemptions"), rate.seconds),
        "acceptance": _divided(grown("draft_num_accepted_tokens"), grown("draft_num_draft_tokens")),
        "hits_device": _divided(grown("prefix_hits"), grown("prefix_queries")),
        **{f"hits_{tier}": _divided(grown(f"pages_tiers_{tier}_hits"), grown("prefix_queries")) for tier in TIERS},
    }
    for name in _LATENCIES:
        counts = grown.buckets(name)
        found |= {f"{name}_p{q}": quantiles(counts, SECONDS, q / 100) for q in PERCENTILES}
    never = [key for key, place in _OWN.items() if np.isnan(rows[:, place]).all()]
    return {key: values for key, values in found.items() if key not in never}


# Time series -> the column without which a server does not have it.
_OWN = {
    **{name: _COLUMNS[name] for name in _GAUGES},
    "acceptance": _COLUMNS["draft_num_drafts"],
    **{f"hits_{tier}": _COLUMNS[f"pages_tiers_{tier}_hits"] for tier in TIERS},
}


def quantiles(counts: np.ndarray, bounds: Sequence[float], share: float) -> np.ndarray:
    """Returns the value below which `share` of each row of counts `[n, len(bounds) + 1]` lies; nan in an empty row.

    Interpolates inside the bucket as Prometheus's `histogram_quantile` does; values in the last bucket, which has no
    upper bound, count as its lower bound.
    """
    ends = np.append(np.asarray(bounds, float), bounds[-1])
    starts = np.append(0.0, bounds)
    cumulated = np.cumsum(counts, axis=1)
    wanted = share * cumulated[:, -1]
    place = (cumulated < wanted[:, None]).sum(axis=1).clip(max=len(bounds))
    row = np.arange(len(counts))
    inside = counts[row, place]
    before = cumulated[row, place] - inside
    part = np.divide(wanted - before, inside, out=np.zeros(len(counts)), where=inside > 0)
    values = starts[place] + part * (ends[place] - starts[place])
    return np.where(cumulated[:, -1] > 0, values, np.nan)


class _Over:
    """The growth of counters in the last `seconds` before each row."""

    def __init__(self, rows: np.ndarray, seconds: float) -> None:
        self._rows = rows
        times = rows[:, 0]
        self._first = np.searchsorted(times, times - seconds - 0.5)
        self.seconds = times - times[self._first]

    def __call__(self, name: str) -> np.ndarray:
        values = self._rows[:, _COLUMNS[name]]
        grown = values - np.nan_to_num(values[self._first])  # nan before the engine was ready: 0
        return np.where(grown < 0, values, grown)  # a restarted engine counts from 0

    def buckets(self, name: str) -> np.ndarray:
        start = _FIRST_BUCKET[name]
        counts = self._rows[:, start : start + _BUCKETS]
        return counts - counts[self._first]


def _divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)


def _rounded(values: np.ndarray) -> list[float]:
    """Returns numbers of at most six digits, which are half as long in JSON."""
    return [float(f"{value:.6g}") if abs(value) < 1e6 else round(value, 1) for value in values.tolist()]
