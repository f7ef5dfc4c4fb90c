"""Which pages of prompts were sent where: without further reports it says where a prefix is cached. Imports no jax."""

import collections
from collections.abc import Sequence

MAX_SENT_PAGES = 65_536
"""Pages that are kept per instance: 4 million tokens."""


class SentPages:
    """The pages that were sent to an instance or engine, newest last: it may have cached them.

    A `limit` of 0 keeps none.
    """

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
        """Drops all pages: the receiver has restarted."""
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
