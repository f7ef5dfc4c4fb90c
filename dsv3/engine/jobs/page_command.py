"""Which pages the devices of an instance copy in a step, and what the tiers of its processes are to do meanwhile."""

from collections.abc import Mapping
from typing import Self

import msgspec
import numpy as np

from dsv3.engine.job import Command
from dsv3.kv_cache.keys import Key
from dsv3.kv_cache.tiers.hosts import Order


class Copy(Command, frozen=True):
    """Pages of each rank to copy at once, -1 in padding.

    Pages that leave have `keys`. Pages that come have `values` where the process that schedules has loaded them, and
    the number of a load where another one has: that of the rank.
    """

    pages: np.ndarray  # [ranks, bucket] int32
    keys: dict[int, list[Key]] = msgspec.field(default_factory=dict)
    values: dict[int, np.ndarray] = msgspec.field(default_factory=dict)  # uint8 [bucket, bytes of a page]
    loads: dict[int, int] = msgspec.field(default_factory=dict)

    def part(self, ranks: range) -> Self:
        """Returns what a process with `ranks` needs of it, ranks counted from its first one."""
        pages, keys = self.pages[ranks.start : ranks.stop], _part(self.keys, ranks)
        return type(self)(pages, keys, _part(self.values, ranks), _part(self.loads, ranks))


class PagesCommand(Command, frozen=True):
    """Copies out, then copies in. `orders` are those to each process but the first, by its first rank."""

    out: list[Copy]
    into: list[Copy]
    orders: dict[int, list[Order]] = msgspec.field(default_factory=dict)

    def part(self, ranks: range) -> Self:
        """Returns what a process with `ranks` needs of it, ranks counted from its first one."""
        out, into = ([copy.part(ranks) for copy in copies] for copies in (self.out, self.into))
        return type(self)(out, into, _part(self.orders, ranks))


def _part[T](by_rank: Mapping[int, T], ranks: range) -> dict[int, T]:
    return {rank - ranks.start: each for rank, each in by_rank.items() if rank in ranks}


def value_rows(result: np.ndarray, count: int) -> np.ndarray:
    """Returns the first `count` values of a copy's result `[1, n, ...]` as bytes, uint8 `[count, bytes of a page]`."""
    return result.reshape(result.shape[1], -1).view(np.uint8)[:count]
