"""Takes in what a step has sampled: tokens noted, ended requests released."""

import dataclasses

import numpy as np

from dsv3.scheduler.batch_slots import NOT_FINITE, NOTHING, BatchRows
from dsv3.scheduler.request import EngineOutput, FinishReason, StepOutputs, TokenLogprobs, Tokens
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import Sequence

CALM_STEPS = 64
"""So many steps in a row without an overflow halve the room again: trying in vain costs two of them."""


class CapacityExceeded(RuntimeError):
    """A step of the fewest rows overflowed: buffers are smaller than a single row needs."""


@dataclasses.dataclass
class CapacityFactor:
    """The room of a phase: each row gets `factor` times that of its bucket, a power of two up to `most`.

    A step whose exchange overflows samples nothing and leaves the state on the devices as it was, so the next step is
    that step again, and what was in flight behind it too. From then on a row gets twice the room: the next larger
    bucket where there is one, and half as many rows in it where there is none. A single row always fits.
    """

    most: int
    factor: int = 1
    _calm: int = 0

    def note(self, factor: int, overflowed: bool) -> None:
        """Takes in the result of a step that was planned with `factor`; those of an earlier factor decide nothing.

        Raises CapacityExceeded where even `most` was not enough.
        """
        if factor != self.factor:
            return
        if not overflowed:
            self._calm += 1
            if self._calm >= CALM_STEPS and self.factor > 1:
                self._set(self.factor // 2)
            return
        if factor >= self.most:
            raise CapacityExceeded(
                f"a step with {factor} times the room per row still overflowed the buffers between the devices: "
                "sharding.experts.capacity gives them less than a single row needs"
            )
        self._set(2 * factor)

    def _set(self, factor: int) -> None:
        self.factor, self._calm = factor, 0


NOT_FINITE_MESSAGE = "the model's logits were not finite for this request"


def process_results(
    scheduler: Scheduler, rows: BatchRows, sampled: tuple[np.ndarray, ...], outputs: StepOutputs
) -> None:
    """Notes the tokens of a batch's rows and adds them to `outputs`.

    First of what was `sampled` for every row of the batch come the tokens `[ranks, B, S]`: the accepted ones first,
    then `NOTHING` or `UNDRAFTED`; `NOT_FINITE` where the logits were not finite. Where a request asked for them, the
    log-probabilities `[ranks, B, S]` of the tokens follow, the most likely tokens `[ranks, B, S, 20]`, best first, and
    their log-probabilities.

    What belongs to a request that has left its slot is dropped. Rows without a token are of a step that is computed
    again. Most rows become columns; a request's first and last tokens, log-probabilities and errors are objects.
    """
    slots = scheduler.slots
    live = slots.epoch[rows.slots] == rows.epochs
    if not live.all():
        rows = rows.only(live)
    mine = rows.slots
    if not len(mine):
        return
    tokens = _of_rows(sampled[0], rows)
    repeated = tokens[:, 0] == NOTHING
    if repeated.any():
        _correct_plans(scheduler, mine[repeated], np.full(np.count_nonzero(repeated), tokens.shape[1]))
        rows, tokens = rows.only(~repeated), tokens[~repeated]
        mine = rows.slots
        if not len(mine):
            return
    accepted = scheduler.drafts.add(tokens)
    before, limit = slots.known[mine], slots.limit[mine]
    known = np.minimum(before + accepted, limit)
    counts = known - before
    slots.history.note(mine, before, known, tokens)
    slots.known[mine] = known
    scheduler.generated_tokens += int(counts.sum())
    at_limit = known == limit
    special = at_limit | slots.wants_logprobs[mine] | ~slots.started[mine]
    for column in tokens.T:  # with two indices numpy takes four times as long
        ending = slots.ends[column]
        if ending.any():
            special |= ending > 0
    if tokens.shape[1] > 1:
        _correct_plans(scheduler, mine, tokens.shape[1] - counts)
    _as_columns(rows, tokens, counts, ~special, outputs)
    for i in special.nonzero()[0].tolist():
        sequence = slots.sequences[mine[i]]
        assert sequence is not None
        values = tokens[i, : counts[i]].tolist()
        logprobs = _logprobs(sequence, rows, i, sampled[1:])
        outputs.details.append(_detailed(scheduler, sequence, values, bool(at_limit[i]), logprobs))


def _of_rows(tokens: np.ndarray, rows: BatchRows) -> np.ndarray:
    """Returns what was sampled for the rows, `[n, S]`. With two indices numpy takes 15 times as long."""
    ranks, size, width = tokens.shape
    return tokens.reshape(ranks * size, width).take(rows.rank * size + rows.position, axis=0)


def _as_columns(
    rows: BatchRows, tokens: np.ndarray, counts: np.ndarray, plain: np.ndarray, outputs: StepOutputs
) -> None:
    """Adds the `plain` rows, all of whose accepted tokens count."""
    ids = rows.ids
    if not plain.all():
        ids, tokens, counts = ids[plain], tokens[plain], counts[plain]
    if len(ids):
        outputs.columns.append(Tokens(ids, counts, tokens[tokens > NOTHING] if tokens.shape[1] > 1 else tokens[:, 0]))


def _detailed(
    scheduler: Scheduler, sequence: Sequence, tokens: list[int], at_limit: bool, logprobs: list[TokenLogprobs] | None
) -> EngineOutput:
    """Returns the output of a row that is a request's first or last, or carries log-probabilities."""
    num_cached, queue_seconds = (0, None) if sequence.started else (sequence.num_cached, sequence.queue_seconds)
    sequence.started = scheduler.slots.started[sequence.slot] = True
    if NOT_FINITE in tokens:
        scheduler.invalidate_pages(sequence)
        scheduler.remove(sequence)
        return EngineOutput(request_id=sequence.id, token_ids=[], finish_reason="error", error=NOT_FINITE_MESSAGE)
    stop = next((i for i, token in enumerate(tokens) if token in sequence.stop_ids), None)
    if stop is not None:
        tokens = tokens[: stop + 1]
    reason: FinishReason | None = "stop" if stop is not None else "length" if at_limit else None
    if reason:
        scheduler.remove(sequence)
    return EngineOutput(
        request_id=sequence.id,
        token_ids=tokens,
        logprobs=None if logprobs is None else logprobs[: len(tokens)],
        finish_reason=reason,
        stop_token_id=None if stop is None else tokens[-1],
        num_cached_tokens=num_cached,
        queue_seconds=queue_seconds,
    )


def _correct_plans(scheduler: Scheduler, mine: np.ndarray, missing: np.ndarray) -> None:
    """Takes back tokens that were planned and not accepted; a request that had all of its tokens planned goes on."""
    slots, short = scheduler.slots, missing.nonzero()[0]
    mine = mine[short]
    slots.planned[mine] -= missing[short]
    paused = mine[~slots.decoding[mine]]
    if len(paused) and len(paused := paused[slots.planned[paused] < slots.limit[paused]]):
        slots.resume(paused)


def _logprobs(
    sequence: Sequence, rows: BatchRows, i: int, columns: tuple[np.ndarray, ...]
) -> list[TokenLogprobs] | None:
    count = sequence.sampling.logprobs
    if count is None or not columns:
        return None
    at = (rows.rank[i], rows.position[i])
    return [
        TokenLogprobs(
            logprob=float(own),
            top_ids=ids[:count].tolist(),
            top_logprobs=top[:count].tolist(),
        )
        for own, ids, top in zip(*(column[at] for column in columns), strict=True)
    ]
