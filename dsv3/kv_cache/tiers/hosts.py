"""The tiers of all processes of an instance: which serves a rank, what it is ordered to do, and what it says of itself.

The process that schedules knows the tiers of the others as `RemoteTiers`, which order and hear what has come of it;
there `OrderedTiers` carry orders out. Keys and numbers travel; values never do. Orders are in a step's commands, so
each process gets them in one order.

What is known of another host's memory may be late. Then a page is loaded that has gone, comes as a miss and is
computed; or one is computed that was there.
"""

import dataclasses
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import msgspec
import numpy as np

from dsv3.kv_cache.events import EventQueue, EventSource, Medium, Note, Removed, Stored
from dsv3.kv_cache.page_keys import Key
from dsv3.kv_cache.tiers.counts import TierCounts, total
from dsv3.kv_cache.tiers.tiers import HostTiers, Lookup, PageBatch, RemoteBatch, Tiers

# One message tells so many things, and each so many keys: at most 36 MB, of the 64 MiB that fit a frame. A memory that
# is found again at the start tells all of its keys.
_MOST_AT_ONCE, _MOST_KEYS = 256, 4096
_log = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True):
    """What the process that schedules has the tiers of another one do.

    - load: a batch of `bucket` rows, kept under the number until a command or a drop names it;
    - count: how many pages the store holds, from the first on;
    - bring: pages of the instance at `address` to the host's memory;
    - drop: a batch that nobody wants any more;
    - rest: leave the store alone for a while;
    - forget: pages that cannot be trusted, behind those that earlier steps have given;
    - clear: the host's memory, behind what earlier steps have given.
    """

    work: Literal["load", "count", "bring", "drop", "rest", "forget", "clear"]
    number: int = -1
    keys: list[Key] = []
    bucket: int = 0
    address: str = ""


class OrderResult(msgspec.Struct, frozen=True, tag=True):
    """What has come of the order with a number: so many pages, from the first on."""

    number: int
    count: int


class Change(msgspec.Struct, frozen=True, tag=True):
    """Pages that a tier has stored, or removed."""

    medium: Medium
    is_stored: bool
    keys: list[Key]


class TierReport(msgspec.Struct, frozen=True):
    """What has happened since the last message, in order; the totals of each tier, and its bytes per second."""

    happened: list[OrderResult | Change]
    counts: dict[str, TierCounts]
    rates: dict[str, float]


_decoder = msgspec.msgpack.Decoder(TierReport)


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

    def depths(self, keys: Sequence[Key], lookup: Lookup | None) -> np.ndarray | None:
        """Returns how many of the first `keys` each rank's tiers have, `[X]` int64; None where none has the first.

        A look-up speaks for the tiers that were asked.
        """
        depths = [tiers.leading(keys) for tiers in self._tiers]
        if lookup is not None:
            asked = self._tiers.index(lookup.tiers)
            depths[asked] = max(depths[asked], min(lookup.found, len(keys)))
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


class _OrderedLoad(Future[RemoteBatch]):
    """A batch that has been ordered under a number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class RemoteTiers(HostTiers):
    """Tiers of another process, opened as those of this one, `like`. The engine's thread asks, and takes the orders.

    `events` hears what the other process tells of its `ranks`; `hear` may be called by any one thread.
    """

    _orders_wait = True

    def __init__(self, like: Tiers, events: EventQueue | None, ranks: range) -> None:
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
        self._orders.append(Order("forget", keys=list(keys)))

    def clear(self) -> None:
        """Empties the host's memory; a store, which others may share, stays as it is."""
        self._keys.clear()
        self._orders.append(Order("clear"))

    def rest(self) -> None:
        """Leaves the store alone for a while: it has kept somebody waiting too long."""
        super().rest()
        self._orders.append(Order("rest"))

    def begin_load(self, keys: Sequence[Key], bucket: int) -> Future[RemoteBatch]:
        """Orders a batch."""
        load = _OrderedLoad(next(self._numbers))
        self._finish[load.number] = lambda count: load.set_result(RemoteBatch(load.number, bucket, count))
        self._orders.append(Order("load", load.number, list(keys), bucket))
        return load

    def drop(self, load: "Future[PageBatch] | Future[RemoteBatch]") -> None:
        """Gives up a batch that nobody wants any more."""
        assert isinstance(load, _OrderedLoad)
        self._finish.pop(load.number, None)
        self._orders.append(Order("drop", load.number))

    def begin_count(self, keys: Sequence[Key]) -> Future[int]:
        """Orders to ask the store how many pages it holds, from the first on."""
        number, answer = self._question()
        self._orders.append(Order("count", number, list(keys)))
        return answer

    def begin_bring(self, address: str, keys: Sequence[Key]) -> Future[int]:
        """Orders to bring another instance's pages to the host's memory; gives how many, from the first on."""
        number, answer = self._question()
        self._orders.append(Order("bring", number, list(keys), address=address))
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
        """Takes in what the other process tells. Raises msgspec.MsgspecError for what is no `TierReport`."""
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
            watch = EventSource(self._events, change.medium, self._ranks)
            (watch.stored if change.is_stored else watch.removed)(change.keys)


