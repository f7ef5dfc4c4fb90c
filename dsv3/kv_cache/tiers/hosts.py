"""Offload tiers of all processes of an instance: which serves a rank, orders to the followers' tiers, their reports.

The process that schedules has a `RemoteTiers` for each other process, which queues orders and receives reports; there
an `OrderExecutor` executes the orders. Keys and numbers travel; payloads never do. Orders are part of a step's
commands, so each process gets them in one order.

What is known of another host's memory may be outdated. Then a load misses and the page is computed, or a page is
computed that was stored there.
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

from dsv3.kv_cache.events import EventQueue, EventSource, Medium, PageEvent, Removed, Stored
from dsv3.kv_cache.page_keys import Key
from dsv3.kv_cache.tiers.counts import TierCounts, total
from dsv3.kv_cache.tiers.tiers import HostTiers, Lookup, PageBatch, RemoteBatch, Tiers

# Limits of one report: at most 36 MB, of the 64 MiB that fit a frame. A host pool that is recovered reports all keys.
_MAX_EVENTS, _MAX_KEYS = 256, 4096
_log = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True):
    """An order of the process that schedules to the tiers of another one.

    - load: a batch of `bucket` rows, kept under the number until a command or a drop names it;
    - lookup: how many leading pages the store has;
    - fetch: pages of the instance at `address` into host memory;
    - drop: a loaded batch;
    - suspend_store: do not use the store for a while;
    - invalidate: delete pages whose content is wrong, after those that earlier steps have offloaded;
    - clear: empty the host memory, after what earlier steps have offloaded.
    """

    work: Literal["load", "lookup", "fetch", "drop", "suspend_store", "invalidate", "clear"]
    number: int = -1
    keys: list[Key] = []
    bucket: int = 0
    address: str = ""


class OrderResult(msgspec.Struct, frozen=True, tag=True):
    """The result of the order with this number: how many leading pages."""

    number: int
    count: int


class Change(msgspec.Struct, frozen=True, tag=True):
    """Pages that a tier has stored or removed."""

    medium: Medium
    is_stored: bool
    keys: list[Key]


class TierReport(msgspec.Struct, frozen=True):
    """Events since the last report, in order; the totals of each tier, and its bytes per second."""

    events: list[OrderResult | Change]
    counts: dict[str, TierCounts]
    rates: dict[str, float]


_decoder = msgspec.msgpack.Decoder(TierReport)


class Hosts:
    """The tiers of all processes in order, each for `ranks_each` ranks."""

    def __init__(self, tiers: Sequence[HostTiers], ranks_each: int) -> None:
        self._tiers, self._ranks_each = tuple(tiers), ranks_each

    def of(self, rank: int) -> HostTiers:
        return self._tiers[rank // self._ranks_each]

    def nearest(self, ranks: Iterator[int]) -> HostTiers | None:
        """Returns the tiers of the first of `ranks`; None without one."""
        rank = next(ranks, None)
        return None if rank is None else self.of(rank)

    def depths(self, keys: Sequence[Key], lookup: Lookup | None) -> np.ndarray | None:
        """Returns how many leading `keys` each rank's host memory has, `[X]` int64; None where none has the first.

        The host of the `lookup` also counts what it has found.
        """
        depths = [tiers.num_in_host_memory(keys) for tiers in self._tiers]
        if lookup is not None:
            host = self._tiers.index(lookup.tiers)
            depths[host] = max(depths[host], min(lookup.num_found, len(keys)))
        return np.repeat(depths, self._ranks_each) if any(depths) else None

    def clear(self) -> None:
        for tiers in self._tiers:
            tiers.clear()

    def counts(self) -> dict[str, TierCounts]:
        """Returns the statistics by tier, summed over all hosts; any thread may call."""
        counts = [tiers.counts() for tiers in self._tiers]
        return {name: total([each[name] for each in counts if name in each]) for name in counts[0]}

    @property
    def has_orders(self) -> bool:
        """Whether orders to other processes are waiting."""
        return any(tiers.has_orders for tiers in self._tiers)


class _RemoteLoad(Future[RemoteBatch]):
    """A batch that has been ordered under a number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class RemoteTiers(HostTiers):
    """Tiers of another process, configured as those of this one, `like`; methods queue orders for it.

    `events` receives the page events of its `ranks`. Any one thread may call `on_report`.
    """

    _orders_wait = True

    def __init__(self, like: Tiers, events: EventQueue | None, ranks: range) -> None:
        settings = like.payload_bytes, like.buckets, like.page_size, like.now, like.compute_rate
        super().__init__(*settings, like.is_store_configured, like.can_fetch, like.window_parts)
        self._like, self._events, self._ranks = like, events, ranks
        self._keys: set[Key] = set()
        self._orders: list[Order] = []
        self._numbers = itertools.count()
        self._on_result: dict[int, Callable[[int], None]] = {}  # by the number of an order without a result
        self._counts: dict[str, TierCounts] = {}

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def pop_orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def lacks(self, key: Key) -> bool:
        """Returns whether a page is not in the other host's memory, by its reports."""
        return key not in self._keys

    def invalidate(self, keys: Sequence[Key]) -> None:
        self._keys.difference_update(keys)
        self._orders.append(Order("invalidate", keys=list(keys)))

    def clear(self) -> None:
        self._keys.clear()
        self._orders.append(Order("clear"))

    def suspend_store(self) -> None:
        super().suspend_store()
        self._orders.append(Order("suspend_store"))

    def begin_load(self, keys: Sequence[Key], bucket: int) -> Future[RemoteBatch]:
        load = _RemoteLoad(next(self._numbers))
        self._on_result[load.number] = lambda count: load.set_result(RemoteBatch(load.number, bucket, count))
        self._orders.append(Order("load", load.number, list(keys), bucket))
        return load

    def drop(self, load: "Future[PageBatch] | Future[RemoteBatch]") -> None:
        assert isinstance(load, _RemoteLoad)
        self._on_result.pop(load.number, None)
        self._orders.append(Order("drop", load.number))

    def begin_lookup(self, keys: Sequence[Key]) -> Future[int]:
        number, result = self._new_result()
        self._orders.append(Order("lookup", number, list(keys)))
        return result

    def begin_fetch(self, address: str, keys: Sequence[Key]) -> Future[int]:
        number, result = self._new_result()
        self._orders.append(Order("fetch", number, list(keys), address=address))
        return result

    def _new_result(self) -> tuple[int, Future[int]]:
        number, result = next(self._numbers), Future[int]()
        self._on_result[number] = result.set_result
        return number, result

    def counts(self) -> dict[str, TierCounts]:
        own = {"host": self.host, "store": self.store, "peer": self.peer}
        return {name: dataclasses.replace(counts, queries=own[name].queries) for name, counts in self._counts.items()}

    def on_report(self, body: bytes) -> None:
        """Processes a report of the other process. Raises msgspec.MsgspecError where `body` is not a `TierReport`."""
        report = _decoder.decode(body)
        self._counts = report.counts
        for name, rate in report.rates.items():
            self._rates[name].update(rate, 1.0)
        for each in report.events:
            if isinstance(each, Change):
                self._on_change(each)
            elif (on_result := self._on_result.pop(each.number, None)) is not None:
                on_result(each.count)
        self._like.wake()

    def _on_change(self, change: Change) -> None:
        if change.medium == "CPU":
            (self._keys.update if change.is_stored else self._keys.difference_update)(change.keys)
        if self._events is not None:
            source = EventSource(self._events, change.medium, self._ranks)
            (source.stored if change.is_stored else source.removed)(change.keys)


