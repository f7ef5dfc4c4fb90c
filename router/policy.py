"""The load balancing policy: sends a prompt to the instance where it costs least (`dsv3.scheduler.cost`)."""

import collections
import dataclasses
import random
from collections.abc import Container, Sequence

import numpy as np

from dsv3.scheduler.cost import Loads, costs, prefill_cost
from router.request import PAGE_TOKENS, Prompt

MAX_SENT_PAGES = 65_536
"""Pages that are kept per instance: 4 million tokens."""


@dataclasses.dataclass
class InstanceLoad:
    """An instance's work for this router: cost of prompts without a token yet, tokens in its cache, requests.

    Its `ranks` share that.
    """

    prefill: float = 0.0
    held: int = 0
    requests: int = 0
    ranks: int = 1


class SentPages:
    """The pages that were sent to an instance, newest last: it may have cached them. A `limit` of 0 keeps none."""

    def __init__(self, limit: int = MAX_SENT_PAGES):
        self._limit = limit
        self._turns: dict[bytes, int] = {}  # by page: of the prompt that was the last to have it
        self._prompts: collections.deque[tuple[int, tuple[bytes, ...]]] = collections.deque()  # by turn
        self._turn, self._num_recorded = 0, 0  # of the last prompt; pages of all `_prompts`

    def __len__(self) -> int:
        return len(self._turns)

    def record(self, keys: Sequence[bytes]) -> None:
        """Adds a prompt's pages; drops the oldest prompts' ones beyond the limit, last pages first.

        No page is moved on its own: an ordered dictionary took four times as long.
        """
        if not keys or not self._limit:
            return
        self._turn += 1
        self._turns.update(dict.fromkeys(keys, self._turn))
        self._prompts.append((self._turn, tuple(keys)))
        self._num_recorded += len(keys)
        while len(self._turns) > self._limit:
            self._drop_oldest(len(self._turns) - self._limit)
        if self._num_recorded > 2 * self._limit:
            self._sweep()

    def overlap(self, keys: Sequence[bytes], near: int = 0) -> int:
        """Returns how many leading pages of a prompt were sent there.

        A page is always newer than those behind it. So known pages are a prefix, found by bisection, or at once where
        they are `near` many: beginnings that many prompts share were sent to many instances.
        """
        known, low, high = self._turns, 0, len(keys)
        if not keys or keys[0] not in known:
            return 0
        if 0 < near <= high and keys[near - 1] in known:
            if near == high or keys[near] not in known:
                return near
            low = near + 1
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if keys[middle] in known else (low, middle)
        return low

    def clear(self) -> None:
        """Drops all pages: the instance has restarted."""
        self._turns.clear()
        self._prompts.clear()
        self._num_recorded = 0

    def _drop_oldest(self, most: int) -> None:
        """Drops up to `most` pages of the oldest prompt, its last ones first."""
        turn, keys = self._prompts.popleft()
        first = self._shared_with_later(turn, keys)
        stop = max(first, len(keys) - most)
        for key in keys[stop:]:
            del self._turns[key]
        self._num_recorded -= len(keys)
        if stop > first:
            self._prompts.appendleft((turn, keys[first:stop]))
            self._num_recorded += stop - first

    def _sweep(self) -> None:
        """Drops pages that later prompts have too, so that repeated prompts take no memory."""
        left = [(turn, keys[self._shared_with_later(turn, keys) :]) for turn, keys in self._prompts]
        self._prompts = collections.deque((turn, keys) for turn, keys in left if keys)
        self._num_recorded = len(self._turns)

    def _shared_with_later(self, turn: int, keys: tuple[bytes, ...]) -> int:
        """Returns how many leading pages of a prompt later ones have too."""
        turns, low, high = self._turns, 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if turns.get(keys[middle]) == turn else (middle + 1, high)
        return low


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
        return _overlap(keys, self._keys)


def _overlap(keys: Sequence[bytes], known: Container[bytes]) -> int:
    for i, key in enumerate(keys):
        if key not in known:
            return i
    return len(keys)


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
