"""The tiers below the devices, as the engine's thread uses them: it asks and never waits; threads copy and verify.

The host's memory is the gateway. What leaves a device goes there and, where there is a store, on to it. What comes back
from the store goes there too. Each process of an instance has tiers of its own, for the ranks of its devices.
"""

import abc
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from dsv3.kv_cache.page_keys import Key
from dsv3.kv_cache.tiers.counts import Rate, TierCounts, loading_pays
from dsv3.kv_cache.tiers.host_pool import HostPool, Staging
from dsv3.kv_cache.tiers.store import PageStore
from dsv3.kv_cache.transfer.client import Peers

LOOK_UP_S = 0.5
"""A store that has not said by then what it holds is taken to hold nothing."""
LOAD_S = 20.0
"""A batch that has not come by then is computed instead."""

FETCH_S = 60.0
"""Another instance that has not given all pages by then has given what it has."""
PATIENCE_S = 5.0
"""So long another instance may wait for each page that it is still computing."""

_LOAD_THREADS = 4  # that read the host's memory; as many read the store, and as many ask it
_FETCH_THREADS = 8
_BATCHES_AHEAD = 2  # of one prefix: one on its way to the device, one being read
_MOST_BATCHES = 16  # of all of them
_MOST_QUESTIONS = 1024  # that a store has not answered
_BACKLOG_BYTES = 2**29
_REST_S = 60.0  # a store that has kept somebody waiting too long is left alone for so long
_log = logging.getLogger(__name__)


class PageBatch(NamedTuple):
    """Values on their way to a device: the first `num_pages` rows of `values`, uint8 `[bucket, value_bytes]`."""

    values: np.ndarray
    num_pages: int

    @property
    def bucket(self) -> int:
        """Rows, padding included."""
        return len(self.values)


class RemoteBatch(NamedTuple):
    """Values that another process has loaded, and keeps under a number until a command asks for them."""

    number: int
    bucket: int
    num_pages: int


@dataclasses.dataclass
class Lookup:
    """A question: how many of a request's keys, from `first` on, the store holds or another instance has given.

    `tiers` are those that were asked; one request may ask twice, at two hosts. A store that does not answer in time is
    left alone where this `rests` it.
    """

    tiers: "HostTiers"
    first: int
    answer: Future[int]
    bound_s: float
    rests: bool = False
    is_second: bool = False

    def __post_init__(self) -> None:
        self._asked = self.tiers.now()

    @property
    def is_over(self) -> bool:
        """Whether there is an answer, or has been time enough."""
        return self.answer.done() or self.tiers.now() - self._asked > self.bound_s

    def end(self) -> None:
        """Notes that nobody waits for an answer any more."""
        if self.rests and not self.answer.done():
            self.tiers.rest()

    @property
    def found(self) -> int:
        """How many keys of the request, from its first on, the look-up has found; ask when `is_over`."""
        if not self.answer.done():
            return self.first
        if (error := self.answer.exception()) is not None:
            _log.error("a tier could not say what it has", exc_info=error)
            return self.first
        return self.first + self.answer.result()


