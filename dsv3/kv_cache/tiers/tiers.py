"""KV offload to host memory and stores, as the engine's thread uses it: it never waits; threads copy and verify.

Pages that leave a device are offloaded to host memory and from there written to the store, if there is one. Pages of
the store are loaded through host memory, too. Each process of an instance has tiers of its own, for the ranks of its
devices.
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

from dsv3.kv_cache.page_keys import Key, is_window_key, window_keys
from dsv3.kv_cache.tiers.counts import Rate, TierCounts, is_loading_faster
from dsv3.kv_cache.tiers.host_pool import HostPool, Staging
from dsv3.kv_cache.tiers.store import PageStore
from dsv3.kv_cache.transfer.client import Peers

LOOKUP_S = 0.5
"""Timeout of a lookup in the store; after it the store counts as empty."""
LOAD_S = 20.0
"""Timeout of a batch; after it the pages are computed."""

FETCH_S = 60.0
"""Timeout of a fetch from another instance; pages that have arrived by then are used."""
PATIENCE_S = 5.0
"""How long a fetch waits for each page that the other instance is still computing."""

_LOAD_THREADS = 4  # that read the host pool; as many read the store, and as many look up in it
_FETCH_THREADS = 8
_BATCHES_AHEAD = 2  # of one prefix: one on its way to the device, one being read
_MAX_BATCHES = 16  # of all prefixes
_MAX_LOOKUPS = 1024  # that a store has not answered
_BACKLOG_BYTES = 2**29
_MOST_TRIED = 64  # pages, the last ones of a prefix, behind which it may be continued
_WINDOWS_FETCHED = 2  # pages for which another instance may have a window page, besides the last one asked for
_SUSPEND_S = 60.0  # of a store that has exceeded a timeout
_log = logging.getLogger(__name__)


class PageBatch(NamedTuple):
    """Payloads on their way to a device: the first `num_pages` rows of uint8 `[bucket, payload_bytes]`."""

    payloads: np.ndarray
    num_pages: int

    @property
    def bucket(self) -> int:
        """Rows, padding included."""
        return len(self.payloads)


class RemoteBatch(NamedTuple):
    """Payloads that another process has loaded, and keeps under a number until a command names it."""

    number: int
    bucket: int
    num_pages: int


@dataclasses.dataclass
class Lookup:
    """A lookup of a request's keys from `first` on, in a store, or a fetch of them from another instance.

    `tiers` run it; a request may have a second one on another host. A store that exceeds the timeout is suspended if
    `suspends_store`.
    """

    tiers: "HostTiers"
    first: int
    answer: Future[int]
    timeout_s: float
    suspends_store: bool = False
    is_second: bool = False

    def __post_init__(self) -> None:
        self._started = self.tiers.now()

    @property
    def is_over(self) -> bool:
        """Whether there is an answer, or the timeout is over."""
        return self.answer.done() or self.tiers.now() - self._started > self.timeout_s

    def close(self) -> None:
        """Ends the wait for an answer."""
        if self.suspends_store and not self.answer.done():
            self.tiers.suspend_store()

    @property
    def num_found(self) -> int:
        """How many leading keys of the request are found; valid once `is_over`."""
        if not self.answer.done():
            return self.first
        if (error := self.answer.exception()) is not None:
            _log.error("the lookup of a prefix in the offload tiers has failed; it is computed", exc_info=error)
            return self.first
        count = self.answer.result()
        # Without a window page that was found, host memory may still have one.
        return self.first + count if count or not self.tiers.window_parts else 0


class HostTiers(abc.ABC):
    """Offload tiers of one process, with pages of `page_size` tokens and `payload_bytes` bytes.

    `buckets` are the numbers of pages, ascending, that are copied to or from a device at once. `compute_rate` is in
    prompt tokens per second. Pages of other instances are fetched if `can_fetch`. Where a model has a window, a prefix
    can be continued only with the window page of its last page, of which the tiers keep `window_parts` parts.
    """

    _orders_wait = False  # for a step: then a late answer is no sign of a slow store

    def __init__(
        self,
        payload_bytes: int,
        buckets: Sequence[int],
        page_size: int,
        now: Callable[[], float],
        compute_rate: Rate,
        is_store_configured: bool,
        can_fetch: bool,
        window_parts: int = 0,
    ) -> None:
        self.window_parts = window_parts
        self.payload_bytes, self.buckets, self.page_size, self.now = payload_bytes, tuple(buckets), page_size, now
        self.is_store_configured, self.can_fetch = is_store_configured, can_fetch
        self.compute_rate = compute_rate
        self._suspended_until = 0.0
        self.num_loading_batches = 0
        self._lookups: set[Future[int]] = set()  # that the store has not answered
        self.host, self.store, self.peer = TierCounts(), TierCounts(), TierCounts()
        self._rates = {"host": Rate(now), "store": Rate(now), "peer": Rate(now)}

    @abc.abstractmethod
    def lacks(self, key: Key) -> bool:
        """Returns whether a page is not in host memory."""

    @abc.abstractmethod
    def invalidate(self, keys: Sequence[Key]) -> None:
        """Deletes pages whose content is wrong."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Empties the host memory; a store, which others may share, stays as it is."""

    @abc.abstractmethod
    def counts(self) -> dict[str, TierCounts]:
        """Returns the statistics by tier; any thread may call."""

    @abc.abstractmethod
    def drop(self, load: "Future[PageBatch] | Future[RemoteBatch]") -> None:
        """Cancels the load of a batch."""

    @abc.abstractmethod
    def begin_load(self, keys: Sequence[Key], bucket: int) -> "Future[PageBatch] | Future[RemoteBatch]":
        """Loads a batch on a thread, up to the first missing page."""

    @abc.abstractmethod
    def begin_lookup(self, keys: Sequence[Key]) -> Future[int]:
        """Looks up on a thread how many leading `keys` the store has."""

    @abc.abstractmethod
    def begin_fetch(self, address: str, keys: Sequence[Key]) -> Future[int]:
        """Fetches pages of another instance into host memory on a thread; the result counts the leading ones there."""

    def of(self, rank: int) -> "HostTiers":
        """Returns the tiers that serve a rank: these, which serve all ranks of the process."""
        return self

    def nearest(self, ranks: Iterator[int]) -> "HostTiers | None":
        """Returns the tiers of the first of `ranks`: these, without advancing the iterator."""
        return self

    def depths(self, keys: Sequence[Key], lookup: Lookup | None) -> np.ndarray | None:
        """Returns how many leading `keys` a lookup has found, `[]` for all ranks alike; None without one.

        Pages in host memory do not count: all ranks can load them.
        """
        return None if lookup is None else np.array(min(lookup.num_found, len(keys)))

    @property
    def has_orders(self) -> bool:
        """Whether orders to other processes are waiting."""
        return False

    @property
    def has_store(self) -> bool:
        """Whether there is a store that is not suspended."""
        return self.is_store_configured and self.now() >= self._suspended_until

    def num_in_host_memory(self, keys: Sequence[Key]) -> int:
        """Returns how many leading `keys` are in host memory."""
        return next((i for i, key in enumerate(keys) if self.lacks(key)), len(keys))

    def can_continue(self, key: Key) -> bool:
        """Returns whether host memory has what it takes to continue a prefix behind the page of `key`."""
        return not any(map(self.lacks, window_keys(key, self.window_parts)))

    def continued_depth(self, keys: Sequence[Key], first: int, stop: int) -> int:
        """Returns the most leading `keys`, `first` to `stop`, behind which host memory can continue; else `first`."""
        if not self.window_parts:
            return stop
        least = max(first, stop - _MOST_TRIED)
        return next((depth for depth in range(stop, least, -1) if self.can_continue(keys[depth - 1])), first)

    def record_query(self, pages: int) -> None:
        """Counts pages that a request would load if the tiers had them."""
        self.host.queries += pages * self.page_size

    def lookup_store(self, keys: Sequence[Key], first: int) -> Lookup | None:
        """Starts to look up in the store the keys behind `first` that host memory lacks.

        Returns None where none is left, or too many lookups are running.
        """
        first += self.num_in_host_memory(keys[first:])
        if first == len(keys) or not self.has_store or len(self._lookups) >= _MAX_LOOKUPS:
            return None
        self.store.queries += (len(keys) - first) * self.page_size
        answer = self.begin_lookup(keys[first:])
        self._lookups.add(answer)
        answer.add_done_callback(self._lookups.discard)
        return Lookup(self, first, answer, LOOKUP_S, suspends_store=not self._orders_wait)

    def fetch_from_peer(self, address: str, keys: Sequence[Key], first: int) -> Lookup | None:
        """Starts to fetch from another instance the keys from `first` on that host memory lacks.

        `address` is "host:port", or "host:port#room" for a request that the instance runs in a bootstrap room. Returns
        None where none is left, or where computing is faster and there is no room.
        """
        first += self.num_in_host_memory(keys[first:])
        count = len(keys) - first
        rate, compute = self._rates["peer"].value, self.compute_rate.value
        if not self.can_fetch or not count:
            return None
        has_room = "#" in address  # the other instance computes the prompt now in any case
        if not has_room and not is_loading_faster(count * self.page_size, count * self.payload_bytes, rate, compute):
            return None
        self.peer.queries += count * self.page_size
        return Lookup(self, first, self.begin_fetch(address, keys[first:]), FETCH_S)

    def num_loadable(self, keys: Sequence[Key], first: int, found: int) -> int:
        """Returns how many keys from `first` on can be loaded; 0 where computing them is faster.

        A lookup has found the keys before `found`; those from there on may be in host memory.
        """
        stop = max(first, min(found, len(keys)))
        stop += self.num_in_host_memory(keys[stop:])
        if stop != found:
            stop = self.continued_depth(keys, max(first, min(found, stop)), stop)
        count = stop - first
        rate = self._rates["host" if self.num_in_host_memory(keys[first:stop]) == count else "store"]
        size = (count + self.window_parts) * self.payload_bytes
        pays = is_loading_faster(count * self.page_size, size, rate.value, self.compute_rate.value)
        return count if pays else 0

    def suspend_store(self) -> None:
        """Stops using the store for a while: it has exceeded a timeout."""
        if self.has_store:
            _log.warning("kv_store: it does not answer in time; it is not used for %.0f s", _SUSPEND_S)
        self._suspended_until = self.now() + _SUSPEND_S


