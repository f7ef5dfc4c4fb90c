"""Which instance costs least, by what the router has sent there: `dsv3.scheduler.cost` over instances."""

import collections
import dataclasses
import random
from collections.abc import Container, Sequence

import numpy as np

from dsv3.scheduler.cost import Loads, costs, prefill_cost, with_backlog
from router.request import PAGE_TOKENS, Prompt

MAX_SENT_PAGES = 65_536
"""Pages that are remembered per instance: 4 million tokens."""


@dataclasses.dataclass
class InstanceLoad:
    """What an instance has to do for this router: cost of prompts without a token yet, tokens held, requests.

    Its `ranks` share that.
    """

    prefill: float = 0.0
    held: int = 0
    requests: int = 0
    ranks: int = 1


class SentPages:
    """The pages that went to an instance, newest last: it may have them in its cache. A `limit` of 0 remembers none."""

    def __init__(self, limit: int = MAX_SENT_PAGES):
        self._limit = limit
        self._turns: dict[bytes, int] = {}  # by page: of the prompt that was the last to have it
        self._prompts: collections.deque[tuple[int, tuple[bytes, ...]]] = collections.deque()  # by turn
        self._turn, self._noted = 0, 0  # of the last prompt; pages of all `_prompts`

    def __len__(self) -> int:
        return len(self._turns)

    def note(self, keys: Sequence[bytes]) -> None:
        """Remembers pages; the oldest ones are forgotten, and a prompt's last ones before its first.

        No page is moved on its own: an ordered dictionary took four times as long.
        """
        if not keys or not self._limit:
            return
        self._turn += 1
        self._turns.update(dict.fromkeys(keys, self._turn))
        self._prompts.append((self._turn, tuple(keys)))
        self._noted += len(keys)
        while len(self._turns) > self._limit:
            self._forget_oldest(len(self._turns) - self._limit)
        if self._noted > 2 * self._limit:
            self._sweep()

    def overlap(self, keys: Sequence[bytes], near: int = 0) -> int:
        """Returns how many pages of a prompt, from its first on, went there.

        A page is always newer than those behind it. So those that are known are a run, found by bisection, or at once
        where they are as many as `near`: what many prompts begin with has been sent to many instances.
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
        """Forgets all: the instance has begun anew."""
        self._turns.clear()
        self._prompts.clear()
        self._noted = 0

    def _forget_oldest(self, most: int) -> None:
        """Forgets up to `most` pages of the oldest prompt, its last ones first."""
        turn, keys = self._prompts.popleft()
        first = self._renewed(turn, keys)
        stop = max(first, len(keys) - most)
        for key in keys[stop:]:
            del self._turns[key]
        self._noted -= len(keys)
        if stop > first:
            self._prompts.appendleft((turn, keys[first:stop]))
            self._noted += stop - first

    def _sweep(self) -> None:
        """Drops what later prompts have, too, so that prompts which come again take no room."""
        left = [(turn, keys[self._renewed(turn, keys) :]) for turn, keys in self._prompts]
        self._prompts = collections.deque((turn, keys) for turn, keys in left if keys)
        self._noted = len(self._turns)

    def _renewed(self, turn: int, keys: tuple[bytes, ...]) -> int:
        """Returns how many of a prompt's pages later ones have, too: its first ones."""
        turns, low, high = self._turns, 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if turns.get(keys[middle]) == turn else (middle + 1, high)
        return low


class InFlightPrompts:
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


def choose(
    prompt: Prompt, loads: Sequence[InstanceLoad], pages: Sequence[int], *, decodes: bool, chance: random.Random
) -> int:
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
