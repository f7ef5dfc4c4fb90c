"""What a follower does about pages: it keeps those that leave its devices, and loads those that come back."""

import jax
import msgspec
import numpy as np

from dsv3.engine.job import Tell
from dsv3.engine.jobs.page_command import Copy, PagesCommand, value_rows
from dsv3.engine.jobs.page_tiers import Opened, open_tiers
from dsv3.engine.parts import Parts
from dsv3.kv_cache.tiers.ordered import Happened, OrderedTiers
from dsv3.kv_cache.tiers.orders import Order


class PagesAside:
    """The tiers of this process, as the leader's commands have them used."""

    def __init__(self, parts: Parts, tell: Tell) -> None:
        happened = Happened()
        self.opened: Opened = open_tiers(parts, happened, jax.process_index())
        self._ordered = OrderedTiers(self.opened.tiers, happened, tell)

    def prepared(self, command: PagesCommand) -> PagesCommand:
        """Begins what the leader has ordered; returns the command with the values that it names."""
        self._ordered.begin(_orders(command))
        return msgspec.structs.replace(command, into=[self._with_values(copy) for copy in command.into])

    def take(self, command: PagesCommand, results: list[np.ndarray]) -> None:
        """Keeps what has left the devices of this process."""
        arrays = iter(results)
        for keys in (keys for copy in command.out for keys in copy.keys.values()):
            self.opened.tiers.keep(keys, value_rows(next(arrays), len(keys)))
        self._ordered.end(_orders(command))

    def _with_values(self, copy: Copy) -> Copy:
        values = {rank: self._ordered.taken(number) for rank, number in copy.loads.items()}
        return msgspec.structs.replace(copy, values=values)


def _orders(command: PagesCommand) -> list[Order]:
    return command.orders.get(0, [])  # of the part that this process gets, the first rank is its own
