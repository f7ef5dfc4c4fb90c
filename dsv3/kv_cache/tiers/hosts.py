"""The tiers of all processes of an instance: which of them serves a rank, and which is asked first."""

from collections.abc import Iterator, Sequence

import numpy as np

from dsv3.kv_cache.keys import Key
from dsv3.kv_cache.tiers.counts import TierCounts, total
from dsv3.kv_cache.tiers.tiers import HostTiers, LookUp


class Hosts:
    """One process's tiers after the other, each for `ranks_each` ranks."""

    def __init__(self, tiers: Sequence[HostTiers], ranks_each: int) -> None:
        self._tiers, self._ranks_each = tuple(tiers), ranks_each

    def of(self, rank: int) -> HostTiers:
        """Returns the tiers that serve a rank."""
        return self._tiers[rank // self._ranks_each]

    def nearest(self, ranks: Iterator[int]) -> HostTiers | None:
        """Returns the tiers of the first of `ranks`; None where there is none."""
        rank = next(ranks, None)
        return None if rank is None else self.of(rank)

    def depths(self, keys: Sequence[Key], look_up: LookUp | None) -> np.ndarray | None:
        """Returns how many of the first `keys` each rank's tiers have, `[X]` int64; None where none has the first.

        A look-up speaks for the tiers that were asked.
        """
        depths = [tiers.leading(keys) for tiers in self._tiers]
        if look_up is not None:
            asked = self._tiers.index(look_up.tiers)
            depths[asked] = max(depths[asked], min(look_up.found, len(keys)))
        return np.repeat(depths, self._ranks_each) if any(depths) else None

    def clear(self) -> None:
        """Empties the memory of all hosts."""
        for tiers in self._tiers:
            tiers.clear()

    def counts(self) -> dict[str, TierCounts]:
        """Returns what each tier has counted on all hosts together; any thread may ask."""
        counts = [tiers.counts() for tiers in self._tiers]
        return {name: total([each[name] for each in counts if name in each]) for name in counts[0]}

    @property
    def has_orders(self) -> bool:
        """Whether other processes are still to be told what to do."""
        return any(tiers.has_orders for tiers in self._tiers)