class TierEvents(EventQueue):
    """What has happened to the tiers, until a thread tells it; nothing is lost, as a mirror is kept of it."""

    def __init__(self) -> None:
        super().__init__(0)
        self.waiting: queue.SimpleQueue[OrderResult | Change] = queue.SimpleQueue()

    def note(self, note: Note) -> None:
        """Has a change told."""
        if isinstance(note, Stored | Removed):
            for keys in itertools.batched(note.keys, _MOST_KEYS):
                self.waiting.put(Change(note.medium, isinstance(note, Stored), list(keys)))

    def take_all(self) -> list[OrderResult | Change]:
        """Waits for something, and returns what there is."""
        taken = [self.waiting.get()]
        while len(taken) < _MOST_AT_ONCE and not self.waiting.empty():
            taken.append(self.waiting.get())
        return taken


class OrderedTiers:
    """Carries orders out on `tiers`, whose arena and store tell `happened`. `tell` sends a message and never waits.

    One thread calls `begin` and `taken`, one calls `end`.
    """

    def __init__(self, tiers: Tiers, happened: TierEvents, tell: Callable[[bytes], None]) -> None:
        self.tiers, self._happened, self._send = tiers, happened, tell
        self._loads: dict[int, Future[PageBatch]] = {}
        threading.Thread(target=self._tell, name="kv-tell", daemon=True).start()

    def begin(self, orders: Iterable[Order]) -> None:
        """Begins what is ordered before a step's launch; waits for nothing."""
        for order in orders:
            match order.work:
                case "load":
                    self._loads[order.number] = load = self.tiers.begin_load(order.keys, order.bucket)
                    self._answer(order.number, load, lambda batch: batch.num_pages)
                case "count":
                    self._answer(order.number, self.tiers.begin_count(order.keys), int)
                case "bring":
                    self._answer(order.number, self.tiers.begin_bring(order.address, order.keys), int)
                case "drop":
                    if (dropped := self._loads.pop(order.number, None)) is not None:
                        dropped.cancel()
                case "rest":
                    self.tiers.rest()

    def taken(self, number: int) -> np.ndarray:
        """Returns the values of a batch that has been told of, uint8 `[bucket, value_bytes]`, and lets go of it."""
        return self._loads.pop(number).result(0).values

    def end(self, orders: Iterable[Order]) -> None:
        """Does what is ordered behind a step's results."""
        for order in orders:
            match order.work:
                case "forget":
                    self.tiers.forget(order.keys)
                case "clear":
                    self.tiers.clear()

    def _answer(self, number: int, work: "Future[Any]", count: Callable[[Any], int]) -> None:
        """Tells how much has come of an order once it is done; nothing where it failed."""

        def done(future: "Future[Any]") -> None:
            if future.cancelled():
                return
            if (error := future.exception()) is not None:
                _log.error("pages could not be loaded; they are computed", exc_info=error)
            came = 0 if error is not None else count(future.result())
            if not came:
                self._loads.pop(number, None)  # nobody will ask for it
            self._happened.waiting.put(OrderResult(number, came))

        work.add_done_callback(done)

    def _tell(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        while True:
            happened = self._happened.take_all()
            self._send(encoder.encode(TierReport(happened, self.tiers.counts(), self.tiers.rates)))