class TierEvents(EventQueue):
    """A queue of tier events until a thread reports them; none is dropped, since the leader mirrors the host's keys."""

    def __init__(self) -> None:
        super().__init__(0)
        self.waiting: queue.SimpleQueue[OrderResult | Change] = queue.SimpleQueue()

    def append(self, event: PageEvent) -> None:
        if isinstance(event, Stored | Removed):
            for keys in itertools.batched(event.keys, _MAX_KEYS):
                self.waiting.put(Change(event.medium, isinstance(event, Stored), list(keys)))

    def pop_batch(self) -> list[OrderResult | Change]:
        """Waits for an event, and returns those that are queued."""
        batch = [self.waiting.get()]
        while len(batch) < _MAX_EVENTS and not self.waiting.empty():
            batch.append(self.waiting.get())
        return batch


class OrderExecutor:
    """Executes orders on `tiers`, whose host pool and store append to `events`. `send` sends a report and never waits.

    One thread calls `execute_before_step` and `pop_payloads`, one calls `execute_after_step`.
    """

    def __init__(self, tiers: Tiers, events: TierEvents, send: Callable[[bytes], None]) -> None:
        self.tiers, self._events, self._send = tiers, events, send
        self._loads: dict[int, Future[PageBatch]] = {}
        threading.Thread(target=self._send_reports, name="kv-report", daemon=True).start()

    def execute_before_step(self, orders: Iterable[Order]) -> None:
        """Starts the orders that belong before a step's launch; waits for nothing."""
        for order in orders:
            match order.work:
                case "load":
                    self._loads[order.number] = load = self.tiers.begin_load(order.keys, order.bucket)
                    self._report_result(order.number, load, lambda batch: batch.num_pages)
                case "lookup":
                    self._report_result(order.number, self.tiers.begin_lookup(order.keys), int)
                case "fetch":
                    self._report_result(order.number, self.tiers.begin_fetch(order.address, order.keys), int)
                case "drop":
                    if (dropped := self._loads.pop(order.number, None)) is not None:
                        dropped.cancel()
                case "suspend_store":
                    self.tiers.suspend_store()

    def pop_payloads(self, number: int) -> np.ndarray:
        """Returns and releases the payloads of a loaded batch, uint8 `[bucket, payload_bytes]`."""
        return self._loads.pop(number).result(0).payloads

    def execute_after_step(self, orders: Iterable[Order]) -> None:
        """Executes the orders that belong after a step's results."""
        for order in orders:
            match order.work:
                case "invalidate":
                    self.tiers.invalidate(order.keys)
                case "clear":
                    self.tiers.clear()

    def _report_result(self, number: int, work: "Future[Any]", count: Callable[[Any], int]) -> None:
        """Reports how many pages an order gave once it is done; 0 where it failed."""

        def done(future: "Future[Any]") -> None:
            if future.cancelled():
                return
            if (error := future.exception()) is not None:
                _log.error("pages could not be loaded; they are computed", exc_info=error)
            num_pages = 0 if error is not None else count(future.result())
            if not num_pages:
                self._loads.pop(number, None)  # no command will name it
            self._events.waiting.put(OrderResult(number, num_pages))

        work.add_done_callback(done)

    def _send_reports(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        while True:
            events = self._events.pop_batch()
            self._send(encoder.encode(TierReport(events, self.tiers.counts(), self.tiers.rates)))
