"""What happened to a request in the engine, and when: noted per request, per chunk and per preemption, never per token.

Times are seconds of `time.monotonic`, which all processes of a host share.
"""

from collections.abc import Iterator
from time import monotonic
from typing import Literal

import msgspec

PhaseName = Literal["grammar", "queue", "lookup", "transfer", "load", "prefill", "decode"]
Tier = Literal["device", "host", "store", "peer"]

MAX_EVENTS = 384
"""Items of `RequestTiming.events`; a request with more phases stays in its last one."""
MAX_CHUNKS = 64
"""Chunks of a prompt that are kept; later ones are merged into the last."""


class RequestTiming(msgspec.Struct, array_like=True, gc=False):
    """The engine's record of one sequence.

    A request waits for its grammar to be compiled, for a slot and pages (`queue`), for the answer of a store (`lookup`)
    or for pages of another instance (`transfer`); in its slot for pages of a tier (`load`), then its prompt is computed
    (`prefill`), and it samples tokens (`decode`). A preempted one returns to the queue. `device`, `host`, `store` and
    `peer` count the tokens of its prompt that were found there before its first token. `events` are flat, because
    containers of 18,432 running requests would cost the collector of garbage more time than noting them: `phases` and
    `chunks` read them.
    """

    phase: PhaseName
    began: float
    events: list[str | float]
    queued_at: float = 0.0
    scheduled_at: float | None = None  # its first slot
    first_token_at: float | None = None
    ended_at: float | None = None
    num_chunks: int = 0
    chunk_stop: float = 0.0  # of the last chunk
    device: int = 0
    host: int = 0
    store: int = 0
    peer: int = 0
    preemptions: int = 0
    retractions: int = 0  # by an operator's command
    drafts_proposed: int = 0
    drafts_accepted: int = 0

    @property
    def queue_seconds(self) -> float | None:
        """Seconds from the queue to the first slot, lookups included; None before that."""
        return None if self.scheduled_at is None else self.scheduled_at - self.queued_at

    @property
    def cached(self) -> dict[Tier, int]:
        """The tokens of the prompt that were found, by tier, without zeros."""
        counts: dict[Tier, int] = {"device": self.device, "host": self.host, "store": self.store, "peer": self.peer}
        return {tier: tokens for tier, tokens in counts.items() if tokens}

    @property
    def phases(self) -> list[tuple[PhaseName, float]]:
        """Names and beginnings, without gaps: each phase ends where the next begins, the last at `ended_at`."""
        events = self.events
        return [(events[i], events[i + 1]) for i in self._places() if events[i] != "chunk"]  # type: ignore[misc]

    @property
    def chunks(self) -> list[tuple[float, float, int]]:
        """The chunks of the prompt: from a step's launch, or the results before, to its results; and their tokens."""
        events = self.events
        return [tuple(events[i + 1 : i + 4]) for i in self._places() if events[i] == "chunk"]  # type: ignore[misc]

    def enter(self, phase: PhaseName) -> None:
        """Ends the present phase and begins another one."""
        if self.phase == phase:
            return
        now = monotonic()
        if not self.queued_at and phase == "queue":
            self.queued_at = now
        if self.scheduled_at is None and (phase == "prefill" or phase == "load"):
            self.scheduled_at = now
        if len(self.events) < MAX_EVENTS:
            self.phase = phase
            self.events += (phase, now)

    def on_requeued(self, started: bool) -> None:
        """Records that the request has lost its slot; without a first token what was found does not count."""
        if not started:
            self.device = self.host = self.store = self.peer = 0
        self.enter("queue")

    def add_chunk(self, launched_at: float, now: float, tokens: int, is_last: bool) -> None:
        """Records that the results of a chunk have arrived; with those of the last one the request decodes."""
        start = launched_at if launched_at > self.chunk_stop else self.chunk_stop
        self.chunk_stop = now
        if self.num_chunks < MAX_CHUNKS:
            self.num_chunks += 1
            if is_last and self.phase == "prefill":  # the usual case
                self.phase = "decode"
                self.events += ("chunk", start, now, tokens, "decode", now)
                return
            self.events += ("chunk", start, now, tokens)
        elif self.events[-4] == "chunk":
            self.events[-2:] = (now, self.events[-1] + tokens)  # type: ignore[operator]
        if is_last:
            self.enter("decode")

    def _places(self) -> Iterator[int]:
        """Yields where phases and chunks begin in `events`: a name and one number, "chunk" and three."""
        i = 0
        while i < len(self.events):
            yield i
            i += 4 if self.events[i] == "chunk" else 2


def begin_timing(phase: PhaseName) -> RequestTiming:
    """Returns the record of a request that has just come, and is in `phase`."""
    now = monotonic()
    return RequestTiming(phase, now, [phase, now], now if phase == "queue" else 0.0)
