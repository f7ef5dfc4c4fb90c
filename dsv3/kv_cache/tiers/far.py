"""The tiers of another process, as the one that schedules knows them: it orders, and hears what has come of it.

What is known of the other host's memory may be late. Then a page is loaded that has gone, comes as a miss and is
computed; or one is computed that was there.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from dsv3.kv_cache.events.record import Record, Watch
from dsv3.kv_cache.keys import Key
from dsv3.kv_cache.tiers.counts import TierCounts
from dsv3.kv_cache.tiers.orders import Bring, Change, Clear, Count, Drop, Forget, Load, Order, Rest, Told
from dsv3.kv_cache.tiers.tiers import Batch, FarBatch, HostTiers, Tiers

_decoder = msgspec.msgpack.Decoder(Told)


class _Load(Future[FarBatch]):
    """A batch that has been ordered under a number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class FarTiers(HostTiers):
    """Tiers of another process, opened as those of this one, `like`. The engine's thread asks, and takes the orders.

    `events` hears what the other process tells of its `ranks`; `hear` may be called by any one thread.
    """

    _orders_wait = True

    def __init__(self, like: Tiers, events: Record | None, ranks: range) -> None:
        super().__init__(like.value_bytes, like.buckets, like.page_size, like.now, like.compute_rate)
        self._like, self._events, self._ranks = like, events, ranks
        self._keys: set[Key] = set()
        self._orders: list[Order] = []
        self._numbers = itertools.count()
        self._finish: dict[int, Callable[[int], None]] = {}  # by the number of an order without an answer
        self._counts: dict[str, TierCounts] = {}

    @property
    def stores(self) -> bool:
        """Whether there is a store."""
        return self._like.stores

    @property
    def fetches(self) -> bool:
        """Whether other instances can be asked."""
        return self._like.fetches

    @property
    def has_orders(self) -> bool:
        """Whether the other process is still to be told what to do."""
        return bool(self._orders)

    def take_orders(self) -> list[Order]:
        """Returns what the other process is to do, once."""
        orders, self._orders = self._orders, []
        return orders

    def lacks(self, key: Key) -> bool:
        """Returns whether a page is not in the host's memory, as far as it has been told."""
        return key not in self._keys

    def forget(self, keys: Sequence[Key]) -> None:
        """Drops pages whose content cannot be trusted."""
        self._keys.difference_update(keys)
        self._orders.append(Forget(list(keys)))

    def clear(self) -> None:
        """Empties the host's memory; a store, which others may share, stays as it is."""
        self._keys.clear()
        self._orders.append(Clear())

    def rest(self) -> None:
        """Leaves the store alone for a while: it has kept somebody waiting too long."""
        super().rest()
        self._orders.append(Rest())

    def begin_load(self, keys: Sequence[Key], bucket: int) -> Future[FarBatch]:
        """Orders a batch."""
        load = _Load(next(self._numbers))
        self._finish[load.number] = lambda count: load.set_result(FarBatch(load.number, bucket, count))
        self._orders.append(Load(load.number, list(keys), bucket))
        return load

    def drop(self, load: "Future[Batch] | Future[FarBatch]") -> None:
        """Gives up a batch that nobody wants any more."""
        assert isinstance(load, _Load)
        self._finish.pop(load.number, None)
        self._orders.append(Drop(load.number))

    def begin_count(self, keys: Sequence[Key]) -> Future[int]:
        """Orders to ask the store how many pages it holds, from the first on."""
        number, answer = self._question()
        self._orders.append(Count(number, list(keys)))
        return answer

    def begin_bring(self, address: str, keys: Sequence[Key]) -> Future[int]:
        """Orders to bring another instance's pages to the host's memory; gives how many, from the first on."""
        number, answer = self._question()
        self._orders.append(Bring(number, list(keys), address))
        return answer

    def _question(self) -> tuple[int, Future[int]]:
        number, answer = next(self._numbers), Future[int]()
        self._finish[number] = answer.set_result
        return number, answer

    def counts(self) -> dict[str, TierCounts]:
        """Returns what each tier has counted; any thread may ask."""
        own = {"host": self.host, "store": self.store, "peer": self.peer}
        return {name: dataclasses.replace(told, queries=own[name].queries) for name, told in self._counts.items()}

    def hear(self, body: bytes) -> None:
        """Takes in what the other process tells. Raises msgspec.MsgspecError for what is no `Told`."""
        told = _decoder.decode(body)
        self._counts = told.counts
        for name, rate in told.rates.items():
            self._rates[name].note(rate, 1.0)
        for each in told.happened:
            if isinstance(each, Change):
                self._change(each)
            elif (finish := self._finish.pop(each.number, None)) is not None:
                finish(each.count)
        self._like.wake()

    def _change(self, change: Change) -> None:
        if change.medium == "CPU":
            (self._keys.update if change.is_stored else self._keys.difference_update)(change.keys)
        if self._events is not None:
            watch = Watch(self._events, change.medium, self._ranks)
            (watch.stored if change.is_stored else watch.removed)(change.keys)
