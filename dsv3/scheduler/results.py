"""Processes what a step has sampled: records tokens and finishes requests."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from time import monotonic

import numpy as np

from dsv3.scheduler.batch_slots import NOT_FINITE, NOTHING, BatchRows, BatchSlots
from dsv3.scheduler.request import EngineOutput, FinishReason, StepOutputs, TokenLogprobs, Tokens
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import GREEDY, Chunk, Sequence

_PART = 4096  # tokens whose experts are in one output: 2 MB of DeepSeek-V3
CALM_STEPS = 64
"""Steps in a row without an overflow after which the factor is halved: a try that fails costs two steps."""


@dataclasses.dataclass
class CapacityFactor:
    """Capacity factor of a phase: each row gets `factor` times the buffer space of its bucket, up to `most`.

    The factor is a power of two. A step whose exchange overflows samples nothing and leaves the state on the devices as
    it was, so it is retried, and the steps in flight behind it too. From then on a row gets twice the capacity: the
    next larger bucket, or half as many rows in the largest. A single row always fits.
    """

    most: int
    factor: int = 1
    _calm: int = 0

    def update(self, factor: int, overflowed: bool) -> None:
        """Records whether a step that was scheduled with `factor` overflowed; results of an earlier factor are ignored.

        Raises RuntimeError where even `most` was not enough.
        """
        if factor != self.factor:
            return
        if not overflowed:
            self._calm += 1
            if self._calm >= CALM_STEPS and self.factor > 1:
                self._set(self.factor // 2)
            return
        if factor >= self.most:
            raise RuntimeError(
                f"a step with {factor} times the capacity per row still overflowed the buffers between the devices: "
                "sharding.experts.capacity allocates less than a single row needs"
            )
        self._set(2 * factor)

    def _set(self, factor: int) -> None:
        self.factor, self._calm = factor, 0


NOT_FINITE_MESSAGE = "the model's logits were not finite for this request"


def process_results(
    scheduler: Scheduler,
    rows: BatchRows,
    sampled: tuple[np.ndarray, ...],
    outputs: StepOutputs,
    routed_experts: np.ndarray | None = None,
) -> None:
    """Records the tokens of a batch's rows and adds them to `outputs`.

    `sampled` begins with the tokens `[ranks, B, S]` of every row of the batch: the accepted ones first, then `NOTHING`
    or `UNDRAFTED`; `NOT_FINITE` where the logits were not finite. Where a request wants log-probabilities, those of the
    tokens follow `[ranks, B, S]`, then the most likely tokens `[ranks, B, S, 20]`, best first, and their
    log-probabilities; where one wants masks, the tokens that each was drawn from, as bits `[ranks, B, S, words]`.
    `routed_experts` `[ranks, B, S, L, K]` are those of a decode batch in which some request wants
    them: of its last token and of the drafts behind that, of which the accepted ones count.

    Results of requests that have left their slot are dropped. Rows without a token belong to a step that is retried.
    Most rows become columns; first and last tokens of a request, log-probabilities and errors become objects.
    """
    slots = scheduler.slots
    live = slots.epoch[rows.slots] == rows.epochs
    if not live.all():
        rows = rows.only(live)
    mine = rows.slots
    if not len(mine):
        return
    tokens = _gather_rows(sampled[0], rows)
    repeated = tokens[:, 0] == NOTHING
    if repeated.any():
        _unschedule(scheduler, mine[repeated], np.full(np.count_nonzero(repeated), tokens.shape[1]))
        rows, tokens = rows.only(~repeated), tokens[~repeated]
        mine = rows.slots
        if not len(mine):
            return
    accepted, proposed = scheduler.drafts.add(tokens)
    if tokens.shape[1] > 1:
        slots.drafts_proposed[mine] += proposed
        slots.drafts_accepted[mine] += accepted - 1
    before, limit = slots.known[mine], slots.limit[mine]
    known = np.minimum(before + accepted, limit)
    counts = known - before
    slots.history.append(mine, before, known, tokens)
    slots.known[mine] = known
    if routed_experts is not None:
        outputs.details.extend(_record_experts(slots, rows, before, counts, routed_experts))
    scheduler.generated_tokens += int(counts.sum())
    at_limit = known == limit
    special = at_limit | slots.wants_logprobs[mine] | slots.sends_routed_experts[mine] | ~slots.started[mine]
    for column in tokens.T:  # with two indices numpy takes four times as long
        ending = slots.stop_counts[column]
        if ending.any():
            special |= ending > 0
    if tokens.shape[1] > 1:
        _unschedule(scheduler, mine, tokens.shape[1] - counts)
    _append_columns(rows, tokens, counts, ~special, outputs)
    now = monotonic()
    for i in special.nonzero()[0].tolist():
        sequence = slots.sequences[mine[i]]
        assert sequence is not None
        values = tokens[i, : counts[i]].tolist()
        logprobs = _logprobs(sequence, rows, i, sampled[1:])
        outputs.details.append(_make_output(scheduler, sequence, values, bool(at_limit[i]), logprobs, now))


def prefilled_expert_outputs(
    slots: BatchSlots, chunks: list[list[Chunk]], routed_experts: np.ndarray
) -> Iterator[EngineOutput]:
    """Records the experts `[ranks, T, L, K]` of the chunks of each rank; yields those of requests that want them.

    Requests that have left the slots that these were computed for get nothing.
    """
    for rank, mine in enumerate(chunks):
        row = 0
        for chunk in mine:
            sequence, count = chunk.sequence, chunk.stop - chunk.start
            if (routed := sequence.routed) is not None and slots.holds(sequence, chunk.epoch):
                routed.append(chunk.start, routed_experts[rank, row : row + count])
                while (part := routed.take(_PART)) is not None:
                    yield EngineOutput(request_id=sequence.id, token_ids=[], routed_experts=part)
            row += count


def _record_experts(
    slots: BatchSlots, rows: BatchRows, before: np.ndarray, counts: np.ndarray, routed_experts: np.ndarray
) -> Iterator[EngineOutput]:
    """Records the experts of the tokens that a decode step has computed: the last of those known, and what follows.

    Yields what waits to be sent where that is much.
    """
    ranks, size, width, *shape = routed_experts.shape
    asking = slots.wants_routed_experts[rows.slots].nonzero()[0]
    flat = routed_experts.reshape(ranks * size, width, -1)
    found = flat.take(rows.rank[asking] * size + rows.position[asking], axis=0).tobytes()
    each = width * math.prod(shape) * flat.itemsize
    columns = rows.slots[asking].tolist(), before[asking].tolist(), counts[asking].tolist()
    for start, slot, known, count in zip(range(0, len(found), each), *columns, strict=True):
        sequence = slots.sequences[slot]
        assert sequence is not None and sequence.routed is not None
        routed = sequence.routed
        assert len(routed) == known - 1, "its prompt, and each token behind it, was recorded"
        routed.extend(count, found[start : start + each // width * count])
        if routed.num_waiting >= _PART:
            yield EngineOutput(request_id=sequence.id, token_ids=[], routed_experts=routed.take())


def _gather_rows(tokens: np.ndarray, rows: BatchRows) -> np.ndarray:
    """Returns the sampled tokens of the rows, `[n, S]`. With two indices numpy takes 15 times as long."""
    ranks, size, width = tokens.shape
    return tokens.reshape(ranks * size, width).take(rows.rank * size + rows.position, axis=0)


def _append_columns(
    rows: BatchRows, tokens: np.ndarray, counts: np.ndarray, plain: np.ndarray, outputs: StepOutputs
) -> None:
    """Appends the `plain` rows, all of whose accepted tokens count."""
    ids = rows.ids
    if not plain.all():
        ids, tokens, counts = ids[plain], tokens[plain], counts[plain]
    if len(ids):
        outputs.columns.append(Tokens(ids, counts, tokens[tokens > NOTHING] if tokens.shape[1] > 1 else tokens[:, 0]))


def _make_output(
    scheduler: Scheduler,
    sequence: Sequence,
    tokens: list[int],
    at_limit: bool,
    logprobs: list[TokenLogprobs] | None,
    now: float,
) -> EngineOutput:
    """Returns the output of a row that is a request's first or last, or has log-probabilities."""
    is_first = not sequence.started
    timing = sequence.timing
    num_cached, queue_seconds = 0, None
    if is_first:
        num_cached, queue_seconds = sequence.num_cached, timing.queue_seconds
        timing.first_token_at = now
    sequence.started = scheduler.slots.started[sequence.slot] = True
    if NOT_FINITE in tokens:
        scheduler.invalidate_pages(sequence)
        scheduler.finish(sequence)
        return EngineOutput(request_id=sequence.id, token_ids=[], finish_reason="error", error=NOT_FINITE_MESSAGE)
    stop = next((i for i, token in enumerate(tokens) if token in sequence.stop_ids), None)
    if stop is not None:
        tokens = tokens[: stop + 1]
    reason: FinishReason | None = "stop" if stop is not None else "length" if at_limit else None
    routed = sequence.routed
    if reason:
        scheduler.finish(sequence)
    return EngineOutput(
        request_id=sequence.id,
        token_ids=tokens,
        logprobs=None if logprobs is None else logprobs[: len(tokens)],
        routed_experts=routed.take() if routed is not None and (reason or routed.sends_each_step) else None,
        finish_reason=reason,
        stop_token_id=None if stop is None else tokens[-1],
        num_cached_tokens=num_cached,
        queue_seconds=queue_seconds,
        weight_version=scheduler.weight_version if is_first else None,
        timing=timing if sequence.request.return_timing and (is_first or reason) else None,
    )


