"""Requests to an engine and its outputs; imports no jax, and every type is msgpack-encodable.

Request ids are chosen by the sender. Several senders share one engine: each numbers its requests from
`first_id(sender)` on, and `senders` returns the sender of a result.
"""

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from dsv3.config.model import PAGE_SIZE
from dsv3.kv_cache.page_keys import KEY_BYTES, Key, extend_keys, root_for_weights, root_key
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.timing import RequestTiming
from dsv3.text.grammar import plain_grammar

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_PRIORITY = 2**31 - 1
"""The highest priority number; the lowest is its negative."""
BATCH_PRIORITY = 100
"""The priority number of batch work, which runs in the capacity that requests of lower numbers leave."""
FIRST_VERSION = "default"
"""The name of the weights with which an engine starts, as in SGLang."""
_SENDER_SHIFT = 40


def first_id(sender: int) -> int:
    """Returns the first request id of a sender, 0 to 2^22; it has 2^40 of them."""
    return sender << _SENDER_SHIFT


def senders[Ids: (int, np.ndarray)](request_ids: Ids) -> Ids:
    """Returns the sender of a request id, or of each one of [n] int64."""
    return request_ids >> _SENDER_SHIFT


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to continue in `sampling.n` sequences, with the ids from `request_id` on.

    `cache_salt` separates the prefix caches of tenants. `pages_from` is the "host:port" of an instance that has
    computed the prompt, or "host:port#room" of one that computes it now under that `bootstrap_room`. `rank` is the rank
    that must run it; None: where it costs least. A lower `priority` is served earlier. The answer continues behind
    `answer_token_ids`, which count as its first tokens. `grammar` constrains the answer, in llguidance's form, where
    `sampling.structured_outputs` alone does not say it. `prompt_experts` are those that another instance has chosen for
    the first tokens of the prompt, whose pages it has. `return_timing` asks for the engine's record of each sequence.
    Stop strings belong to the text layer; the engine only knows tokens.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    cache_salt: str = ""
    pages_from: str = ""
    bootstrap_room: int | None = None
    rank: int | None = None
    answer_token_ids: Sequence[int] = ()
    priority: int = 0
    grammar: str = ""
    prompt_experts: "ExpertIds | None" = None
    return_timing: bool = False


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one sampled token: its own, and the `top_ids` most likely tokens with theirs.

    `kept` are the ids of the tokens that it was drawn from, as little-endian int32; empty where nothing excludes a
    token, None where they are not asked for.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
    kept: bytes | None = None

    @property
    def kept_ids(self) -> np.ndarray:
        """`kept` as int32 `[n]`."""
        return np.frombuffer(self.kept or b"", "<i4")


class PromptLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities of prompt tokens, each given those before it, from token number `start` on.

    Columns of n tokens, little endian: `logprobs` float32 [n] and `ranks` int32 [n] (1: the likeliest token) are those
    of the tokens, `top_ids` int32 [n, k] and `top_logprobs` float32 [n, k] the k likeliest at their position, best
    first.
    """

    start: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def behind(self, position: int) -> "PromptLogprobs":
        """Returns the part from token number `position` on."""
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


class ExpertIds(msgspec.Struct, frozen=True, gc=False):
    """The experts that the router chose for a request's tokens, from token number `start` on.

    `ids` are the bytes of `[n, num_layers, top_k]`, by MoE layer, best first: ids of experts, whichever replica has
    computed the token. `dtype` is numpy's name of their type, uint8 or little-endian uint16.
    """

    start: int
    num_layers: int
    top_k: int
    dtype: str
    ids: bytes

    def array(self) -> np.ndarray:
        """Returns the ids, `[n, num_layers, top_k]`."""
        return np.frombuffer(self.ids, self.dtype).reshape(-1, self.num_layers, self.top_k)


def routed_expert_rows(parts: Sequence[ExpertIds], tokens: int) -> Iterator[np.ndarray]:
    """Yields the ids of the first `tokens` tokens from a request's outputs, `[n, L, K]` each, in the memory of these.

    Another engine that continues a request begins with its first token again.
    """
    known = 0
    for part in parts:
        rows = part.array()[max(0, known - part.start) :][: tokens - known]
        known += len(rows)
        yield rows


def join_routed_experts(parts: Sequence[ExpertIds], tokens: int) -> np.ndarray | None:
    """Returns the ids of the first `tokens` tokens from a request's outputs, `[tokens, L, K]`; None without any."""
    return np.concatenate(list(routed_expert_rows(parts, tokens))) if parts else None


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """What one step produced for one request.

    `finish_reason` is set on a request's last output. `stop_token_id` is the stop or end token that ended it, the last
    of `token_ids`. `num_cached_tokens` counts prompt tokens found in the prefix cache, on the first output, where
    `queue_seconds` is the time from the queue to the first slot. `prompt_logprobs` come in outputs before it, without
    tokens; after a preemption some tokens of the prompt come again. `routed_experts` are those of tokens that have been
    computed, where the request wants them: in outputs without tokens, and in the last one. `error` explains a
    finish_reason of "error". `weight_version` names the weights of this and the following tokens: on the first output,
    and on one without tokens where the weights of a running request have changed. `timing` is on the first and the last
    output, where the request asks for it: an answer that ends with a stop string has no last one.
    """

    request_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    routed_experts: ExpertIds | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    queue_seconds: float | None = None
    error: str | None = None
    weight_version: str | None = None
    timing: RequestTiming | None = None


class Tokens(msgspec.Struct, frozen=True):
    """Tokens of requests that just continue, as columns: most of a step's results.

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
    """What one step produced: columns for most requests, objects for the others.

    A request with a first or last token, log-probabilities or an error has an object. No request has two outputs of one
    job; objects of a request may follow its columns when it was aborted.
    """

    columns: list[Tokens] = []
    details: list[EngineOutput] = []

    def __bool__(self) -> bool:
        return bool(self.columns or self.details)

    def __len__(self) -> int:
        return sum(map(len, self.columns)) + len(self.details)

    def __iter__(self) -> Iterator[EngineOutput]:
        """Yields every output as an object, for callers that do not process columns."""
        for rows in self.columns:
            yield from rows
        yield from self.details


class QueueFull(Exception):
    """The waiting queue is at its bound; try again later."""


class EngineDead(RuntimeError):
    """The engine has failed and serves nothing any more; its `failure` is the cause."""


class NotServing(RuntimeError):
    """The engine sleeps, or its weights are not complete; the message says what to call."""


class InvalidRequest(ValueError):
    """The request can never be served (too long, token id out of range); the message says what to change."""


HOST_TIME_BOUNDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
"""Upper bounds in seconds of the histogram's buckets; the last bucket has none."""

STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bucket bounds of the tokens of a step, as vLLM has them."""


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A snapshot; token and event counts are totals since the start.

    `cache_usage` is the share of pages with an owner. `prefix_queries` counts prompt tokens looked up in the prefix
    cache, `prefix_hits` those found. `host_time_counts` is the histogram, over `HOST_TIME_BOUNDS`, of the host's time
    in a step without its wait for the device; `host_time_sum` its total in seconds. `step_tokens_counts` is the
    histogram, over `STEP_TOKENS_BOUNDS`, of the tokens of prompts and answers per step. `jobs` has a record by name for
    each kind of work that keeps statistics.
    """

    running: int
    waiting: int
    pages_in_use: int
    cache_usage: float
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    recompilations: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    host_time_sum: float
    host_time_counts: tuple[int, ...]
    step_tokens_counts: tuple[int, ...] = ()
    jobs: dict[str, Any] = dataclasses.field(default_factory=dict)


