"""What an engine runs, what waits in it, and why: for an operator who asks, between two steps."""

from collections.abc import Iterable
from itertools import islice
from time import monotonic
from typing import Literal

import msgspec

from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import Sequence, SequenceStatus
from dsv3.scheduler.timing import Tier

MAX_LISTED = 1000
"""Requests in one listing, the oldest ones: it is made between two steps, and takes about 2 ms for so many."""

State = Literal["waiting", "preempted", "retracted", "loading", "prefilling", "decoding", "paused"]
Reason = Literal["", "grammar", "operation", "lookup", "transfer", "prefix", "rank", "priority", "slot", "pages"]


class ListedRequest(msgspec.Struct, frozen=True, gc=False):
    """One sequence in the engine.

    `tokens` are those known, prompt and answer, of which `computed` are in the cache or in a step in flight. A request
    without a batch slot has a `reason`. It waits for: its grammar to be compiled; an operation that lets earlier
    requests finish; a store's answer (`lookup`); pages of another instance (`transfer`); another request that computes
    the same prefix; the rank that it requires; requests of a lower priority number; a batch slot; or pages.
    """

    request_id: int
    state: State
    reason: Reason
    priority: int
    age_s: float
    prompt_tokens: int
    tokens: int
    computed: int
    cached: dict[Tier, int]
    preemptions: int
    retractions: int


class RequestList(msgspec.Struct, frozen=True, tag=True):
    """The oldest requests of an engine, and how many it has; answers `Inspect("requests")`."""

    requests: list[ListedRequest]
    total: int


def list_requests(
    scheduler: Scheduler, compiling: Iterable[Sequence], kept_back: Iterable[Sequence], *, is_paused: bool
) -> RequestList:
    """Lists the requests that the scheduler has, those whose grammars are `compiling`, and those that are `kept_back`.

    The thread that steps calls it between two steps.
    """
    early: dict[int, tuple[Sequence, Reason]] = {s.id: (s, "grammar") for s in compiling}
    early |= {s.id: (s, "operation") for s in kept_back}
    parked = scheduler.queue.parked_ranks()
    known = islice(scheduler.sequences.values(), MAX_LISTED)
    found = [_listed(scheduler, sequence, _reason(scheduler, sequence, parked), is_paused) for sequence in known]
    found += [_listed(scheduler, *each, is_paused) for each in islice(early.values(), MAX_LISTED - len(found))]
    return RequestList(found, len(scheduler.sequences) + len(early))


def _reason(scheduler: Scheduler, sequence: Sequence, parked: dict[int, bool]) -> Reason:
    """Returns what a request of the scheduler waits for, "" for one that has a slot."""
    if sequence.slot >= 0:
        return ""
    phase = sequence.timing.phase
    if phase == "lookup" or phase == "transfer":
        return phase
    if (waits_for_rank := parked.get(sequence.id)) is not None:
        return "rank" if waits_for_rank else "prefix"
    first = scheduler.queue.first_priority
    if first is not None and first < sequence.priority:
        return "priority"
    return "pages" if scheduler.slots.num_free else "slot"


_STATES: dict[SequenceStatus, State] = {
    SequenceStatus.LOADING: "loading",
    SequenceStatus.PREFILLING: "prefilling",
    SequenceStatus.DECODING: "decoding",
}


def _listed(scheduler: Scheduler, sequence: Sequence, reason: Reason, is_paused: bool) -> ListedRequest:
    timing, slot = sequence.timing, sequence.slot
    if slot >= 0:
        state: State = "paused" if is_paused else _STATES[sequence.state]
        tokens = int(scheduler.slots.known[slot])
    else:
        state = "retracted" if timing.retractions else "preempted" if timing.preemptions else "waiting"
        tokens = len(sequence.tokens)
    is_decoding = sequence.state is SequenceStatus.DECODING
    return ListedRequest(
        request_id=sequence.id,
        state=state,
        reason=reason,
        priority=sequence.priority,
        age_s=monotonic() - timing.began,
        prompt_tokens=sequence.prompt_length,
        tokens=tokens,
        computed=0 if slot < 0 else tokens if is_decoding else sequence.prefilled,
        cached=timing.cached,
        preemptions=timing.preemptions,
        retractions=timing.retractions,
    )
