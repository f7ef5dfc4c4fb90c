"""What a finished step means for its requests: tokens noted, pages published, ended requests released."""

import dataclasses

import numpy as np

from dsv3.cache.page import PAGE_SIZE
from dsv3.engine.plan import Rows, StepPlan
from dsv3.engine.scheduler import Scheduler
from dsv3.engine.sequence import Sequence
from dsv3.request import EngineOutput, FinishReason, StepOutputs, TokenLogprobs, Tokens

NOT_FINITE = "the model's logits were not finite for this request"


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens `[ranks, rows]`, -1 where the logits were not finite, and, if asked for, log-probabilities.

    `logprobs` are those of the tokens; `top_ids` and `top_logprobs` `[ranks, rows, 20]` the most likely, best first.
    """

    tokens: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


def collect(scheduler: Scheduler, plan: StepPlan, prefill: Sampled | None, decode: Sampled | None) -> StepOutputs:
    """Takes in the results of a finished step; what belongs to a request that has left its slot is dropped."""
    outputs = StepOutputs([], [])
    if plan.prefill is not None and prefill is not None:
        _publish_chunks(scheduler, plan)
        _accept(scheduler, plan.prefill.sampled, prefill, outputs)
    if plan.decode is not None and decode is not None:
        _accept(scheduler, plan.decode.rows, decode, outputs)
    scheduler.collected(plan.number)
    return outputs


def _publish_chunks(scheduler: Scheduler, plan: StepPlan) -> None:
    assert plan.prefill is not None
    for chunk in (c for mine in plan.prefill.chunks for c in mine):
        slot = chunk.sequence.slot
        if slot >= 0 and scheduler.slots.epoch[slot] == chunk.epoch:
            scheduler.publish(chunk.sequence, chunk.start, chunk.stop)


def _accept(scheduler: Scheduler, rows: Rows, sampled: Sampled, outputs: StepOutputs) -> None:
    slots = scheduler.slots
    live = slots.epoch[rows.slots] == rows.epochs
    if not live.all():
        rows = rows.only(live)
    mine = rows.slots
    if not len(mine):
        return
    tokens = sampled.tokens[rows.rank, rows.position]
    before = slots.known[mine]
    slots.history[mine, before] = tokens
    slots.known[mine] = before + 1
    bad = tokens < 0
    for i in ((before % PAGE_SIZE == 0) & ~bad).nonzero()[0].tolist():
        _publish_decoded(scheduler, int(mine[i]), int(before[i]))
    at_limit = before + 1 >= slots.limit[mine]
    special = bad | at_limit | (slots.stop_users[tokens] > 0) | slots.wants_logprobs[mine] | ~slots.started[mine]
    if not special.all():
        plain = ~special
        ones = np.ones(int(plain.sum()), np.int64)
        outputs.columns.append(Tokens(rows.ids[plain], ones, tokens[plain]))
    for i in special.nonzero()[0].tolist():
        sequence = slots.sequences[mine[i]]
        assert sequence is not None
        logprobs = _logprobs(sequence, rows, i, sampled)
        outputs.details.append(_detailed(scheduler, sequence, int(tokens[i]), bool(at_limit[i]), logprobs))


def _publish_decoded(scheduler: Scheduler, slot: int, cached: int) -> None:
    """`cached` latents are in the cache, a whole number of pages."""
    sequence = scheduler.slots.sequences[slot]
    assert sequence is not None
    scheduler.publish(sequence, cached - PAGE_SIZE, cached)


def _detailed(
    scheduler: Scheduler, sequence: Sequence, token: int, at_limit: bool, logprobs: list[TokenLogprobs] | None
) -> EngineOutput:
    """The output of a row that is a request's first or last, or carries log-probabilities."""
    num_cached, queue_seconds = (0, None) if sequence.started else (sequence.num_cached, sequence.queue_seconds)
    sequence.started = scheduler.slots.started[sequence.slot] = True
    if token < 0:
        scheduler.distrust(sequence)
        scheduler.remove(sequence)
        return EngineOutput(request_id=sequence.id, token_ids=[], finish_reason="error", error=NOT_FINITE)
    stopped = token in sequence.stop_ids
    reason: FinishReason | None = "stop" if stopped else "length" if at_limit else None
    if reason:
        scheduler.remove(sequence)
    return EngineOutput(
        request_id=sequence.id,
        token_ids=[token],
        logprobs=logprobs,
        finish_reason=reason,
        stop_token_id=token if stopped else None,
        num_cached_tokens=num_cached,
        queue_seconds=queue_seconds,
    )


def _logprobs(sequence: Sequence, rows: Rows, i: int, sampled: Sampled) -> list[TokenLogprobs] | None:
    count = sequence.sampling.logprobs
    if count is None or sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
        return None
    at = (rows.rank[i], rows.position[i])
    return [
        TokenLogprobs(
            logprob=float(sampled.logprobs[at]),
            top_ids=sampled.top_ids[at][:count].tolist(),
            top_logprobs=sampled.top_logprobs[at][:count].tolist(),
        )
    ]
