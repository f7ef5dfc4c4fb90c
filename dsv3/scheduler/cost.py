"""Cost model of load balancing: what a request costs the rank that runs it, in tokens. Imports no jax.

Computing a token is the unit. Three things cost:

- A prompt's own tokens, and their attention: a token behind `keys_per_token` others costs twice. Tokens found in a
  prefix cache cost nothing, so a hit of h tokens outweighs a backlog of h tokens and no more.
- Tokens in the latent cache, which every decode step reads again.
- Requests, whose rows every decode step computes.

DeepSeek's balancers even out these loads (open-infra-index, day 6: core attention and input tokens of prefill, cache
and requests of decode). Dynamo's router uses their sum in tokens and weighs a cached token like a token to compute: for
DeepSeek-V3 that is an answer of some 2,000 tokens. One sum cannot keep cache *and* requests even, since a rank with few
long requests has the sum of one with many short ones. So a new request's share of each is weighed by its length, the
gradient of the loads' squares: a long request prefers the rank with less cache in use, a short one that with fewer
requests.
"""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from dsv3.config.device_rates import PEAKS, PREFILL_CORE_FLOPS, PREFILL_FLOPS
from dsv3.config.model import ModelConfig, bounded_operations, common_weights, key_operations

KEYS_PER_TOKEN = 3266.0
"""`keys_per_token` of DeepSeek-V3, for callers that do not know the model."""
_H800 = PEAKS["H800"]
_CORE_SPEED = _H800.bf16 * PREFILL_CORE_FLOPS / (_H800.fp8 * PREFILL_FLOPS)  # of core attention over products


def keys_per_token(model: ModelConfig) -> float:
    """Returns how many keys of attention take as long as all matrix products of one token.

    Routed experts are left out: all ranks share them, whichever sent the token. A query of DeepSeek-V4 attends to its
    window and to the entries chosen for it whatever the context, so these count as products.
    """
    products = 2 * common_weights(model) * _CORE_SPEED + bounded_operations(model)
    return max(1.0, products / key_operations(model))


def prefill_cost[Count: (float, np.ndarray)](start: Count, stop: Count, keys: float = KEYS_PER_TOKEN) -> Count:
    """Returns the cost of computing the tokens `start` to `stop` of a prompt, each attending to all before it.

    For arrays of chunks it returns the cost of each.
    """
    return (stop - start) * (1 + (start + stop) / (2 * keys))


def chunks_cost(pending: Iterable[tuple[int, int]], taken: Iterable[int], keys: float) -> float:
    """Returns the cost of the next `taken` tokens of each prompt of `pending`: (tokens computed, tokens in all).

    It is the sum of `prefill_cost` in one loop: scheduling a step's chunks calls it hundreds of times.
    """
    tokens = pairs = 0
    for (done, _), count in zip(pending, taken, strict=True):
        tokens += count
        pairs += count * (2 * done + count)
    return tokens + pairs / (2 * keys)


def affordable(cost: float, start: int, keys: float) -> int:
    """Returns how many tokens from `start` on can be computed for `cost`."""
    per_token = 1 + start / keys
    return int(keys * (math.sqrt(per_token**2 + 2 * max(0.0, cost) / keys) - per_token))


@dataclasses.dataclass(frozen=True)
class Loads:
    """Loads by rank: cost of the prompts it has yet to compute, tokens in its cache, requests."""

    prefill: np.ndarray  # [X]
    cached: np.ndarray  # [X]
    requests: np.ndarray  # [X]


def costs(loads: Loads, prefill: np.ndarray | float, tokens: int, decodes: bool = True) -> np.ndarray:
    """Returns what a request costs on each rank, `[X]`: the least is where it should go.

    It costs `prefill` to compute there (`[X]`, or one number for all) and then occupies `tokens` of the cache. Ranks
    that do not decode are weighed by their backlog alone.
    """
    after = loads.prefill + prefill
    if not decodes:
        return after
    length = (loads.cached.sum() + tokens) / (loads.requests.sum() + 1)
    return after + loads.cached * (tokens / length) + loads.requests * length


def imbalance(loads: np.ndarray) -> float:
    """Returns the largest load over the mean; 1 is even, and also the value without any load."""
    mean = float(loads.mean()) if len(loads) else 0.0
    return float(loads.max()) / mean if mean > 0 else 1.0
