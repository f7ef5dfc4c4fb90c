"""Which ranks can find a page: the prefix indexes of all ranks by key, so that one look-up asks them all."""

from collections.abc import Iterable, Sequence

import numpy as np

from dsv3.kv_cache.keys import Key


class Holders:
    """Key to a bit mask of ranks. The ranks' prefix indexes keep it."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks_of: dict[Key, int] = {}

    def add(self, keys: Iterable[Key], rank: int) -> None:
        """Notes that a rank can find these pages."""
        ranks_of, mine = self._ranks_of, 1 << rank
        for key in keys:
            ranks_of[key] = ranks_of.get(key, 0) | mine

    def remove(self, keys: Iterable[Key], rank: int) -> None:
        """Notes that a rank can find these pages no longer."""
        ranks_of, mine = self._ranks_of, 1 << rank
        for key in keys:
            ranks = ranks_of.get(key)
            if ranks == mine:  # most pages are on one rank
                del ranks_of[key]
            elif ranks is not None:
                ranks_of[key] = ranks & ~mine

    def depths(self, keys: Sequence[Key]) -> np.ndarray | None:
        """Returns how many of the first `keys` each rank can find, `[X]` int64; None where none finds the first."""
        alive = self._ranks_of.get(keys[0], 0) if keys else 0
        if not alive:
            return None
        depths, ranks_of = np.zeros(self._num_ranks, np.int64), self._ranks_of
        for depth, key in enumerate(keys):
            still = alive & ranks_of.get(key, 0)
            if still != alive:
                _set(depths, alive & ~still, depth)
                alive = still
                if not alive:
                    return depths
        _set(depths, alive, len(keys))
        return depths


def _set(depths: np.ndarray, ranks: int, depth: int) -> None:
    while ranks:
        lowest = ranks & -ranks
        depths[lowest.bit_length() - 1] = depth
        ranks ^= lowest
