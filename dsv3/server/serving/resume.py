"""`resume`: an answer that another server has begun goes on here, with the text that it would have had.

Seed and position decide every token, so its tokens so far are all that there is to know. They are computed like a
prompt, and replayed through what turns tokens into text: stop strings, reasoning, calls and usage stand where they
stood. A stream then tells only what is new. A whole answer tells everything, as it has no place for half a call.
"""

import array
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import RequestRules, stop_ids
from dsv3.server.protocol.errors import invalid
from dsv3.server.protocol.openai import FinishReason, SampledRequest
from dsv3.server.serving.prompts import EncodedPrompt
from dsv3.server.serving.service import Service
from dsv3.text.output import OutputDelta, OutputStream
from dsv3.text.parser import AnswerParser
from dsv3.text.pieces import Piece, joined

_NAME = "resume"
# A resumed choice has a prompt of its own, which is sent and held like any other.
MAX_RESUMED_TOKENS = 2**21
_INLINE_TOKENS = 1024  # more are replayed in a thread: 1 us per token


@dataclasses.dataclass(frozen=True)
class Resumed:
    """One choice: the tokens it has had, what becomes of the next ones, and what these had told.

    `finish_reason` is set where the last of them has ended it.
    """

    token_ids: array.array[int]
    stream: OutputStream
    pieces: list[Piece]
    num_reasoning_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


def answered_tokens(
    service: Service, request: SampledRequest, sampling: SamplingParams, prompts: Sequence[EncodedPrompt]
) -> list[array.array[int]]:
    """Returns the tokens that each choice has had; empty where nothing is resumed. Raises ApiError."""
    if request.resume is None:
        return []
    found: Any = request.resume.output_token_ids
    count = sampling.n * len(prompts)
    if not any(isinstance(each, list | array.array) for each in found):
        found = [found]  # the only choice's
    if len(found) != count:
        what = f"a list of token ids for each of the {count} choices" if count > 1 else "a list of token ids"
        raise invalid(f"resume.output_token_ids: expected {what}", _NAME)
    tokens = [_token_ids(each, service.require_ready().rules) for each in found]
    if sampling.n * sum(len(p.token_ids) for p in prompts) + sum(map(len, tokens)) > MAX_RESUMED_TOKENS:
        text = f"resume: prompts and answers of all choices have more than {MAX_RESUMED_TOKENS} tokens"
        raise invalid(f"{text}; send the choices one by one, choice i with seed + i", _NAME)
    if any(tokens) and sampling.temperature > 0 and sampling.seed is None:
        raise invalid("resume: a sampled answer goes on only with the seed that it began with", "seed")
    if any(tokens) and sampling.prompt_logprobs is not None:
        raise invalid("resume: who began the answer has told the prompt's log-probabilities", "prompt_logprobs")
    if any(tokens) and sampling.logprobs is not None and not request.stream:
        raise invalid("logprobs: those of resumed tokens are not known here; ask for a stream", "logprobs")
    return tokens


def _token_ids(found: Any, rules: RequestRules) -> array.array[int]:
    is_list = isinstance(found, list | array.array) and all(isinstance(each, int) for each in found)
    if is_list and all(0 <= each < rules.vocab_size for each in found):
        return array.array("i", found)
    raise invalid(f"resume.output_token_ids: a token id is an integer from 0 to {rules.vocab_size - 1}", _NAME)


async def replayed(
    service: Service,
    prompts: Sequence[EncodedPrompt],
    sampling: SamplingParams,
    answered: Sequence[array.array[int]],
    parser: Callable[[EncodedPrompt], AnswerParser | None],
    is_held: bool,
) -> list[Resumed]:
    """Returns the choices as they stood after the tokens `answered`; raises ApiError for tokens behind an end.

    `is_held` says whether they are held to a grammar.
    """
    rules = service.require_ready().rules
    stops = stop_ids(sampling, rules, is_held)

    def replay() -> list[Resumed]:
        choices = []
        for index, tokens in enumerate(answered):
            prompt = prompts[index // sampling.n]
            stream = OutputStream(service.tokenizer, sampling, parser(prompt))
            choices.append(_replayed(stream, tokens, stops, _limit(sampling, rules, len(prompt.token_ids))))
        return choices

    return await service.run(sum(map(len, answered)) > _INLINE_TOKENS, replay)


def _replayed(stream: OutputStream, tokens: array.array[int], stops: set[int], limit: int) -> Resumed:
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    is_stopped = end < len(tokens)
    last = tokens[-1:] if is_stopped or len(tokens) >= limit else tokens[:0]
    deltas = [stream.push(tokens[: len(tokens) - len(last)])]
    if last and deltas[0].finish_reason is None:
        deltas.append(stream.push(last, "stop" if is_stopped else "length", last[0] if is_stopped else None))
    if min(end + 1, limit, _counted(deltas)) < len(tokens):
        raise invalid("resume.output_token_ids: the answer had ended before the last of them", _NAME)
    pieces = joined([piece for delta in deltas for piece in delta.pieces])
    reasoning = sum(delta.num_reasoning_tokens for delta in deltas)
    return Resumed(tokens, stream, pieces, reasoning, deltas[-1].finish_reason, deltas[-1].stop_reason)


def _limit(sampling: SamplingParams, rules: RequestRules, num_prompt: int) -> int:
    room = rules.max_model_len - num_prompt
    return room if sampling.max_tokens is None else min(sampling.max_tokens, room)


def _counted(deltas: Sequence[OutputDelta]) -> int:
    return sum(delta.num_tokens for delta in deltas)