class HostTiers(abc.ABC):
    """Pages of `page_size` tokens and `value_bytes` bytes in a process's tiers, as the engine's thread asks for them.

    `buckets` are the numbers of pages, ascending, that go to or from a device at once. `compute_rate` is in prompt
    tokens per second.
    """

    _orders_wait = False  # for a step: then a late answer says nothing about a store

    def __init__(
        self, value_bytes: int, buckets: Sequence[int], page_size: int, now: Callable[[], float], compute_rate: Rate
    ) -> None:
        self.value_bytes, self.buckets, self.page_size, self.now = value_bytes, tuple(buckets), page_size, now
        self.compute_rate = compute_rate
        self._resting_until = 0.0
        self.batches_under_way = 0
        self._questions: set[Future[int]] = set()  # that the store has not answered
        self.host, self.store, self.peer = TierCounts(), TierCounts(), TierCounts()
        self._rates = {"host": Rate(now), "store": Rate(now), "peer": Rate(now)}

    @abc.abstractmethod
    def lacks(self, key: Key) -> bool:
        """Returns whether a page is not in the host's memory."""

    @abc.abstractmethod
    def forget(self, keys: Sequence[Key]) -> None:
        """Drops pages whose content cannot be trusted."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Empties the host's memory; a store, which others may share, stays as it is."""

    @abc.abstractmethod
    def counts(self) -> dict[str, TierCounts]:
        """Returns what each tier has counted; any thread may ask."""

    @abc.abstractmethod
    def drop(self, load: "Future[PageBatch] | Future[RemoteBatch]") -> None:
        """Gives up a batch that nobody wants any more."""

    @property
    @abc.abstractmethod
    def stores(self) -> bool:
        """Whether there is a store."""

    @property
    @abc.abstractmethod
    def fetches(self) -> bool:
        """Whether other instances can be asked."""

    @abc.abstractmethod
    def begin_load(self, keys: Sequence[Key], bucket: int) -> "Future[PageBatch] | Future[RemoteBatch]":
        """Has a thread load a batch, as far as there is one."""

    @abc.abstractmethod
    def begin_count(self, keys: Sequence[Key]) -> Future[int]:
        """Has a thread ask the store how many pages it holds, from the first on."""

    @abc.abstractmethod
    def begin_bring(self, address: str, keys: Sequence[Key]) -> Future[int]:
        """Has a thread bring another instance's pages to the host's memory; gives how many, from the first on."""

    def of(self, rank: int) -> "HostTiers":
        """Returns the tiers that serve a rank: these, which serve all of the process."""
        return self

    def nearest(self, ranks: Iterator[int]) -> "HostTiers | None":
        """Returns the tiers of the first of `ranks`; these without a look at it, since they serve all."""
        return self

    def depths(self, keys: Sequence[Key], lookup: Lookup | None) -> np.ndarray | None:
        """Returns how many of the first `keys` a look-up has found, `[]` for all ranks alike; None without one.

        What lies in the host's memory speaks for no rank, as all can have it.
        """
        return None if lookup is None else np.array(min(lookup.found, len(keys)))

    @property
    def has_orders(self) -> bool:
        """Whether other processes are still to be told what to do."""
        return False

    @property
    def has_store(self) -> bool:
        """Whether there is a store that answers."""
        return self.stores and self.now() >= self._resting_until

    def leading(self, keys: Sequence[Key]) -> int:
        """Returns how many of `keys`, from the first on, are in the host's memory."""
        return next((i for i, key in enumerate(keys) if self.lacks(key)), len(keys))

    def note_query(self, pages: int) -> None:
        """Counts pages that a request would load if the tiers had them."""
        self.host.queries += pages * self.page_size

    def lookup(self, keys: Sequence[Key], first: int) -> Lookup | None:
        """Asks the store how many keys it holds from the first one on, behind `first`, that the host lacks.

        Returns None where there is nothing to ask, or too many questions wait.
        """
        first += self.leading(keys[first:])
        if first == len(keys) or not self.has_store or len(self._questions) >= _MOST_QUESTIONS:
            return None
        self.store.queries += (len(keys) - first) * self.page_size
        answer = self.begin_count(keys[first:])
        self._questions.add(answer)
        answer.add_done_callback(self._questions.discard)
        return Lookup(self, first, answer, LOOK_UP_S, rests=not self._orders_wait)

    def ask_peer(self, address: str, keys: Sequence[Key], first: int) -> Lookup | None:
        """Has another instance's pages brought to the host's memory: the keys from `first` on that it lacks.

        `address` is "host:port", or "host:port#meeting" where that instance is to be asked for a meeting's request.
        None where there is nothing to bring, or computing is faster; not asked of a meeting.
        """
        first += self.leading(keys[first:])
        count = len(keys) - first
        rate, compute = self._rates["peer"].value, self.compute_rate.value
        if not self.fetches or not count:
            return None
        is_met = "#" in address  # the other instance computes the prompt now, whatever is done here
        if not is_met and not loading_pays(count * self.page_size, count * self.value_bytes, rate, compute):
            return None
        self.peer.queries += count * self.page_size
        return Lookup(self, first, self.begin_bring(address, keys[first:]), FETCH_S)

    def within_reach(self, keys: Sequence[Key], first: int, found: int) -> int:
        """Returns how many keys from `first` on can be loaded; 0 where computing them is faster.

        A look-up has found the keys before `found`; those from there on may be in the host's memory.
        """
        stop = max(first, min(found, len(keys)))
        stop += self.leading(keys[stop:])
        count = stop - first
        rate = self._rates["host" if self.leading(keys[first:stop]) == count else "store"]
        pays = loading_pays(count * self.page_size, count * self.value_bytes, rate.value, self.compute_rate.value)
        return count if pays else 0

    def fetch(self, keys: Sequence[Key]) -> "Fetch":
        """Begins to load a run of pages that are `within_reach`."""
        return Fetch(self, keys, self.buckets)

    def submit_load(self, keys: Sequence[Key], bucket: int) -> "Future[PageBatch] | Future[RemoteBatch] | None":
        """Begins to load a batch; None where too many are under way."""
        if self.batches_under_way >= _MOST_BATCHES:
            return None
        self.batches_under_way += 1
        return self.begin_load(keys, bucket)

    def rest(self) -> None:
        """Leaves the store alone for a while: it has kept somebody waiting too long."""
        if self.has_store:
            _log.warning("the key-value store does not answer; it is left alone for %.0f s", _REST_S)
        self._resting_until = self.now() + _REST_S


