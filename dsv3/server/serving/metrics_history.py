"""The last minutes of a server in seconds, for its dashboard: what was counted, and what that says per second.

A front notes a row per second from numbers that it has anyway: the engine's, which come ten times per second, and
those that all fronts count together. So every front shows the same picture, and the engine does nothing for it. The
engine is asked to show its steps only when a client looks, at most once per second and front; the client gets what was
seen last, so that a slow step delays no picture.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from dsv3.engine.step_log import EngineSnapshot, StepNote
from dsv3.server.engine.client import EngineClient
from dsv3.server.protocol.errors import unavailable
from dsv3.server.serving.metrics import SECONDS, Metrics

_LOOK_EVERY_S = 0.9
_FORGET_S = 10.0
_PROFILE_WAIT_S = 30.0


class SnapshotPoller:
    """A front's eyes on the engine: what was seen last, and whether a profile is on its way."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._engine.on_seen = self._take
        self._asked_at = self._seen_at = float("-inf")
        self._snapshot: EngineSnapshot | None = None
        self._profile: asyncio.Future[list[StepNote]] | None = None

    def snapshot(self) -> EngineSnapshot | None:
        """Returns what was seen in the last seconds, None where nothing was; asks the engine for what comes next."""
        now = time.monotonic()
        if now - self._asked_at > _LOOK_EVERY_S:
            self._asked_at = now
            self._engine.watch("look")
        return self._snapshot if now - self._seen_at < _FORGET_S else None

    async def start_profile(self) -> None:
        """Has the engine begin a profile; raises ApiError as `stop_profile` does."""
        await self._ask("start_profile")

    async def stop_profile(self) -> list[StepNote]:
        """Returns the steps of the profile, which ends; ApiError 503 where the engine does not answer in time."""
        return await self._ask("stop_profile")

    async def _ask(self, what: Literal["start_profile", "stop_profile"]) -> list[StepNote]:
        if self._engine.state != "ready":
            raise unavailable(self._engine.reason, "engine_unavailable", retry_after=5)
        if self._profile is not None:
            raise unavailable("another request begins or ends a profile just now", "profile_busy")
        self._profile = asyncio.get_running_loop().create_future()
        self._engine.watch(what)
        try:
            return await asyncio.wait_for(self._profile, _PROFILE_WAIT_S)
        except TimeoutError:
            raise unavailable("the engine has not answered; its step takes long", "profile_timeout") from None
        finally:
            self._profile = None

    def _take(self, seen: EngineSnapshot | list[StepNote]) -> None:
        if isinstance(seen, EngineSnapshot):
            self._snapshot, self._seen_at = seen, time.monotonic()
        elif self._profile is not None and not self._profile.done():
            self._profile.set_result(seen)


KEPT_S = 600
RATE_S = 5
"""Seconds over which a rate is taken."""
SHARE_S = 30
"""Seconds over which a share or a percentile is taken."""

TIERS = ("host", "store", "peer")
_GAUGES = ("running", "waiting", "cache_usage", "pages_num_loading", "experts_balancedness", "experts_balancedness_min")
_TIER_COUNTERS = tuple(f"pages_tiers_{tier}_hits" for tier in TIERS)
_COUNTERS = (
    *("steps", "host_time_sum", "prefix_queries", "prefix_hits", "draft_num_drafts", "draft_num_draft_tokens"),
    *("draft_num_accepted_tokens", "preemptions", *_TIER_COUNTERS),
)
_TOTALS = ("prompt_tokens", "generation_tokens", "stop", "length", "abort", "error")
_LATENCIES = ("ttft", "itl")
_SCALARS = (*_GAUGES, *_COUNTERS, *_TOTALS)
_PLACES = {name: 1 + i for i, name in enumerate(_SCALARS)}
_BUCKETS = len(SECONDS) + 1
_FIRST_BUCKET = {name: 1 + len(_SCALARS) + i * _BUCKETS for i, name in enumerate(_LATENCIES)}
_WIDTH = 1 + len(_SCALARS) + len(_LATENCIES) * _BUCKETS
PERCENTILES = (50, 90, 99)


class MetricsHistory:
    """A row per second, the last `KEPT_S`; numbers that the server does not have are nan."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._rows = np.full((KEPT_S, _WIDTH), np.nan)
        self._count = 0
        self._second = -math.inf

    def note(self, now: float) -> None:
        """Adds a row where a new second has begun; `now` is the time of day in seconds."""
        if math.floor(now) > self._second:
            self._second = math.floor(now)
            self._rows[self._count % KEPT_S] = self._row(now)
            self._count += 1

    def rows(self) -> np.ndarray:
        """Returns the rows `[n, _WIDTH]`, oldest first."""
        if self._count <= KEPT_S:
            return self._rows[: self._count]
        start = self._count % KEPT_S
        return np.concatenate([self._rows[start:], self._rows[:start]])

    def series(self, since: float = 0.0) -> dict[str, list[float]]:
        """Returns what `series_of` says of the rows after the time `since`."""
        rows = self.rows()
        rows = rows[rows[:, 0] > since - SHARE_S - 2]
        new = int((rows[:, 0] > since).sum())
        return {name: _rounded(values[len(values) - new :]) for name, values in series_of(rows).items()}

    def _row(self, now: float) -> np.ndarray:
        stats, (totals, buckets) = self._metrics.stats, self._metrics.counted()
        scalars = [_number(stats, name) for name in (*_GAUGES, *_COUNTERS)]
        scalars += [totals[name] for name in _TOTALS]
        return np.concatenate([[round(now, 1)], scalars, *(buckets[name] for name in _LATENCIES)])


def series_of(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns curves `[n]` by name; those of what the server does not have are left out.

    Rates are per second, over the last `RATE_S`; shares and percentiles (in seconds) over the last `SHARE_S`, nan where
    nothing happened.
    """
    rate, grown = _Over(rows, RATE_S), _Over(rows, SHARE_S)
    found = {
        "time": rows[:, 0],
        **{name: rows[:, _PLACES[name]] for name in _GAUGES},
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


# curve -> the number without which a server has no such curve
_OWN = {
    **{name: _PLACES[name] for name in _GAUGES},
    "acceptance": _PLACES["draft_num_drafts"],
    **{f"hits_{tier}": _PLACES[f"pages_tiers_{tier}_hits"] for tier in TIERS},
}


def quantiles(counts: np.ndarray, bounds: Sequence[float], share: float) -> np.ndarray:
    """Returns the value below which `share` of each row of counts `[n, len(bounds) + 1]` lies; nan in an empty row.

    It is interpolated inside its bucket, as Prometheus's `histogram_quantile` does; the last bucket has no end, so
    its values are told as its beginning.
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
    """What numbers have grown by in the last `seconds` before each row."""

    def __init__(self, rows: np.ndarray, seconds: float) -> None:
        self._rows = rows
        times = rows[:, 0]
        self._first = np.searchsorted(times, times - seconds - 0.5)
        self.seconds = times - times[self._first]

    def __call__(self, name: str) -> np.ndarray:
        values = self._rows[:, _PLACES[name]]
        grown = values - np.nan_to_num(values[self._first])  # before the engine was ready it had counted nothing
        return np.where(grown < 0, values, grown)  # one that was started anew counts from 0

    def buckets(self, name: str) -> np.ndarray:
        start = _FIRST_BUCKET[name]
        counts = self._rows[:, start : start + _BUCKETS]
        return counts - counts[self._first]


def _divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)


def _number(stats: Mapping[str, object], name: str) -> float:
    value = stats.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def _rounded(values: np.ndarray) -> list[float]:
    """Returns numbers of at most six digits, which are half as long in JSON."""
    return [float(f"{value:.6g}") if abs(value) < 1e6 else round(value, 1) for value in values.tolist()]
