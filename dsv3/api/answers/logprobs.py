"""Log-probabilities in the two shapes of OpenAI's API."""

import math
from collections.abc import Sequence

from dsv3.api.answers.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from dsv3.request import TokenLogprobs
from dsv3.text.tokenizer import Tokenizer

# JSON has no infinity; vLLM's stand-in for a probability of 0.
_LEAST = -9999.0


def chat_logprobs(tokenizer: Tokenizer | None, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Returns the chat shape: a record per token, with its bytes and its alternatives."""
    content = []
    for token_id, entry in zip(ids, logprobs, strict=True):
        token, data = _token(tokenizer, token_id)
        top = [
            TopLogprob(*_split(tokenizer, i, value)) for i, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        content.append(ChatLogprob(token, _finite(entry.logprob), data, top))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer | None, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int
) -> CompletionLogprobs:
    """Returns the completion shape: parallel lists; `offset` is where in the text the first of these tokens stands."""
    tokens = [_token(tokenizer, token_id)[0] for token_id in ids]
    top, offsets = [], []
    for token, entry in zip(tokens, logprobs, strict=True):
        alternatives = zip(entry.top_ids, entry.top_logprobs, strict=True)
        top.append(
            {_token(tokenizer, i)[0]: _finite(value) for i, value in alternatives} | {token: _finite(entry.logprob)}
        )
        offsets.append(offset)
        offset += len(token)
    return CompletionLogprobs(tokens, [_finite(entry.logprob) for entry in logprobs], top, offsets)


def _split(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    token, data = _token(tokenizer, token_id)
    return token, _finite(logprob), data


def _token(tokenizer: Tokenizer | None, token_id: int) -> tuple[str, list[int]]:
    if tokenizer is None:
        return f"token_id:{token_id}", []
    data = tokenizer.token_bytes(token_id)
    return data.decode("utf-8", "replace"), list(data)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST
