"""Turns the records of a load test into figures: latencies in milliseconds, rates per second of its duration."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tools.bench.loops import LoopResult
from tools.bench.stream import Record

PERCENTILES = (50, 90, 95, 99)
GOODPUT_METRICS = ("ttft", "itl", "tpot", "e2e")


@dataclasses.dataclass(frozen=True)
class Limit:
    """An upper bound that a request must keep to count towards goodput.

    `itl` bounds the 99th percentile of the request's inter-token latencies, the other metrics bound its only value.
    """

    metric: str
    milliseconds: float

    @classmethod
    def parse(cls, text: str) -> "Limit":
        """Returns the limit in `METRIC:MILLISECONDS`, such as `ttft:2000`. Raises ValueError for anything else."""
        metric, _, value = text.partition(":")
        try:
            limit = cls(metric, float(value))
        except ValueError:
            limit = cls(metric, -1.0)
        if metric not in GOODPUT_METRICS or not 0 < limit.milliseconds < math.inf:
            raise ValueError(f"--goodput {text!r}: expected METRIC:MILLISECONDS, METRIC one of {GOODPUT_METRICS}")
        return limit

    def holds(self, record: Record) -> bool:
        """Returns whether a successful request kept the bound. An answer of one token has no gap to be late with."""
        seconds = {
            "ttft": lambda: record.ttft_s,
            "itl": lambda: _percentile(record.inter_token_s(), 99),
            "tpot": lambda: record.tpot_s,
            "e2e": lambda: record.e2e_s,
        }[self.metric]()
        return seconds is None or seconds * 1e3 <= self.milliseconds


def summarize(result: LoopResult, limits: Sequence[Limit] = ()) -> dict[str, Any]:
    """Returns the figures of a load test as plain data, ready for JSON. docs/benchmarking.md defines each."""
    good = [record for record in result.records if record.error is None]
    duration_s = _duration_s(result.records)
    return {
        "duration_s": duration_s,
        "interrupted": result.interrupted,
        "requests": {"sent": len(result.records), "completed": len(good), "failed": len(result.records) - len(good)},
        "errors": errors_by_kind(result.records),
        "tokens": _tokens(good),
        "throughput": _throughput(good, duration_s),
        "ttft_ms": distribution(record.ttft_s for record in good),
        "itl_ms": distribution(gap for record in good for gap in record.inter_token_s()),
        "tpot_ms": distribution(record.tpot_s for record in good),
        "e2e_ms": distribution(record.e2e_s for record in good),
        "goodput": _goodput(good, limits, len(result.records), duration_s),
        "client": {
            "cpu_fraction": result.cpu_s / result.wall_s if result.wall_s else 0.0,
            "send_delay_ms": distribution(record.sent_s - record.scheduled_s for record in result.records),
        },
    }


def distribution(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Returns mean, percentiles and maximum in milliseconds of the values that are known; None where none is.

    Percentiles are interpolated linearly.
    """
    values = np.array([value for value in seconds if value is not None]) * 1e3
    if not values.size:
        return None
    percentiles = np.percentile(values, PERCENTILES)
    named = {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"mean": float(values.mean()), **named, "max": float(values.max())}


def errors_by_kind(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Counts the failed requests by kind, the most frequent first, each kind with its first message."""
    counts = collections.Counter(record.error for record in records if record.error)
    first = {record.error: record.detail[:300] for record in reversed([*records]) if record.error}
    return {kind: {"count": count, "example": first[kind]} for kind, count in counts.most_common()}


def request_rows(records: Iterable[Record], began_s: float) -> list[dict[str, Any]]:
    """Returns one row per request for the JSON report: times in seconds from `began_s`, latencies in milliseconds."""
    return [
        {
            "index": record.index,
            "scheduled_s": record.scheduled_s - began_s,
            "sent_s": record.sent_s - began_s,
            "ttft_ms": _ms(record.ttft_s),
            "tpot_ms": _ms(record.tpot_s),
            "e2e_ms": _ms(record.e2e_s),
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
            "finish_reason": record.finish_reason,
            "error": record.error,
        }
        for record in records
    ]


def _duration_s(records: Sequence[Record]) -> float:
    """Returns the seconds from the first request's due time to the last one's end."""
    if not records:
        return 0.0
    return max(record.finished_s for record in records) - min(record.scheduled_s for record in records)


def _tokens(good: Sequence[Record]) -> dict[str, Any]:
    """Returns token counts as the server states them; None where it states none for some request."""
    return {
        "input": _sum(record.prompt_tokens for record in good),
        "input_cached": _sum(record.cached_tokens for record in good),
        "output": _sum(record.output_tokens for record in good),
        "itl_per": "token" if all(record.counts_known for record in good) else "chunk",
    }


def _throughput(good: Sequence[Record], duration_s: float) -> dict[str, float | None]:
    counts = _tokens(good)
    output, both = counts["output"], None
    if counts["input"] is not None and output is not None:
        both = counts["input"] + output
    rates = {"requests_per_s": len(good), "output_tokens_per_s": output, "total_tokens_per_s": both}
    return {name: _rate(count, duration_s) for name, count in rates.items()}


def _goodput(good: Sequence[Record], limits: Sequence[Limit], sent: int, duration_s: float) -> dict[str, Any] | None:
    if not limits:
        return None
    kept = sum(all(limit.holds(record) for limit in limits) for record in good)
    return {
        "limits_ms": {limit.metric: limit.milliseconds for limit in limits},
        "requests": kept,
        "fraction": kept / sent if sent else 0.0,
        "requests_per_s": _rate(kept, duration_s),
    }


def _sum(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)


def _rate(count: int | None, duration_s: float) -> float | None:
    return count / duration_s if count is not None and duration_s else None


def _percentile(values: list[float], rank: float) -> float | None:
    return float(np.percentile(values, rank)) if values else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
