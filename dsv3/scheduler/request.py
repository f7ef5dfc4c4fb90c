"""What goes into an engine and what comes out of it; imports no jax, and every type is msgpack-encodable.

A request is known by a number that its sender chooses. Several senders share one engine: each numbers its requests from
`first_id(sender)` on, and `senders` tells whose a result is.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from dsv3.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_PRIORITY = 2**31 - 1
"""The highest priority number; the lowest is its negative."""
BATCH_PRIORITY = 100
"""That of batch work, which runs in the room that requests of lower numbers leave."""
_SENDER_SHIFT = 40


def first_id(sender: int) -> int:
    """Returns the first request id of a sender, 0 to 2^22; it has 2^40 of them."""
    return sender << _SENDER_SHIFT


def senders[Ids: (int, np.ndarray)](request_ids: Ids) -> Ids:
    """Returns the sender of a request id, or of each one of [n] int64."""
    return request_ids >> _SENDER_SHIFT


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to continue in `sampling.n` sequences, with the ids from `request_id` on.

    `cache_salt` keeps the prefix cache of one tenant apart from another's. `pages_from` is the "host:port" of an
    instance that has computed the prompt, or "host:port#meeting" of one that has been handed it under that number, its
    `meeting` there. `rank` is where it must run, None for wherever it costs least. A lower `priority` is served
    earlier. The answer goes on behind `answer_token_ids`, which count as its first tokens. `grammar` is what the answer
    is held to, in llguidance's form, where that is not what `sampling.structured_outputs` alone says. Stop strings
    belong to the text layer; the engine only knows tokens.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    cache_salt: str = ""
    pages_from: str = ""
    meeting: int | None = None
    rank: int | None = None
    answer_token_ids: Sequence[int] = ()
    priority: int = 0
    grammar: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one sampled token: its own, and the `top_ids` most likely tokens with theirs."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities of prompt tokens, each given those before it, from token number `start` on.

    Columns of n tokens, little endian: `logprobs` float32 [n] and `ranks` int32 [n] (1: the likeliest token) are those
    of the tokens, `top_ids` int32 [n, k] and `top_logprobs` float32 [n, k] the k likeliest at their place, best first.
    """

    start: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def behind(self, position: int) -> "PromptLogprobs":
        """Returns those of the tokens from number `position` on."""
        skipped, width = max(0, position - self.start), len(self.top_ids) // max(1, len(self))
        return PromptLogprobs(
            self.start + skipped,
            self.logprobs[4 * skipped :],
            self.ranks[4 * skipped :],
            self.top_ids[width * skipped :],
            self.top_logprobs[width * skipped :],
        )

    def token_ranks(self) -> list[int]:
        """Returns the ranks of the tokens."""
        return np.frombuffer(self.ranks, "<i4").tolist()

    def tokens(self) -> list[TokenLogprobs]:
        """Returns an object for each token."""
        count = len(self)
        logprobs = np.frombuffer(self.logprobs, "<f4").tolist()
        if not count:
            return []
        ids = np.frombuffer(self.top_ids, "<i4").reshape(count, -1).tolist()
        top = np.frombuffer(self.top_logprobs, "<f4").reshape(count, -1).tolist()
        return [TokenLogprobs(*row) for row in zip(logprobs, ids, top, strict=True)]


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one step produced for one request.

    `finish_reason` is set on a request's last output. `stop_token_id` names the stop or end token that ended it (it is
    the last of `token_ids`). `num_cached_tokens` counts prompt tokens found in the prefix cache, on the first output,
    where `queue_seconds` is the time from the engine's taking the request to its first slot. `prompt_logprobs` come in
    outputs before it, without tokens; after a pre-emption some tokens of the prompt come again.
    `error` explains a finish_reason of "error".
    """

    request_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    queue_seconds: float | None = None
    error: str | None = None


class Tokens(msgspec.Struct, frozen=True):
    """Tokens of requests that simply go on, as columns: most of a step's results.

    Row i is `counts[i]` tokens of request `ids[i]`; `tokens` holds those of all rows, one row after the other.
    """

    ids: np.ndarray  # [n] int64
    counts: np.ndarray  # [n] int64, at least 1
    tokens: np.ndarray  # [sum of counts] int32

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[EngineOutput]:
        values, start = self.tokens.tolist(), 0
        for request_id, count in zip(self.ids.tolist(), self.counts.tolist(), strict=True):
            yield EngineOutput(request_id=request_id, token_ids=values[start : start + count])
            start += count


class StepOutputs(msgspec.Struct, frozen=True):
    """What one step produced: columns for most requests, and an object for each that needs more words.

    A request with a first or last token, log-probabilities or an error has an object. No request has two outputs of
    one job; objects of a request may follow its columns when it was aborted.
    """

    columns: list[Tokens] = []
    details: list[EngineOutput] = []

    def __bool__(self) -> bool:
        return bool(self.columns or self.details)

    def __len__(self) -> int:
        return sum(map(len, self.columns)) + len(self.details)

    def __iter__(self) -> Iterator[EngineOutput]:
        """Yields every output as an object, for callers to whom columns do not matter."""
        for rows in self.columns:
            yield from rows
        yield from self.details


class QueueFull(Exception):
    """The waiting queue is at its bound; try again later."""


class EngineDead(RuntimeError):
    """The engine has failed and serves nothing any more; its `failure` is the cause."""


class InvalidRequest(ValueError):
    """The request can never be served (too long, token id out of range); the text says what to change."""
