"""Which tokens the rows of a batch may take, for requests that are held to a grammar; imports no jax.

A request's matcher is a function of its answer as far as the host knows it. So nothing has to be undone after drafts
that were wrong, nor after a pre-emption: a matcher takes in what is new when the next mask is wanted.
"""

import dataclasses
from time import perf_counter

import numpy as np

from dsv3.engine.requests.rows import BatchRows
from dsv3.engine.requests.scheduler import Scheduler
from dsv3.engine.requests.sequence import Sequence
from dsv3.engine.stats import HostTime
from dsv3.request import EngineOutput, FinishReason, StepOutputs
from dsv3.text.matcher import Matcher, Vocabulary, without

ALL = np.uint32(0xFFFFFFFF)
"""A word of a mask that allows everything."""


@dataclasses.dataclass(frozen=True)
class MaskStats:
    """Totals since the start: rows that got a mask, the seconds that took, requests that were given up.

    `counts` is the histogram, over `HOST_TIME_BOUNDS`, of the seconds per step that had such rows.
    """

    num_rows: int
    seconds: float
    num_failed: int
    counts: tuple[int, ...]


class Masks:
    """Makes masks when the tokens of the step before are known."""

    def __init__(self, scheduler: Scheduler, vocabulary: Vocabulary) -> None:
        self._scheduler, self._vocabulary = scheduler, vocabulary
        self.words = vocabulary.words
        self._time, self._num_rows, self._num_failed = HostTime(), 0, 0
        total, drafts = len(scheduler.slots.epoch), scheduler.cfg.tokens_per_row - 1
        self._drafts = np.full((total, drafts), -1, np.int32)
        self._drafted = np.full(total, -1, np.int64)  # by slot: the epoch whose drafts these are

    def stats(self) -> MaskStats:
        """Returns the numbers so far; any thread may ask."""
        return MaskStats(self._num_rows, self._time.total, self._num_failed, tuple(self._time.counts))

    def note_drafts(self, rows: BatchRows, drafts: np.ndarray) -> None:
        """Notes what was proposed behind the last tokens of `rows`: `drafts` `[ranks, B, S - 1]`, negative for none."""
        self._drafts[rows.slots] = drafts[rows.rank, rows.position]
        self._drafted[rows.slots] = rows.epochs

    def of(self, rows: BatchRows, width: int, outputs: StepOutputs) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places `[n, 2]` int32 (rank, row) and masks `[n, width, words]` uint32 of held rows.

        Requests that have ended meanwhile have none. Those whose grammar allows nothing more end here, with an entry in
        `outputs`.
        """
        started = perf_counter()
        held = [i for i in self._live(rows) if self._goes_on(int(rows.slots[i]), outputs)]
        masks = np.full((len(held), width, self.words), ALL, np.uint32)
        matchers = [(self._matcher(int(rows.slots[i])), self._drafts_of(rows, i, width)) for i in held]
        if matchers:
            self._vocabulary.fill(matchers, masks)
        for i, mask in zip(held, masks, strict=True):
            self._finish(int(rows.slots[i]), mask, outputs)
        self._num_rows += len(held)
        self._time.observe(perf_counter() - started)
        return np.stack([rows.rank[held], rows.position[held]], axis=1).astype(np.int32), masks

    def _live(self, rows: BatchRows) -> list[int]:
        slots = self._scheduler.slots
        return (slots.held[rows.slots] & (slots.epoch[rows.slots] == rows.epochs)).nonzero()[0].tolist()

    def _matcher(self, slot: int) -> Matcher:
        matcher = self._sequence(slot).matcher
        assert matcher is not None  # the slot is held
        return matcher

    def _sequence(self, slot: int) -> Sequence:
        sequence = self._scheduler.slots.sequences[slot]
        assert sequence is not None  # its epoch is that of a running request
        return sequence

    def _goes_on(self, slot: int, outputs: StepOutputs) -> bool:
        """Returns whether a request may have another token; ends it if not."""
        slots, matcher = self._scheduler.slots, self._matcher(slot)
        matcher.advance(slots.history[slot, self._sequence(slot).prompt_length : slots.known[slot]])
        if matcher.error is not None:
            self._fail(slot, matcher.error, outputs)
            return False
        if matcher.is_over and self._has_one_end(slot):
            self._end(slot, outputs, "stop", self._vocabulary.end_ids)
            return False
        return True

    def _has_one_end(self, slot: int) -> bool:
        """Returns whether it is clear what would be drawn where nothing but an end is allowed, and nobody asks more."""
        ends = self._vocabulary.end_ids
        return not ends or (len(ends) == 1 and not self._scheduler.slots.wants_logprobs[slot])

    def _drafts_of(self, rows: BatchRows, i: int, width: int) -> list[int]:
        """Returns the drafts of a row that may be drawn, up to one that ends the answer."""
        slot = int(rows.slots[i])
        if width == 1 or self._drafted[slot] != rows.epochs[i]:
            return []
        stop_ids, drafts = self._sequence(slot).stop_ids, self._drafts[slot, : width - 1].tolist()
        ends = (at for at, token in enumerate(drafts) if token < 0 or token in stop_ids)
        return drafts[: next(ends, len(drafts))]

    def _finish(self, slot: int, masks: np.ndarray, outputs: StepOutputs) -> None:
        """Takes ends out of a row's masks `[S, words]` that come too early; ends a request whose mask failed."""
        matcher, sequence = self._matcher(slot), self._sequence(slot)
        if matcher.error is not None:
            self._fail(slot, matcher.error, outputs)
            return
        sampling, known = sequence.sampling, matcher.seen
        early = len(masks) if sampling.ignore_eos else sampling.min_tokens - known
        for i in range(min(early, len(masks))):
            masks[i] = without(masks[i], sequence.stop_ids)

    def _fail(self, slot: int, error: str, outputs: StepOutputs) -> None:
        self._num_failed += 1
        self._end(slot, outputs, "error", (), f"the answer could not be held to its grammar: {error}")

    def _end(
        self,
        slot: int,
        outputs: StepOutputs,
        reason: FinishReason,
        tokens: tuple[int, ...],
        error: str | None = None,
    ) -> None:
        """Ends a request, with an end token where there is one."""
        sequence = self._sequence(slot)
        self._scheduler.remove(sequence)
        self._scheduler.generated_tokens += len(tokens)
        outputs.details.append(
            EngineOutput(
                request_id=sequence.id,
                token_ids=list(tokens),
                finish_reason=reason,
                stop_token_id=tokens[-1] if tokens else None,
                error=error,
            )
        )