class Tiers(HostTiers):
    """The tiers of this process: a host pool, and optionally a store and other instances.

    One thread calls the methods of `HostTiers`. Any may call `offload`, `begin_load`, `begin_lookup`, `begin_fetch`,
    `invalidate` and `clear`. `workers(count, name)` creates the executors, and `now` returns the time; a simulator has
    its own (`tools.simulate.pages`). A store that hangs blocks its own threads only: neither loads from host memory
    nor, during a load, lookups.
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
        window_parts: int = 0,
    ) -> None:
        has_store, has_peers = store is not None, peers is not None
        settings = host_pool.payload_bytes, buckets, page_size, now, Rate(now), has_store, has_peers, window_parts
        super().__init__(*settings)
        self._host_pool, self._store, self._peers = host_pool, store, peers
        self._loaders, self._fetchers = workers(_LOAD_THREADS, "kv-load"), workers(_FETCH_THREADS, "kv-fetch")
        self._store_readers, self._lookup_threads = workers(_LOAD_THREADS, "kv-read"), workers(_LOAD_THREADS, "kv-ask")
        self._host_writer, self._store_writer = workers(1, "kv-host"), workers(1, "kv-store")
        self._backlog = {"host": 0, "store": 0}  # bytes that wait to be written
        self._staging = Staging()
        self._lock = threading.Lock()
        self._progress_event = threading.Event()
        self._warned_at = 0.0

    @property
    def rates(self) -> dict[str, float]:
        """Bytes per second of each tier that was measured in the last minute."""
        return {name: value for name, rate in self._rates.items() if (value := rate.value) is not None}

    def lacks(self, key: Key) -> bool:
        return key not in self._host_pool

    def offload(self, keys: Sequence[Key], payloads: np.ndarray) -> None:
        """Offloads KV pages to host memory, payloads uint8 `[n, payload_bytes]`; drops them if the backlog is full."""
        self._submit("host", self._host_writer, self._offload_to_host, keys, payloads)

    def invalidate(self, keys: Sequence[Key]) -> None:
        self._host_writer.submit(self._invalidate, list(keys))  # behind those that are still to be written

    def _invalidate(self, keys: list[Key]) -> None:
        for key in keys:
            self._host_pool.delete(key)
        if self._store is not None:
            self._store_writer.submit(self._guarded, self._store.delete, keys)

    def clear(self) -> None:
        self._host_pool.clear()
        self._host_writer.submit(self._host_pool.clear)  # and what was still to be written

    def wait(self, seconds: float) -> None:
        """Waits until a load or lookup has finished since the last call, at most `seconds`."""
        self._progress_event.wait(seconds)
        self._progress_event.clear()

    def wake(self) -> None:
        """Ends a `wait`."""
        self._progress_event.set()

    def counts(self) -> dict[str, TierCounts]:
        host_pool, store = self._host_pool, self._store
        size = len(host_pool) * self.payload_bytes
        host = dataclasses.replace(self.host, damaged=host_pool.damaged, evictions=host_pool.evictions, bytes_held=size)
        counts = {"host": host}
        if self._peers is not None:
            counts["peer"] = self._peers.carrier_stats.with_carriers(self.peer)
        if store is not None:
            counts["store"] = dataclasses.replace(
                self.store, damaged=store.damaged, evictions=store.evictions, bytes_held=store.bytes_held
            )
        return counts

    def begin_load(self, keys: Sequence[Key], bucket: int) -> Future[PageBatch]:
        uses_store = self.has_store and self.num_in_host_memory(keys) < len(keys)
        return self._submit_work(
            self._store_readers if uses_store else self._loaders, self._load, keys, bucket, uses_store
        )

    def begin_lookup(self, keys: Sequence[Key]) -> Future[int]:
        return self._submit_work(self._lookup_threads, self._count, keys)

    def begin_fetch(self, address: str, keys: Sequence[Key]) -> Future[int]:
        address, _, bootstrap_room = address.partition("#")
        if not bootstrap_room:
            return self._submit_work(self._fetchers, self._fetch, address, keys)
        assert self._peers is not None
        num_fetched: Future[int] = Future()
        num_fetched.add_done_callback(lambda _: self.wake())

        def on_found(found: Future[str]) -> None:
            work = self._fetchers.submit(self._fetch_found, found, keys)
            work.add_done_callback(lambda done: _forward_result(done, num_fetched))

        self._peers.rooms.find(address, int(bootstrap_room)).add_done_callback(on_found)
        return num_fetched

    def _fetch_found(self, found: Future[str], keys: Sequence[Key]) -> int:
        """Fetches pages of a bootstrap room; one that was not found leaves those that are in host memory anyway."""
        if (error := found.exception()) is None:
            return self._fetch(found.result(), keys, measures=False)
        self._on_fetch_error(error)
        return self.continued_depth(keys, 0, self.num_in_host_memory(keys))

    def drop(self, load: "Future[PageBatch] | Future[RemoteBatch]") -> None:
        load.cancel()

    def _submit_work(self, threads: Executor, work: Callable, *arguments: Any) -> Future:
        """Submits work whose end ends a `wait`."""
        future = threads.submit(work, *arguments)
        future.add_done_callback(lambda _: self.wake())
        return future

    def _load(self, keys: Sequence[Key], bucket: int, uses_store: bool) -> PageBatch:
        payloads = self._staging.rows(bucket, self.payload_bytes)
        count = 0
        while count < len(keys):
            got = self._load_run(keys[count:], payloads[count : len(keys)], uses_store)
            if not got:
                break
            count += got
        return PageBatch(payloads, count)

    def _load_run(self, keys: Sequence[Key], out: np.ndarray, uses_store: bool) -> int:
        """Loads the next pages as far as one tier has them; returns how many."""
        started = self.now()
        got = 0
        while got < len(keys) and self._host_pool.get(keys[got], out[got]):
            got += 1
        tier, counts = "host", self.host
        if not got and uses_store and self._store is not None and self.has_store:
            stop = next((i for i, key in enumerate(keys) if i and key in self._host_pool), len(keys))
            got = self._guarded(self._store.get, keys[:stop], out[:stop]) or 0
            tier, counts = "store", self.store
            if got:
                self._submit("host", self._host_writer, self._insert_into_host_pool, keys[:got], out[:got])
        seconds = self.now() - started
        self._rates[tier].update(got * self.payload_bytes, seconds)
        if got:
            with self._lock:
                counts.hits += self.page_size * sum(not is_window_key(key) for key in keys[:got])
                counts.record_load(got * self.payload_bytes, seconds)
        return got

    def _fetch(self, address: str, keys: Sequence[Key], measures: bool = True) -> int:
        """Fetches pages into host memory; returns how many leading `keys` are there.

        `measures` is False where pages are still being computed: then the time says nothing about the rate.
        """
        assert self._peers is not None
        started, count, tokens = self.now(), 0, 0

        def on_page(key: Key, payload: np.ndarray) -> None:
            nonlocal count, tokens
            count += 1
            tokens += 0 if is_window_key(key) else self.page_size
            self._host_pool.put(key, payload)

        def fetch(keys: Sequence[Key], patience_s: float) -> None:
            assert self._peers is not None
            self._peers.fetch(address, [key for key in keys if key not in self._host_pool], patience_s, on_page)

        try:
            fetch([*keys, *window_keys(keys[-1], self.window_parts)], PATIENCE_S)
            found = self.num_in_host_memory(keys)
            for depth in range(found, max(0, found - _WINDOWS_FETCHED), -1):
                if self.can_continue(keys[depth - 1]):
                    break
                fetch(window_keys(keys[depth - 1], self.window_parts), 0.0)
        except OSError as error:
            self._on_fetch_error(error)
        seconds = self.now() - started
        with self._lock:
            self.peer.hits += tokens
            self.peer.record_load(count * self.payload_bytes, seconds)
        if measures:
            self._rates["peer"].update(count * self.payload_bytes, seconds)
        return self.continued_depth(keys, 0, self.num_in_host_memory(keys))

    def _on_fetch_error(self, error: BaseException) -> None:
        self.peer.failures += 1
        self._warn("pages could not be fetched from another instance; they are computed", error)

    def _count(self, keys: Sequence[Key]) -> int:
        """Returns how many leading `keys` the store has and can continue."""
        if self._store is None:
            return 0
        count = self._guarded(self._store.count, keys) or 0
        if not self.window_parts:
            return count
        for depth in range(count, max(0, count - _MOST_TRIED), -1):
            missing = [part for part in window_keys(keys[depth - 1], self.window_parts) if part not in self._host_pool]
            if (self._guarded(self._store.count, missing) or 0) == len(missing):
                return depth
        return 0

    def _insert_into_host_pool(self, keys: Sequence[Key], payloads: np.ndarray) -> None:
        started = self.now()
        count = sum(self._host_pool.put(key, payload) for key, payload in zip(keys, payloads, strict=True))
        self.host.record_store(count * self.payload_bytes, self.now() - started)

    def _offload_to_host(self, keys: Sequence[Key], payloads: np.ndarray) -> None:
        self._insert_into_host_pool(keys, payloads)
        if self.has_store:
            self._submit("store", self._store_writer, self._write_to_store, keys, payloads)

    def _write_to_store(self, keys: Sequence[Key], payloads: np.ndarray) -> None:
        assert self._store is not None
        started = self.now()
        written = self._guarded(self._store.put, keys, payloads)
        if written is None:
            self.store.dropped += len(keys)
        else:
            self.store.record_store(written * self.payload_bytes, self.now() - started)

    def _submit(self, tier: str, writer: Executor, work, keys: Sequence[Key], payloads: np.ndarray) -> None:
        with self._lock:
            if self._backlog[tier] + payloads.nbytes > _BACKLOG_BYTES and self._backlog[tier]:
                (self.host if tier == "host" else self.store).dropped += len(keys)
                return
            self._backlog[tier] += payloads.nbytes
        writer.submit(work, keys, payloads).add_done_callback(lambda done: self._written(tier, payloads.nbytes, done))

    def _written(self, tier: str, size: int, done: "Future[None]") -> None:
        with self._lock:
            self._backlog[tier] -= size
        if (error := done.exception()) is not None:
            _log.error("pages could not be written to the offload tier %s", tier, exc_info=error)

    def _guarded(self, work, *arguments) -> int | None:
        """Calls the store; a failure is counted, logged at most once a minute, and returns None."""
        try:
            return work(*arguments)
        except OSError as error:
            self.store.failures += 1
            self._warn("the KV store has failed; its pages are computed", error)
            return None

    def _warn(self, text: str, error: BaseException) -> None:
        if self.now() - self._warned_at > _SUSPEND_S:
            self._warned_at = self.now()
            _log.warning("%s: %s", text, error)


def _forward_result[T](done: "Future[T]", to: "Future[T]") -> None:
    if (error := done.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


class PrefixLoad:
    """Loads a run of pages to a device, batch after batch; before them the window page of the last one, if any."""

    def __init__(self, tiers: HostTiers, keys: Sequence[Key]) -> None:
        self.window_parts = tiers.window_parts
        self._tiers, self._buckets = tiers, tiers.buckets
        self._keys = [*window_keys(keys[-1], self.window_parts), *keys]
        self._num_submitted = 0  # keys
        self._loading: deque[tuple[Future[PageBatch] | Future[RemoteBatch], int]] = deque()  # with the number of keys
        self._progress = tiers.now()
        self.advance()

    @property
    def is_over(self) -> bool:
        """Whether no more batches follow."""
        return not self._loading and self._num_submitted >= len(self._keys)

    def advance(self) -> None:
        """Submits the next batches, within the limits."""
        while self._num_submitted < len(self._keys) and len(self._loading) < _BATCHES_AHEAD:
            first = self._num_submitted
            most = self.window_parts if first < self.window_parts else len(self._keys)
            keys = self._keys[first : min(first + self._buckets[-1], most)]
            bucket = next(size for size in self._buckets if size >= len(keys))
            if self._tiers.num_loading_batches >= _MAX_BATCHES:
                return
            self._tiers.num_loading_batches += 1
            self._loading.append((self._tiers.begin_load(keys, bucket), len(keys)))
            self._num_submitted += len(keys)

    def pop_batch(self) -> PageBatch | RemoteBatch | None:
        """Returns the next batch once it is loaded; None before, and for a batch without pages.

        An incomplete batch is the last one.
        """
        if not self._loading:
            self._progress = self._tiers.now()
            self.advance()
            return None
        future, wanted = self._loading[0]
        if not future.done():
            if self._tiers.now() - self._progress > LOAD_S:
                self._tiers.suspend_store()
                self.cancel()
            return None
        self._loading.popleft()
        self._tiers.num_loading_batches -= 1
        self._progress = self._tiers.now()
        if (error := future.exception()) is not None:
            _log.error("pages could not be loaded; they are computed", exc_info=error)
            self.cancel()
            return None
        batch = future.result()
        if batch.num_pages < wanted:
            self.cancel()
        self.advance()
        return batch if batch.num_pages else None

    def cancel(self) -> None:
        """Cancels the batches that are still loading."""
        for future, _ in self._loading:
            self._tiers.drop(future)
            self._tiers.num_loading_batches -= 1
        self._loading.clear()
        self._num_submitted = len(self._keys)
