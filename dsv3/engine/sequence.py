"""A request inside the engine: validated, its tokens as an array, its prefix keys computed."""

import dataclasses

import numpy as np

from dsv3.cache.prefix_index import Key, extend_keys
from dsv3.engine.config import EngineConfig
from dsv3.engine.request import EngineRequest, InvalidRequest
from dsv3.sampling_params import SamplingParams

GREEDY, SAMPLED, FULL = 0, 1, 2
"""Variants of the sampler, each able to do all that the one before it does."""


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way.

    `tokens` are those known when it was last put into the queue: the prompt, after a pre-emption the answer so far
    too. `keys` are the prefix keys of their full pages. The other fields are the scheduler's, valid while it runs.
    """

    request: EngineRequest
    tokens: np.ndarray  # [n] int32
    prompt_length: int
    max_length: int
    stop_ids: frozenset[int]
    seed: int
    root: Key
    keys: list[Key]
    variant: int
    arrival: int = 0
    slot: int = -1  # rank * max_num_seqs + slot within the rank
    pages: list[int] = dataclasses.field(default_factory=list)
    prefilled: int = 0  # tokens whose latents a launched step has written or will write
    pending: set[Key] = dataclasses.field(default_factory=set)  # keys of pages it is filling from its prompt
    num_cached: int = 0
    queued_at: float = 0.0
    queue_seconds: float | None = None  # from the queue to the first slot
    started: bool = False  # its first token has been reported

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling


def prepare(request: EngineRequest, cfg: EngineConfig, vocab_size: int, eos: tuple[int, ...], root: Key) -> Sequence:
    """Checks a request and computes what admission needs; touches no shared state, so any thread may call it.

    Raises InvalidRequest where it can never be served.
    """
    sampling = request.sampling
    tokens = _checked_tokens(request.prompt_token_ids, cfg, vocab_size)
    if sampling.n != 1:
        raise InvalidRequest(f"n: {sampling.n} must be 1 in the engine; send {sampling.n} requests (see fan_out)")
    for token in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"logit_bias: token id {token} is not in the vocabulary of {vocab_size}")
    wanted = cfg.max_model_len if sampling.max_tokens is None else len(tokens) + sampling.max_tokens
    keys: list[Key] = []
    if cfg.enable_prefix_caching:
        extend_keys(root, keys, tokens)
    stop = set(sampling.stop_token_ids) if sampling.ignore_eos else {*sampling.stop_token_ids, *eos}
    return Sequence(
        request=request,
        tokens=tokens,
        prompt_length=len(tokens),
        max_length=min(wanted, cfg.max_model_len),
        stop_ids=frozenset(t for t in stop if 0 <= t < vocab_size),
        seed=0 if sampling.seed is None else sampling.seed,
        root=root,
        keys=keys,
        variant=_variant(sampling),
    )


def _checked_tokens(prompt: list[int], cfg: EngineConfig, vocab_size: int) -> np.ndarray:
    if not prompt:
        raise InvalidRequest("the prompt is empty; give at least one token")
    if len(prompt) >= cfg.max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens, but max_model_len is {cfg.max_model_len} for prompt and answer "
            f"together; shorten the prompt to {cfg.max_model_len - 1} tokens or fewer"
        )
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        raise InvalidRequest(
            f"prompt token id {low if low < 0 else high} is not in the vocabulary of {vocab_size} tokens"
        )
    return np.array(prompt, np.int32)


def _variant(sampling: SamplingParams) -> int:
    adjusts = (
        sampling.logit_bias
        or sampling.min_tokens
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )
    if adjusts:
        return FULL
    return SAMPLED if sampling.temperature > 0 else GREEDY
