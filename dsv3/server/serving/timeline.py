"""What happened to one request, and when: in its API server, and in the engine; and what its client gets of it.

All times are seconds of `time.monotonic`, which the engine's process shares.
"""

import contextlib
import math
from collections.abc import Iterator
from itertools import pairwise
from time import monotonic

import msgspec

from dsv3.scheduler.timing import RequestTiming
from dsv3.server.otlp import Span
from dsv3.server.protocol.openai import Timing
from dsv3.server.tracing import RequestTrace


class RequestTimeline:
    """The record of one request in its API server, begun when its head has been read.

    `is_shown`: the client has asked for it. Only then, or for a sampled `trace`, does the engine send its `records`, by
    choice, with the first and the last token of each. `broken_off` are records of sequences whose engine has died.
    """

    def __init__(self, request_id: str = "", *, is_shown: bool = False, trace: RequestTrace | None = None) -> None:
        self.request_id, self.is_shown, self.trace = request_id, is_shown, trace
        self.is_wanted = is_shown or trace is not None
        self.began = monotonic()
        self.phases: list[Span] = []
        self.records: dict[int, RequestTiming] = {}
        self.broken_off: list[tuple[int, RequestTiming]] = []
        self.finish_reasons: list[str] = []  # of the choices, as they end
        self.detokenize_s = 0.0  # of processor time, beside the engine
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    def on_record(self, choice: int, record: RequestTiming, last_token_at: float) -> None:
        """Records what the engine has sent of a sequence, whose tokens so far came at `last_token_at` or before."""
        before = self.records.get(choice)
        if before is not None and before.began != record.began:  # another engine continues it
            before.ended_at = last_token_at
            self.broken_off.append((choice, before))
        self.records[choice] = record

    def on_choice_end(self, reason: str, last_token_at: float, detokenize_s: float) -> None:
        """Records the end of a choice."""
        self.finish_reasons.append(reason)
        self.last_token_at = last_token_at
        self.detokenize_s += detokenize_s

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records the time of the block as a phase."""
        start = monotonic()
        try:
            yield
        finally:
            self.phases.append(Span(name, start, monotonic()))

    def engine_phases(self, record: RequestTiming) -> list[Span]:
        """Returns the phases of a sequence; one without an end, which a stop string has ended, ends now."""
        end = record.ended_at or self.last_token_at or monotonic()
        ends = [*record.phases, ("", max(end, record.phases[-1][1]))]
        return [Span(name, start, stop) for (name, start), (_, stop) in pairwise(ends)]

    @property
    def longest(self) -> RequestTiming | None:
        """The record of the choice that has ended last; None before the first token."""
        return max(self.records.values(), key=lambda each: each.ended_at or float("inf"), default=None)

    def seconds(self, record: RequestTiming) -> dict[str, float]:
        """Returns the seconds of the phases of the API server and of a sequence in the engine, by name."""
        found: dict[str, float] = {}
        for span in (*self.phases, *self.engine_phases(record)):
            found[span.name] = found.get(span.name, 0.0) + span.stop - span.start
        return found

    def split(self) -> Timing:
        """Returns how the time until now is divided; counts are those of all choices.

        Parts whose names end in `_ms`, but for `first_token_ms` and `detokenize_ms`, follow one another. Those of the
        engine are of the choice that has ended last.
        """
        record, records = self.longest, self.records.values()
        seconds = {} if record is None else self.seconds(record)
        cached: dict[str, int] = {}
        for each in records:
            for tier, tokens in each.cached.items():
                cached[tier] = cached.get(tier, 0) + tokens
        first = self.first_token_at
        return Timing(
            total_ms=_ms(monotonic() - self.began),
            **{f"{name}_ms": _ms(found) for name, found in seconds.items()},
            first_token_ms=None if first is None else _ms(first - self.began),
            detokenize_ms=_ms(self.detokenize_s),
            computed_tokens=sum(tokens for each in records for *_, tokens in each.chunks),
            cached_tokens=cached,
            drafts_proposed=sum(each.drafts_proposed for each in records),
            drafts_accepted=sum(each.drafts_accepted for each in records),
            preemptions=sum(each.preemptions for each in records),
            retractions=sum(each.retractions for each in records),
        )


def _ms(seconds: float) -> float:
    return math.floor(1e6 * seconds) / 1e3  # rounded up, the parts could exceed the whole


def server_timing(split: Timing) -> str:
    """Returns a split as the value of the header `Server-Timing` (W3C): durations, and counts as descriptions."""
    metrics = []
    for name, value in msgspec.structs.asdict(split).items():
        if isinstance(value, dict):
            metrics += [f'cached_{tier};desc="{tokens} tokens"' for tier, tokens in value.items()]
        elif name.endswith("_ms"):
            metrics += [f"{name.removesuffix('_ms')};dur={value:g}"] if value else []
        elif value:
            metrics.append(f'{name};desc="{value}"')
    return ", ".join(metrics)
