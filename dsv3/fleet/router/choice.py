"""Which instance costs least, by what the router has sent there: `dsv3.fleet.cost` over instances in place of ranks."""

import collections
import dataclasses
import random
from collections.abc import Container, Sequence

import numpy as np

from dsv3.fleet.cost import Loads, costs, prefill_cost, with_backlog
from dsv3.fleet.router.prompt import PAGE_TOKENS, Prompt

MAX_SENT_PAGES = 65_536
"""Pages that are remembered per instance: 4 million tokens."""


@dataclasses.dataclass
class Load:
    """What an instance has to do for this router: cost of prompts without a token yet, tokens held, requests.

    Its `ranks` share that.
    """

    prefill: float = 0.0
    held: int = 0
    requests: int = 0
    ranks: int = 1


class SentPages:
    """The pages that went to an instance, newest last: it may have them in its cache."""

    def __init__(self, limit: int = MAX_SENT_PAGES):
        self._limit = limit
        self._keys: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, keys: Sequence[bytes]) -> None:
        """Remembers pages; the oldest ones are forgotten, and a prompt's last ones before its first."""
        known, renew = self._keys, self._keys.move_to_end
        for key in reversed(keys):
            known[key] = None
            renew(key)
        while len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def overlap(self, keys: Sequence[bytes]) -> int:
        """Returns how many pages of a prompt, from its first on, went there.

        A page is always newer than those behind it. So those that are known are a run, found by bisection.
        """
        known, low, high = self._keys, 0, len(keys)
        if not keys or keys[0] not in known:
            return 0
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if keys[middle] in known else (low, middle)
        return low

    def clear(self) -> None:
        """Forgets all: the instance has begun anew."""
        self._keys.clear()


class Flying:
    """The pages of prompts that an instance computes: they will be there before the next request is."""

    def __init__(self) -> None:
        self._keys: collections.Counter[bytes] = collections.Counter()

    def add(self, keys: Sequence[bytes]) -> None:
        """Notes the pages of a prompt."""
        self._keys.update(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Notes that a prompt is computed."""
        for key in keys:
            self._keys[key] -= 1
            if not self._keys[key]:
                del self._keys[key]

    def overlap(self, keys: Sequence[bytes]) -> int:
        """Returns how many pages of a prompt, from its first on, are among them."""
        return _overlap(keys, self._keys)


def _overlap(keys: Sequence[bytes], known: Container[bytes]) -> int:
    for i, key in enumerate(keys):
        if key not in known:
            return i
    return len(keys)


def cost_of(prompt: Prompt, pages: int) -> float:
    """Returns what a prompt costs where that many of its pages are found. Its last token is always computed."""
    return prefill_cost(min(pages * PAGE_TOKENS, prompt.tokens - 1), prompt.tokens)


def choose(prompt: Prompt, loads: Sequence[Load], pages: Sequence[int], *, decodes: bool, chance: random.Random) -> int:
    """Returns the place of the instance where the prompt costs least; `chance` decides among equals.

    One rank computes the prompt, and all of an instance's ranks share what it has to do: so loads are those per rank.
    `pages` says how many of the prompt's pages each instance may have. Equals are many where little is on its way, and
    two routers side by side must not agree on the first of them.
    """
    own = [cost_of(prompt, each) for each in pages]
    if decodes:
        prefill, held, requests, ranks = np.array([(x.prefill, x.held, x.requests, x.ranks) for x in loads]).T
        per_rank = Loads(prefill / ranks, held / ranks, requests / ranks)
        found = costs(per_rank, np.array(own), prompt.tokens).tolist()
    else:
        found = [with_backlog(load.prefill / load.ranks, mine) for load, mine in zip(loads, own, strict=True)]
    most = min(found) * (1 + 1e-9)
    return chance.choice([i for i, cost in enumerate(found) if cost <= most])
