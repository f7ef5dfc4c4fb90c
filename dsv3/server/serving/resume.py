"""`resume`: continues an answer that another server has begun, with the text that it would have had there.

Seed and position decide every token, so the tokens so far are the whole state. They are computed like a prompt, and
replayed through detokenizer, stop strings and parser, which end up in the same state. A stream then has only the new
output. A complete response has all of it, since it cannot have half a call.
"""

import array
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import RequestRules, stop_ids
from dsv3.server.protocol.errors import invalid
from dsv3.server.protocol.openai import FinishReason, SampledRequest
from dsv3.server.serving.prompts import EncodedPrompt
from dsv3.server.serving.service import Service
from dsv3.text.deltas import AnswerDelta, merge_deltas
from dsv3.text.output import OutputProcessor
from dsv3.text.parser import AnswerParser

_NAME = "resume"
# Each resumed choice has its own prompt, which is sent and stored like any other.
MAX_RESUMED_TOKENS = 2**21
_INLINE_TOKENS = 1024  # more are replayed in a thread: 1 us per token


@dataclasses.dataclass(frozen=True)
class ResumedChoice:
    """One choice: its tokens so far, their output processor, and the deltas that they made.

    `finish_reason` is set where the last of them has ended it.
    """

    token_ids: array.array[int]
    output: OutputProcessor
    deltas: list[AnswerDelta]
    num_reasoning_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


def resumed_tokens(
    service: Service, request: SampledRequest, sampling: SamplingParams, prompts: Sequence[EncodedPrompt]
) -> list[array.array[int]]:
    """Returns each choice's tokens so far; empty without `resume`. Raises ApiError."""
    if request.resume is None:
        return []
    found: Any = request.resume.output_token_ids
    count = sampling.n * len(prompts)
    if not (isinstance(found, list) and any(isinstance(each, list | array.array) for each in found)):
        found = [found]  # of the only choice
    if len(found) != count:
        what = f"a list of token ids for each of the {count} choices" if count > 1 else "a list of token ids"
        raise invalid(f"resume.output_token_ids: expected {what}", _NAME)
    rules = service.require_ready().rules
    tokens = [_token_ids(each, rules) for each in found]
    if sampling.n * sum(len(p.token_ids) for p in prompts) + sum(map(len, tokens)) > MAX_RESUMED_TOKENS:
        text = f"resume: prompts and answers of all choices have more than {MAX_RESUMED_TOKENS} tokens"
        raise invalid(f"{text}; send the choices one by one, choice i with seed + i", _NAME)
    if any(tokens) and sampling.temperature > 0 and sampling.seed is None:
        raise invalid("resume: a sampled answer needs the seed of its first request", "seed")
    if any(tokens) and sampling.prompt_logprobs is not None:
        raise invalid("resume: not available with prompt_logprobs; the first response has them", "prompt_logprobs")
    for name in ("return_routed_experts", "return_sampling_mask"):
        if any(tokens) and getattr(sampling, name):
            raise invalid(f"resume: not available with {name}", name)
    if any(tokens) and sampling.logprobs is not None and not request.stream:
        raise invalid("logprobs: those of resumed tokens are not known here; send the request with stream", "logprobs")
    return tokens


def _token_ids(found: Any, rules: RequestRules) -> array.array[int]:
    """Returns token ids that are not negative, as parsed; numpy checks millions of them without a loop in Python."""
    try:
        ids = array.array("i", found)
        if not len(ids) or np.frombuffer(ids, np.int32).max() < rules.vocab_size:
            return ids
    except TypeError:  # a number in place of a list, or a list in place of a number
        pass
    raise invalid(f"resume.output_token_ids: a token id is an integer from 0 to {rules.vocab_size - 1}", _NAME)


async def replay_choices(
    service: Service,
    prompts: Sequence[EncodedPrompt],
    sampling: SamplingParams,
    answered: Sequence[array.array[int]],
    parser: Callable[[EncodedPrompt], AnswerParser | None],
    is_constrained: bool,
) -> list[ResumedChoice]:
    """Returns the state of the choices after the tokens `answered`; raises ApiError for tokens after an end.

    `is_constrained`: a grammar constrains the choices.
    """
    rules = service.require_ready().rules
    stops = stop_ids(sampling, rules, is_constrained)

    def replay() -> list[ResumedChoice]:
        choices = []
        for index, tokens in enumerate(answered):
            prompt = prompts[index // sampling.n]
            output = OutputProcessor(service.tokenizer, sampling, parser(prompt))
            limit = rules.max_model_len - len(prompt.token_ids)
            limit = limit if sampling.max_tokens is None else min(limit, sampling.max_tokens)
            choices.append(_replay(output, tokens, stops, limit))
        return choices

    return await service.run(sum(map(len, answered)) > _INLINE_TOKENS, replay)


def _replay(output: OutputProcessor, tokens: array.array[int], stops: set[int], limit: int) -> ResumedChoice:
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    is_stopped = end < len(tokens)
    last = tokens[-1:] if is_stopped or len(tokens) >= limit else tokens[:0]
    updates = [output.push(tokens[: len(tokens) - len(last)])]
    if last and updates[0].finish_reason is None:
        updates.append(output.push(last, "stop" if is_stopped else "length", last[0] if is_stopped else None))
    if min(end + 1, limit, sum(update.num_tokens for update in updates)) < len(tokens):
        raise invalid("resume.output_token_ids: the answer had ended before the last of them", _NAME)
    deltas = merge_deltas([delta for update in updates for delta in update.deltas])
    reasoning = sum(update.num_reasoning_tokens for update in updates)
    return ResumedChoice(tokens, output, deltas, reasoning, updates[-1].finish_reason, updates[-1].stop_reason)
