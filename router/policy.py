"""The load balancing policy: sends a prompt to the instance where it costs least (`dsv3.scheduler.cost`)."""

import collections
import dataclasses
import random
from collections.abc import Sequence

import numpy as np

from dsv3.scheduler.cost import Loads, costs, prefill_cost
from router.request import PAGE_TOKENS, Prompt


@dataclasses.dataclass
class InstanceLoad:
    """An instance's work for this router: cost of prompts without a token yet, tokens in its cache, requests.

    Its `ranks` share that.
    """

    prefill: float = 0.0
    held: int = 0
    requests: int = 0
    ranks: int = 1


class InFlightPrompts:
    """Pages of prompts that an instance computes now: they will be cached before the next request arrives."""

    def __init__(self) -> None:
        self._keys: collections.Counter[bytes] = collections.Counter()

    def add(self, keys: Sequence[bytes]) -> None:
        """Adds the pages of a prompt."""
        self._keys.update(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Removes the pages of a prompt that is computed."""
        for key in keys:
            self._keys[key] -= 1
            if not self._keys[key]:
                del self._keys[key]

    def overlap(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading pages of a prompt are among them."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))


def cost_of(prompt: Prompt, pages: int) -> float:
    """Returns the cost of a prompt of which `pages` are cached. Its last token is always computed."""
    return prefill_cost(min(pages * PAGE_TOKENS, prompt.tokens - 1), prompt.tokens)


def choose(
    prompt: Prompt, loads: Sequence[InstanceLoad], pages: Sequence[int], *, decodes: bool, chance: random.Random
) -> int:
    """Returns the index of the instance where the prompt costs least; `chance` decides ties.

    One rank computes the prompt, and an instance's ranks share its work, so loads are per rank. `pages` are the
    prompt's pages that each instance may have cached. Ties are frequent at low load, and two routers must not both take
    the first.
    """
    own = [cost_of(prompt, each) for each in pages]
    if decodes:
        prefill, held, requests, ranks = np.array([(x.prefill, x.held, x.requests, x.ranks) for x in loads]).T
        per_rank = Loads(prefill / ranks, held / ranks, requests / ranks)
        found = costs(per_rank, np.array(own), prompt.tokens).tolist()
    else:
        found = [load.prefill / load.ranks + mine for load, mine in zip(loads, own, strict=True)]
    most = min(found) * (1 + 1e-9)
    return chance.choice([i for i, cost in enumerate(found) if cost <= most])