def _unschedule(scheduler: Scheduler, mine: np.ndarray, missing: np.ndarray) -> None:
    """Subtracts tokens that were planned and not accepted; requests whose tokens were all planned resume decoding."""
    slots, short = scheduler.slots, missing.nonzero()[0]
    mine = mine[short]
    slots.planned[mine] -= missing[short]
    paused = mine[~slots.decoding[mine]]
    if len(paused) and len(paused := paused[slots.planned[paused] < slots.limit[paused]]):
        slots.resume_decoding(paused)


def _logprobs(
    sequence: Sequence, rows: BatchRows, i: int, columns: tuple[np.ndarray, ...]
) -> list[TokenLogprobs] | None:
    count = sequence.sampling.logprobs
    if count is None or not columns:
        return None
    at = (rows.rank[i], rows.position[i])
    kept: Iterator[bytes | None] = itertools.repeat(None)
    if sequence.sampling.return_sampling_mask:
        kept = map(_kept_ids, columns[3][at]) if _excludes_tokens(sequence) else itertools.repeat(b"")
    return [
        TokenLogprobs(
            logprob=float(own),
            top_ids=ids[:count].tolist(),
            top_logprobs=top[:count].tolist(),
            kept=tokens,
        )
        for own, ids, top, tokens in zip(*(column[at] for column in columns[:3]), kept, strict=False)
    ]


def _excludes_tokens(sequence: Sequence) -> bool:
    asked = sequence.sampling
    filters = asked.top_k > 0 or asked.top_p < 1 or asked.min_p > 0 or sequence.matcher is not None
    return filters or sequence.variant == GREEDY or asked.temperature == 0


def _kept_ids(words: np.ndarray) -> bytes:
    """Returns the numbers of the bits that are set in uint32 `words`, as int32; most words of a mask are 0."""
    [some] = words.nonzero()
    [bits] = np.unpackbits(words[some].astype("<u4").view(np.uint8), bitorder="little").nonzero()
    return (some[bits >> 5] * 32 + (bits & 31)).astype("<i4").tobytes()