class Histogram:
    """Counts of values between `bounds`, and their total."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.total = 0.0
        self.counts = [0] * (len(bounds) + 1)
        self._bounds = bounds

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.total += value
        self.counts[bisect.bisect_left(self._bounds, value)] += 1


class PromptTooLong(InvalidRequest):
    """The prompt leaves no token for an answer: `length` tokens, of `limit` for both together."""

    def __init__(self, length: int, limit: int):
        super().__init__(
            f"the prompt has {length} tokens, but max_model_len is {limit} for prompt and answer together; shorten the "
            f"prompt to {limit - 1} tokens or fewer"
        )
        self.length, self.limit = length, limit


class NotInVocabulary(InvalidRequest):
    """The prompt has a token id that is not in the model's vocabulary."""

    def __init__(self, what: str, vocab_size: int):
        super().__init__(f"{what} is not in the vocabulary of {vocab_size} tokens")
        self.vocab_size = vocab_size


class RequestRules(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine accepts, and the fields of its block hashes: all that API server processes know of it.

    Prefix keys, one per `page_size` tokens, start from `fingerprint`; there are none without `enable_prefix_caching`.
    An engine that `prefills_only` samples one token. One that `takes_grammars` can constrain an answer, one that
    `returns_sampling_masks` returns what each token was drawn from. One that returns the `routed_experts` of a
    request's tokens has so many MoE layers and experts per token, and numpy's name of the ids' type.
    `weights` are what the keys depend on besides, "" for the weights of the start.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    enable_prefix_caching: bool = True
    fingerprint: str = ""
    prefills_only: bool = False
    num_ranks: int = 1
    takes_grammars: bool = False
    routed_experts: tuple[int, int, str] | None = None
    returns_sampling_masks: bool = False
    page_size: int = PAGE_SIZE
    weights: str = ""

    def root(self, cache_salt: str) -> Key:
        """Returns the start of the chain of prefix keys for a tenant's salt, under the weights of the start."""
        return root_key(self.fingerprint, cache_salt)


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A validated request in the form the scheduler uses; arrays are bytes, little endian.

    It stands for `sampling.n` sequences; the engine accepts those that `fan_out` returns. `tokens` is the prompt as
    int32, `keys` the 32-byte prefix keys of its full pages under `weights`, concatenated. The last `num_answered`
    tokens are the beginning of the answer. `max_length` bounds prompt and answer together. `stop_ids` end the answer.
    `pages_from` is an instance that has computed the prompt, `bootstrap_room` the number under which another instance
    asks this one for its pages, `rank` the only one that may run it. A lower `priority` is served earlier and may
    preempt a higher one. `grammar` constrains the answer, "" for none. `prompt_experts` and `return_timing` are an
    `EngineRequest`'s.
    """

    request_id: int
    sampling: SamplingParams
    tokens: bytes
    root: Key
    keys: bytes
    max_length: int
    stop_ids: tuple[int, ...]
    pages_from: str = ""
    bootstrap_room: int | None = None
    rank: int | None = None
    num_answered: int = 0
    priority: int = 0
    grammar: str = ""
    prompt_experts: ExpertIds | None = None
    weights: str = ""
    return_timing: bool = False

    @property
    def key_root(self) -> Key:
        """The start of the chain of `keys`."""
        return root_for_weights(self.root, self.weights)

    @property
    def prompt(self) -> np.ndarray:
        """The tokens of the prompt and of the answer's beginning, [n] int32, read-only."""
        return np.frombuffer(self.tokens, "<i4")

    @property
    def prefix_keys(self) -> list[Key]:
        """The keys of the prompt's full pages."""
        return list(_split_keys(self.keys))


@functools.lru_cache(maxsize=4)
def _split_keys(keys: bytes) -> tuple[Key, ...]:
    """Returns the keys; cached for the sequences of one prompt, since splitting 2,560 of them takes 30 us."""
    return tuple(np.frombuffer(keys, f"V{KEY_BYTES}").tolist())


def prepare(request: EngineRequest, rules: RequestRules) -> PreparedRequest:
    """Validates a request and computes its prefix keys, outside of the engine's thread.

    An API server process does this: for a prompt of 128k tokens it takes 16 ms, by which it would delay a step of all
    other requests. Raises InvalidRequest where a request can never be served.
    """
    sampling, prompt = request.sampling, _validate_prompt(request.prompt_token_ids, rules)
    for token in sampling.logit_bias:
        if not 0 <= token < rules.vocab_size:
            raise InvalidRequest(f"logit_bias: token id {token} is not in the vocabulary of {rules.vocab_size}")
    if request.rank is not None and not 0 <= request.rank < rules.num_ranks:
        raise InvalidRequest(f"rank: {request.rank} is not one of the {rules.num_ranks} ranks, counted from 0")
    grammar = _validate_grammar(request, rules)
    if sampling.return_routed_experts:
        _validate_routed_experts(request, rules)
    if sampling.return_sampling_mask:
        if not rules.returns_sampling_masks:
            raise InvalidRequest(
                "return_sampling_mask: this engine does not return masks; start it with --enable_return_sampling_mask"
            )
        if sampling.logprobs is None:  # masks go with them
            sampling = msgspec.structs.replace(sampling, logprobs=0)
    wanted = rules.max_model_len if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
    if rules.prefills_only and wanted > len(prompt) + 1:
        raise InvalidRequest(f"max_tokens: {sampling.max_tokens}, but this instance only computes prompts; set it to 1")
    max_length = min(wanted, rules.max_model_len)
    tokens = _append_answer(prompt, request.answer_token_ids, max_length, rules)
    root = rules.root(request.cache_salt)
    keys: list[Key] = []
    if rules.enable_prefix_caching:
        extend_keys(root_for_weights(root, rules.weights), keys, tokens, rules.page_size)
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidRequest(f"priority: {request.priority} is not from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    stop = stop_ids(sampling, rules, bool(grammar))
    if sampling.min_tokens and len(stop) == rules.vocab_size:
        raise InvalidRequest(
            f"min_tokens: {sampling.min_tokens} forbids all {rules.vocab_size} tokens of the vocabulary, since each of "
            "them is a stop token; leave one out of stop_token_ids"
        )
    return PreparedRequest(
        request_id=request.request_id,
        sampling=msgspec.structs.replace(sampling, structured_outputs=None) if grammar else sampling,
        tokens=tokens.tobytes(),
        root=root,
        keys=b"".join(keys),
        max_length=max_length,
        stop_ids=tuple(sorted(stop)),
        pages_from=request.pages_from,
        bootstrap_room=request.bootstrap_room,
        rank=request.rank,
        num_answered=len(request.answer_token_ids),
        priority=request.priority,
        grammar=grammar,
        prompt_experts=request.prompt_experts if sampling.return_routed_experts else None,
        weights=rules.weights,
        return_timing=request.return_timing,
    )


def stop_ids(sampling: SamplingParams, rules: RequestRules, is_constrained: bool = False) -> set[int]:
    """Returns the tokens that end an answer; a constrained one always ends with an end of sequence."""
    ignores_end = sampling.ignore_eos and not is_constrained
    found = {*sampling.stop_token_ids, *(() if ignores_end else rules.eos_token_ids)}
    return {token for token in found if 0 <= token < rules.vocab_size}


def _validate_grammar(request: EngineRequest, rules: RequestRules) -> str:
    """Returns the grammar of an answer, "" for none; does not compile it."""
    try:
        grammar = request.grammar or plain_grammar(request.sampling.structured_outputs)
    except ValueError as error:
        raise InvalidRequest(f"structured_outputs: {error}") from None
    if grammar and not rules.takes_grammars:
        raise InvalidRequest(
            "structured_outputs: this engine cannot constrain an answer to a grammar; serve a model directory with a "
            "tokenizer.json that it supports, and do not override drafts for a benchmark"
        )
    return grammar


def _validate_routed_experts(request: EngineRequest, rules: RequestRules) -> None:
    if rules.routed_experts is None:
        raise InvalidRequest(
            "return_routed_experts: this engine does not return the experts of tokens; start it with "
            "--enable_return_routed_experts"
        )
    if (given := request.prompt_experts) is not None:
        if (given.start, given.num_layers, given.top_k, given.dtype) != (0, *rules.routed_experts):
            raise InvalidRequest("return_routed_experts: the experts of the prompt are those of another model")
    elif request.pages_from or request.bootstrap_room is not None:
        raise InvalidRequest(
            "return_routed_experts: the prompt's pages would come from another instance, without the experts of its "
            "tokens; send kv_transfer_params of a response to the same request, and no bootstrap_room"
        )


def fan_out(request: PreparedRequest) -> list[PreparedRequest]:
    """Returns a request's sequences, which share its tokens and keys.

    With a seed, sequence i takes `seed + i` (modulo 2^63), so that they differ and stay reproducible.
    """
    if request.sampling.n == 1:
        return [request]
    replace = msgspec.structs.replace
    return [
        replace(request, request_id=request.request_id + i, sampling=sampling_for_sequence(request.sampling, i))
        for i in range(request.sampling.n)
    ]


def sampling_for_sequence(sampling: SamplingParams, i: int) -> SamplingParams:
    """Returns the sampling parameters of sequence `i`; only the first one returns log-probabilities of the prompt."""
    seed = None if sampling.seed is None else (sampling.seed + i) % 2**63
    return msgspec.structs.replace(
        sampling,
        n=1,
        seed=seed if sampling.n > 1 else sampling.seed,
        prompt_logprobs=None if i else sampling.prompt_logprobs,
    )


def resumed_request(request: PreparedRequest, i: int, answered: np.ndarray, rules: RequestRules) -> PreparedRequest:
    """Returns sequence `i` of a request with the tokens [n] int32 that it has generated so far, to continue it.

    The tokens come from an engine and leave at least one to generate: nothing is validated. Log-probabilities of the
    prompt are not returned again.
    """
    sampling = request.sampling if request.sampling.n == 1 else sampling_for_sequence(request.sampling, i)
    if not len(answered):
        return msgspec.structs.replace(request, request_id=request.request_id + i, sampling=sampling)
    tokens, keys = np.concatenate([request.prompt, answered]).astype("<i4"), request.prefix_keys
    if rules.enable_prefix_caching:
        extend_keys(request.key_root, keys, tokens, rules.page_size)
    return msgspec.structs.replace(
        request,
        request_id=request.request_id + i,
        sampling=msgspec.structs.replace(sampling, prompt_logprobs=None),
        tokens=tokens.tobytes(),
        keys=b"".join(keys),
        num_answered=request.num_answered + len(answered),
    )


def _validate_prompt(prompt: Sequence[int], rules: RequestRules) -> np.ndarray:
    if not prompt:
        raise InvalidRequest("the prompt is empty; give at least one token")
    if len(prompt) >= rules.max_model_len:
        raise PromptTooLong(len(prompt), rules.max_model_len)
    return _in_vocabulary("prompt token id", prompt, rules)


def _append_answer(prompt: np.ndarray, answer: Sequence[int], max_length: int, rules: RequestRules) -> np.ndarray:
    """Returns the prompt with the first tokens of its answer; InvalidRequest where no more can follow."""
    if not len(answer):
        return prompt
    if len(prompt) + len(answer) >= max_length:
        raise InvalidRequest(
            f"resume: {len(answer)} tokens of an answer that ends after {max_length - len(prompt)}: nothing left to "
            "generate; give fewer"
        )
    return np.concatenate([prompt, _in_vocabulary("output token id", answer, rules)])


def _in_vocabulary(what: str, ids: Sequence[int], rules: RequestRules) -> np.ndarray:
    try:
        tokens = np.array(ids, np.int64)
    except OverflowError:
        raise NotInVocabulary(f"a {what}", rules.vocab_size) from None
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= rules.vocab_size:
        raise NotInVocabulary(f"{what} {low if low < 0 else high}", rules.vocab_size)
    return tokens.astype("<i4")
