"""What a request costs the rank that takes it, in tokens: the one place where load is weighed. Imports no jax.

Computing a token is the unit. Three things cost:

- A prompt's own tokens, and behind them attention: a token that `keys_per_token` others precede costs twice. Tokens
  found in a prefix cache cost nothing, so a hit of h tokens outweighs a backlog of h tokens and no more.
- Tokens held in the latent cache, which every decode step reads again.
- Requests, whose rows every decode step computes.

DeepSeek's balancers even out these loads (open-infra-index, day 6: core attention and input tokens of prefill, cache
and requests of decode). Their sum in tokens is Dynamo's router's, which weighs a token held like a token to compute:
for DeepSeek-V3 that is an answer of some 2,000 tokens. One sum cannot hold cache *and* requests even, since a rank with
few long requests has the sum of one with many short ones. So a newcomer's share of each is weighed by its length, the
gradient of the loads' squares: a long request prefers the rank with less cache in use, a short one that with fewer
requests.
"""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from dsv3.config.device_rates import PEAKS, PREFILL_CORE_FLOPS, PREFILL_FLOPS
from dsv3.config.model import ModelConfig, materialized_operations, sizes_of

KEYS_PER_TOKEN = 3266.0
"""Those of DeepSeek-V3, where the model is not known."""
_H800 = PEAKS["H800"]
_CORE_SPEED = _H800.bf16 * PREFILL_CORE_FLOPS / (_H800.fp8 * PREFILL_FLOPS)  # of core attention over products


def keys_per_token(model: ModelConfig) -> float:
    """Returns how many keys take a token's query as long as its own products take.

    Routed experts are left out: all ranks share them, whoever has sent the token.
    """
    sizes = sizes_of(model)
    attention, shared = sizes.attention * model.num_hidden_layers, sizes.shared * model.num_moe_layers
    products = attention + shared + sizes.dense * model.num_dense_layers
    key = model.num_hidden_layers * materialized_operations(model)
    return max(1.0, 2 * products / key * _CORE_SPEED)


def prefill_cost[Count: (float, np.ndarray)](start: Count, stop: Count, keys: float = KEYS_PER_TOKEN) -> Count:
    """Returns the cost of computing the tokens `start` to `stop` of a prompt, each attending to all before it.

    Of several chunks (arrays) it returns that of each.
    """
    return (stop - start) * (1 + (start + stop) / (2 * keys))


def chunks_cost(pending: Iterable[tuple[int, int]], taken: Iterable[int], keys: float) -> float:
    """Returns the cost of the next `taken` tokens of each prompt of `pending`: tokens computed, and tokens in all.

    It is the sum of `prefill_cost`, in one go: dealing a step's chunks asks for it hundreds of times.
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
    """What each rank has to do: cost of the prompts it has not computed, tokens held in its cache, requests."""

    prefill: np.ndarray  # [X]
    held: np.ndarray  # [X]
    requests: np.ndarray  # [X]


def costs(loads: Loads, prefill: np.ndarray | float, held: int, decodes: bool = True) -> np.ndarray:
    """Returns what a request costs on each rank, `[X]`: the least is where it should go.

    It costs `prefill` to compute there (`[X]`, or the same everywhere) and then holds `held` tokens. Ranks that do not
    decode are weighed by their backlog alone.
    """
    after = with_backlog(loads.prefill, prefill)
    if not decodes:
        return after
    length = (loads.held.sum() + held) / (loads.requests.sum() + 1)
    return after + loads.held * (held / length) + loads.requests * length


def with_backlog[Cost: (float, np.ndarray)](backlog: Cost, prefill: Cost | float) -> Cost:
    """Returns what a request costs where nothing is decoded: its own prompt, behind those that wait."""
    return backlog + prefill


def imbalance(loads: np.ndarray) -> float:
    """Returns the largest load over the mean; 1 is even, and so is nothing at all."""
    mean = float(loads.mean()) if len(loads) else 0.0
    return float(loads.max()) / mean if mean > 0 else 1.0
