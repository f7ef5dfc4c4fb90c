"""What goes into the engine and what comes out of it; msgpack-encodable, so that it may run in a process of its own."""

from typing import Literal

import msgspec

from dsv3.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue. `sampling.n` is 1 here: whoever fans a request out makes n of these.

    `cache_salt` keeps the prefix cache of one tenant apart from another's. Stop strings are the text layer's business;
    the engine only knows tokens.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one sampled token: its own, and the `top_ids` most likely tokens with theirs."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one step produced for one request.

    `finish_reason` is set on a request's last output. `stop_token_id` names the stop or end token that ended it (it is
    the last of `token_ids`). `num_cached_tokens` counts prompt tokens found in the prefix cache, on the first output,
    where `queue_seconds` is the time from the engine's taking the request to its first slot.
    `error` explains a finish_reason of "error".
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    queue_seconds: float | None = None
    error: str | None = None


class QueueFull(Exception):
    """The waiting queue is at its bound; try again later."""


class EngineDead(RuntimeError):
    """The engine has failed and serves nothing any more; its `failure` is the cause."""


class InvalidRequest(ValueError):
    """The request can never be served (too long, token id out of range); the text says what to change."""


def fan_out(
    request_id: str, prompt_token_ids: list[int], sampling: SamplingParams, cache_salt: str = ""
) -> list[EngineRequest]:
    """The `sampling.n` engine requests of one user's request, ids `request_id-0` and on (`request_id` itself for one).

    With a seed, answer i takes `seed + i` (modulo 2^63), so that the answers differ and stay reproducible.
    """
    if sampling.n == 1:
        ids, each = [request_id], [sampling]
    else:
        ids = [f"{request_id}-{i}" for i in range(sampling.n)]
        seeds = [None if sampling.seed is None else (sampling.seed + i) % 2**63 for i in range(sampling.n)]
        each = [msgspec.structs.replace(sampling, n=1, seed=seed) for seed in seeds]
    return [
        EngineRequest(request_id=name, prompt_token_ids=prompt_token_ids, sampling=params, cache_salt=cache_salt)
        for name, params in zip(ids, each, strict=True)
    ]
