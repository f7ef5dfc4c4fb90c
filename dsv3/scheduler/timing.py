"""What happened to a request in the engine, and when: noted per request, per chunk and per preemption, never per token.

Times are seconds of `time.monotonic`, which all processes of a host share.
"""

from time import monotonic
from typing import Literal

import msgspec

PhaseName = Literal["grammar", "queue", "lookup", "transfer", "load", "prefill", "decode"]
Tier = Literal["device", "host", "store", "peer"]

MAX_PHASES = 64
"""Phases of a request that are kept; a request that is preempted more often stays in its last one."""
MAX_CHUNKS = 64
"""Chunks of a prompt that are kept; later ones are merged into the last."""


class RequestTiming(msgspec.Struct, array_like=True, gc=False):
    """The engine's record of one sequence.

    `phases` are names and beginnings, without gaps: each phase ends where the next begins, the last at `ended_at`. A
    request waits for its grammar to be compiled, for a slot and pages (`queue`), for the answer of a store (`lookup`)
    or for pages of another instance (`transfer`); in its slot for pages of a tier (`load`), then its prompt is computed
    (`prefill`), and it samples tokens (`decode`). A preempted one returns to the queue. `chunks` are those of its
    prompt: from the launch of the step, or the results of the step before, to the results, with the number of tokens.
    `cached` counts the tokens of the prompt that were found, by tier, before its first token.
    """

    phases: list[tuple[PhaseName, float]]
    chunks: list[tuple[float, float, int]] = []
    cached: dict[Tier, int] = {}
    queued_at: float = 0.0
    scheduled_at: float | None = None  # its first slot
    first_token_at: float | None = None
    ended_at: float | None = None
    preemptions: int = 0
    retractions: int = 0  # by an operator's command
    drafts_proposed: int = 0
    drafts_accepted: int = 0

    @property
    def queue_seconds(self) -> float | None:
        """Seconds from the queue to the first slot, lookups included; None before that."""
        return None if self.scheduled_at is None else self.scheduled_at - self.queued_at

    def enter(self, phase: PhaseName) -> None:
        """Ends the present phase and begins another one."""
        if self.phases[-1][0] != phase and len(self.phases) < MAX_PHASES:
            self.phases.append((phase, monotonic()))

    def add_chunk(self, launched_at: float, tokens: int, is_last: bool) -> None:
        """Records that the results of a chunk have arrived; with those of the last one the request decodes."""
        now = monotonic()
        if len(self.chunks) < MAX_CHUNKS:
            begun = max(launched_at, self.chunks[-1][1]) if self.chunks else launched_at
            self.chunks.append((begun, now, tokens))
        else:
            begun, _, before = self.chunks[-1]
            self.chunks[-1] = begun, now, before + tokens
        if is_last:
            self.enter("decode")


def begin_timing(phase: PhaseName) -> RequestTiming:
    """Returns the record of a request that has just come, and is in `phase`."""
    return RequestTiming([(phase, monotonic())])
