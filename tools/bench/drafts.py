"""What became of drafts during a load: the server's counters before and after it, under vLLM's names."""

import asyncio
import dataclasses
from collections.abc import Iterable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from dsv3.http_client import Client, RequestFailed

ROUTE = "/metrics"
MAX_METRICS_BYTES = 1 << 24
TIMEOUT_S = 10.0
_PREFIX = "vllm:spec_decode_num_"
_PER_POSITION = f"{_PREFIX}accepted_tokens_per_pos_total"


@dataclasses.dataclass(frozen=True)
class DraftCounts:
    """Totals since the server's start: rows that brought drafts, their drafts, and those accepted, by position too."""

    rows: float
    tokens: float
    accepted: float
    accepted_at: tuple[float, ...]


async def read(client: Client) -> DraftCounts | None:
    """Returns the counts in the server's `/metrics`; None where it has no such route, no drafts, or no answer in time.

    A load is measured all the same, so nothing is raised.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S), client.request("GET", ROUTE) as response:
            return parse((await response.read(MAX_METRICS_BYTES)).decode("utf-8", "replace"))
    except (RequestFailed, TimeoutError, ValueError):
        return None


def parse(text: str) -> DraftCounts | None:
    """Returns the counts in Prometheus's text format, summed over engines; None where there are none.

    Raises ValueError for text that is not in this format.
    """
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    rows = [sample for sample in samples if sample.name == f"{_PREFIX}drafts_total"]
    if not rows:
        return None
    drafts, accepted = (_sum(samples, f"{_PREFIX}{name}_total") for name in ("draft_tokens", "accepted_tokens"))
    return DraftCounts(sum(sample.value for sample in rows), drafts, accepted, _by_position(samples))


def report(before: DraftCounts | None, after: DraftCounts | None) -> dict[str, Any] | None:
    """Returns the acceptance between two readings as plain data; None without them, or where no row brought drafts.

    The rate is of all drafts, the length is tokens per row and step: 1 + accepted / rows. The rate at a position is
    that of rows whose drafts were right up to there. All are vLLM's definitions. A server that has started anew between
    the readings gives None.
    """
    if before is None or after is None:
        return None
    rows, tokens = after.rows - before.rows, after.tokens - before.tokens
    accepted = after.accepted - before.accepted
    if rows <= 0 or tokens <= 0 or accepted < 0:
        return None
    # A counter with a position appears when it first counts.
    earlier = (*before.accepted_at, *[0.0] * len(after.accepted_at))
    at = [now - then for now, then in zip(after.accepted_at, earlier, strict=False)]
    return {
        "rows": int(rows),
        "draft_tokens": int(tokens),
        "accepted_tokens": int(accepted),
        "acceptance_rate": accepted / tokens,
        "acceptance_length": 1 + accepted / rows,
        "acceptance_rate_per_position": [count / rows for count in at],
    }


def _sum(samples: Iterable[Sample], name: str) -> float:
    return sum(sample.value for sample in samples if sample.name == name)


def _by_position(samples: Iterable[Sample]) -> tuple[float, ...]:
    counts: dict[int, float] = {}
    for sample in samples:
        if sample.name == _PER_POSITION:
            position = int(sample.labels.get("position", ""))
            counts[position] = counts.get(position, 0.0) + sample.value
    return tuple(counts.get(position, 0.0) for position in range(max(counts, default=-1) + 1))