class Tiers(HostTiers):
    """The tiers of this process, over `host_pool.value_bytes` bytes per page.

    One thread calls what `HostTiers` has. Any may call `keep`, `begin_load`, `begin_count`, `begin_bring`, `forget` and
    `clear`. `workers(count, name)` does what takes long, and `now` says the time; a simulator has its own
    (`tools.simulate.pages`). A store that hangs keeps its own threads, and holds up neither the host's memory nor, in a
    load, the questions of others.
    """

    def __init__(
        self,
        buckets: Sequence[int],
        host_pool: HostPool,
        store: PageStore | None = None,
        peers: Peers | None = None,
        workers: Callable[[int, str], Executor] = ThreadPoolExecutor,
        now: Callable[[], float] = time.monotonic,
        *,
        page_size: int,
    ) -> None:
        super().__init__(host_pool.value_bytes, buckets, page_size, now, Rate(now))
        self._host_pool, self._store, self._peers = host_pool, store, peers
        self._loaders, self._fetchers = workers(_LOAD_THREADS, "kv-load"), workers(_FETCH_THREADS, "kv-fetch")
        self._store_readers, self._askers = workers(_LOAD_THREADS, "kv-read"), workers(_LOAD_THREADS, "kv-ask")
        self._host_writer, self._store_writer = workers(1, "kv-host"), workers(1, "kv-store")
        self._backlog = {"host": 0, "store": 0}  # bytes that wait to be written
        self._staging = Staging()
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._complained = 0.0

    @property
    def stores(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    @property
    def fetches(self) -> bool:
        """Whether other instances can be asked."""
        return self._peers is not None

    @property
    def rates(self) -> dict[str, float]:
        """Bytes per second of each tier that has been measured lately."""
        return {name: value for name, rate in self._rates.items() if (value := rate.value) is not None}

    def lacks(self, key: Key) -> bool:
        """Returns whether a page is not in the host's memory."""
        return key not in self._host_pool

    def keep(self, keys: Sequence[Key], values: np.ndarray) -> None:
        """Takes pages from a device, uint8 `[n, value_bytes]`; drops them where too many wait to be written."""
        self._submit("host", self._host_writer, self._keep_in_host, keys, values)

    def forget(self, keys: Sequence[Key]) -> None:
        """Drops pages whose content cannot be trusted."""
        self._host_writer.submit(self._forget, list(keys))  # behind those that are still to be written

    def _forget(self, keys: list[Key]) -> None:
        for key in keys:
            self._host_pool.forget(key)
        if self._store is not None:
            self._store_writer.submit(self._guarded, self._store.delete, keys)

    def clear(self) -> None:
        """Empties the host's memory; a store, which others may share, stays as it is."""
        self._host_pool.clear()

    def wait(self, seconds: float) -> None:
        """Returns when something has been loaded or looked up since the last call, after `seconds` at most."""
        self._news.wait(seconds)
        self._news.clear()

    def wake(self) -> None:
        """Ends a `wait`."""
        self._news.set()

    def counts(self) -> dict[str, TierCounts]:
        """Returns what each tier has counted; any thread may ask."""
        host_pool, store = self._host_pool, self._store
        held = len(host_pool) * self.value_bytes
        host = dataclasses.replace(self.host, damaged=host_pool.damaged, evictions=host_pool.evictions, bytes_held=held)
        counts = {"host": host}
        if self._peers is not None:
            counts["peer"] = self._peers.counted(self.peer)
        if store is not None:
            counts["store"] = dataclasses.replace(
                self.store, damaged=store.damaged, evictions=store.evictions, bytes_held=store.bytes_held
            )
        return counts

    def begin_load(self, keys: Sequence[Key], bucket: int) -> Future[PageBatch]:
        """Has a thread load a batch, as far as there is one."""
        asks_store = self.has_store and self.leading(keys) < len(keys)
        return self._submit_work(
            self._store_readers if asks_store else self._loaders, self._load, keys, bucket, asks_store
        )

    def begin_count(self, keys: Sequence[Key]) -> Future[int]:
        """Has a thread ask the store how many pages it holds, from the first on."""
        return self._submit_work(self._askers, self._count, keys)

    def begin_bring(self, address: str, keys: Sequence[Key]) -> Future[int]:
        """Has a thread bring another instance's pages to the host's memory; gives how many, from the first on."""
        address, _, bootstrap_room = address.partition("#")
        if not bootstrap_room:
            return self._fetchers.submit(self._fetch, address, keys)
        assert self._peers is not None
        brought: Future[int] = Future()
        self._peers.find(address, int(bootstrap_room)).add_done_callback(
            lambda found: self._bring(found, keys, brought)
        )
        return brought

    def _bring(self, found: Future[str], keys: Sequence[Key], brought: Future[int]) -> None:
        """Has a thread bring pages from where they have been found, if they have."""
        if (error := found.exception()) is None:
            work = self._fetchers.submit(self._fetch, found.result(), keys, False)
        else:
            work = self._fetchers.submit(self._missed, error, keys)
        work.add_done_callback(lambda done: _hand_on(done, brought))

    def drop(self, load: "Future[PageBatch] | Future[RemoteBatch]") -> None:
        """Gives up a batch that nobody wants any more."""
        load.cancel()

    def _submit_work(self, threads: Executor, work: Callable, *arguments: Any) -> Future:
        """Has a thread do something whose result ends a `wait`."""
        future = threads.submit(work, *arguments)
        future.add_done_callback(lambda _: self.wake())
        return future

    def _load(self, keys: Sequence[Key], bucket: int, asks_store: bool) -> PageBatch:
        values = self._staging.rows(bucket, self.value_bytes)
        count = 0
        while count < len(keys):
            got = self._load_run(keys[count:], values[count : len(keys)], asks_store)
            if not got:
                break
            count += got
        return PageBatch(values, count)

    def _load_run(self, keys: Sequence[Key], out: np.ndarray, asks_store: bool) -> int:
        """Loads what one tier has of the next pages; returns how many."""
        started = self.now()
        got = 0
        while got < len(keys) and self._host_pool.get(keys[got], out[got]):
            got += 1
        tier, counts = "host", self.host
        if not got and asks_store and self._store is not None and self.has_store:
            stop = next((i for i, key in enumerate(keys) if i and key in self._host_pool), len(keys))
            got = self._guarded(self._store.get, keys[:stop], out[:stop]) or 0
            tier, counts = "store", self.store
            if got:
                self._submit("host", self._host_writer, self._put_in_host, keys[:got], out[:got])
        seconds = self.now() - started
        self._rates[tier].note(got * self.value_bytes, seconds)
        if got:
            with self._lock:
                counts.hits += got * self.page_size
                counts.note_load(got * self.value_bytes, seconds)
        return got

    def _fetch(self, address: str, keys: Sequence[Key], measures: bool = True) -> int:
        """Brings pages of another instance to the host's memory; returns how many, from the first on, are there.

        Where pages are waited for until they are computed, the time `measures` nothing of the way between the two.
        """
        assert self._peers is not None
        started, landed = self.now(), 0

        def land(key: Key, value: np.ndarray) -> None:
            nonlocal landed
            landed += 1
            self._host_pool.put(key, value)

        try:
            self._peers.fetch(address, [key for key in keys if key not in self._host_pool], PATIENCE_S, land)
        except OSError as error:
            self._note_failure(error)
        seconds = self.now() - started
        with self._lock:
            self.peer.hits += landed * self.page_size
            self.peer.note_load(landed * self.value_bytes, seconds)
        if measures:
            self._rates["peer"].note(landed * self.value_bytes, seconds)
        self.wake()
        return self.leading(keys)

    def _missed(self, error: BaseException, keys: Sequence[Key]) -> int:
        """Notes that pages were not found; returns how many, from the first on, are there all the same."""
        self._note_failure(error)
        self.wake()
        return self.leading(keys)

    def _note_failure(self, error: BaseException) -> None:
        self.peer.failures += 1
        self._complain("another instance does not give its pages", error)

    def _count(self, keys: Sequence[Key]) -> int:
        return 0 if self._store is None else self._guarded(self._store.count, keys) or 0

    def _put_in_host(self, keys: Sequence[Key], values: np.ndarray) -> None:
        started = self.now()
        kept = sum(self._host_pool.put(key, value) for key, value in zip(keys, values, strict=True))
        self.host.note_store(kept * self.value_bytes, self.now() - started)

    def _keep_in_host(self, keys: Sequence[Key], values: np.ndarray) -> None:
        self._put_in_host(keys, values)
        if self.has_store:
            self._submit("store", self._store_writer, self._keep_in_store, keys, values)

    def _keep_in_store(self, keys: Sequence[Key], values: np.ndarray) -> None:
        assert self._store is not None
        started = self.now()
        written = self._guarded(self._store.put, keys, values)
        if written is None:
            self.store.dropped += len(keys)
        else:
            self.store.note_store(written * self.value_bytes, self.now() - started)

    def _submit(self, tier: str, writer: Executor, work, keys: Sequence[Key], values: np.ndarray) -> None:
        with self._lock:
            if self._backlog[tier] + values.nbytes > _BACKLOG_BYTES and self._backlog[tier]:
                (self.host if tier == "host" else self.store).dropped += len(keys)
                return
            self._backlog[tier] += values.nbytes
        writer.submit(work, keys, values).add_done_callback(lambda done: self._written(tier, values.nbytes, done))

    def _written(self, tier: str, size: int, done: "Future[None]") -> None:
        with self._lock:
            self._backlog[tier] -= size
        if (error := done.exception()) is not None:
            _log.error("pages could not be kept", exc_info=error)

    def _guarded(self, work, *arguments) -> int | None:
        """Calls the store; a failure is counted, told at most once a minute, and None."""
        try:
            return work(*arguments)
        except OSError as error:
            self.store.failures += 1
            self._complain("the key-value store has failed", error)
            return None

    def _complain(self, text: str, error: BaseException) -> None:
        if self.now() - self._complained > _REST_S:
            self._complained = self.now()
            _log.warning("%s: %s", text, error)


def _hand_on[T](done: "Future[T]", to: "Future[T]") -> None:
    if (error := done.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


class Fetch:
    """A run of pages on its way to a device, batch after batch; made by `HostTiers.fetch`."""

    def __init__(self, tiers: HostTiers, keys: Sequence[Key], buckets: Sequence[int]) -> None:
        self._tiers, self._keys, self._buckets = tiers, keys, buckets
        self._asked = 0  # keys
        self._coming: deque[tuple[Future[PageBatch] | Future[RemoteBatch], int]] = deque()  # with the number of keys
        self._progress = tiers.now()
        self.advance()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return not self._coming and self._asked >= len(self._keys)

    def advance(self) -> None:
        """Asks for the next batches, as far as there is room."""
        while self._asked < len(self._keys) and len(self._coming) < _BATCHES_AHEAD:
            keys = self._keys[self._asked : self._asked + self._buckets[-1]]
            bucket = next(size for size in self._buckets if size >= len(keys))
            batch = self._tiers.submit_load(keys, bucket)
            if batch is None:
                return
            self._coming.append((batch, len(keys)))
            self._asked += len(keys)

    def take(self) -> PageBatch | RemoteBatch | None:
        """Returns the next batch once it is there. After one that is not whole nothing more comes."""
        if not self._coming:
            self._progress = self._tiers.now()
            self.advance()
            return None
        future, wanted = self._coming[0]
        if not future.done():
            if self._tiers.now() - self._progress > LOAD_S:
                self._tiers.rest()
                self.cancel()
            return None
        self._coming.popleft()
        self._tiers.batches_under_way -= 1
        self._progress = self._tiers.now()
        if (error := future.exception()) is not None:
            _log.error("pages could not be loaded; they are computed", exc_info=error)
            self.cancel()
            return None
        batch = future.result()
        if batch.num_pages < wanted:
            self.cancel()
        self.advance()
        return batch

    def cancel(self) -> None:
        """Gives up what has not come yet."""
        for future, _ in self._coming:
            self._tiers.drop(future)
            self._tiers.batches_under_way -= 1
        self._coming.clear()
        self._asked = len(self._keys)
