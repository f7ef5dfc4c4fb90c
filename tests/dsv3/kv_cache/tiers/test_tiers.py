"""The tiers of one process: a store that hangs, loads that find nothing, and clearing."""

import queue
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from dsv3.kv_cache.tiers import tiers
from dsv3.kv_cache.tiers.host_pool import HostPool, host_pool_bytes
from dsv3.kv_cache.tiers.hosts import OrderExecutor, RemoteTiers, TierEvents
from dsv3.kv_cache.tiers.tiers import PrefixLoad, Tiers

SIZE = 64
STORED = [bytes([i]) * 32 for i in range(8)]
"""Keys of the pages in the host's memory."""


class Hanging:
    """A store whose every call blocks until `released` is set."""

    damaged = evictions = bytes_held = 0

    def __init__(self) -> None:
        self.released = threading.Event()
        self.called: threading.Semaphore = threading.Semaphore(0)

    def _hang(self, *_: object) -> int:
        self.called.release()
        self.released.wait()
        return 0

    count = get = put = delete = _hang


@pytest.fixture
def store() -> Iterator[Hanging]:
    store = Hanging()
    yield store
    store.released.set()


@pytest.fixture
def pages(store: Hanging) -> Tiers:
    host_pool = HostPool(np.zeros(host_pool_bytes(16, SIZE), np.uint8), SIZE, 16)
    for key in STORED:
        host_pool.put(key, np.full(SIZE, key[0], np.uint8))
    return Tiers((1, 8), host_pool, store, now=Clock(), page_size=64)


class Clock:
    """A clock that stands still until `seconds` is set."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def elsewhere(i: int) -> list[bytes]:
    return [b"elsewhere".ljust(31) + bytes([i])]


def test_a_store_that_hangs_does_not_block_loads_from_host_memory(pages: Tiers, store: Hanging) -> None:
    """Lookups and loads have threads of their own."""
    for i in range(20):
        assert pages.lookup_store(elsewhere(i), 0) is not None
        pages.begin_load(elsewhere(i), 1)
    for _ in range(8):
        assert store.called.acquire(timeout=60), "four lookups and four loads hang"
    batch = pages.begin_load(STORED, 8).result(timeout=60)
    assert batch.num_pages == 8 and (batch.payloads[:, 0] == np.arange(8)).all()


def test_a_load_that_hangs_does_not_block_lookups(pages: Tiers, store: Hanging) -> None:
    for i in range(20):
        pages.begin_load(elsewhere(i), 1)
    for _ in range(4):
        assert store.called.acquire(timeout=60)
    assert pages.lookup_store(elsewhere(0), 0) is not None
    assert store.called.acquire(timeout=60), "the lookup reaches the store"


def test_a_lookup_that_times_out_suspends_the_store(pages: Tiers) -> None:
    lookup = pages.lookup_store(elsewhere(0), 0)
    assert lookup is not None and not lookup.is_over
    pages.now.seconds += tiers.LOOKUP_S + 0.1
    assert lookup.is_over and pages.has_store
    lookup.close()
    assert not pages.has_store and pages.lookup_store(elsewhere(1), 0) is None
    pages.now.seconds += 100.0
    assert pages.has_store, "it is used again later"


def test_the_number_of_running_lookups_is_bounded(pages: Tiers, store: Hanging, monkeypatch) -> None:
    monkeypatch.setattr(tiers, "_MAX_LOOKUPS", 10)
    lookups = [pages.lookup_store(elsewhere(i), 0) for i in range(12)]
    assert [each is None for each in lookups] == [False] * 10 + [True] * 2
    store.released.set()
    for each in lookups[:10]:
        each.answer.result(timeout=60)
    while pages._lookups:  # the last is removed after its result is set
        time.sleep(0.001)
    assert pages.lookup_store(elsewhere(0), 0) is not None


@pytest.fixture
def alone() -> Tiers:
    """Tiers without a store."""
    host_pool = HostPool(np.zeros(host_pool_bytes(16, SIZE), np.uint8), SIZE, 16)
    return Tiers((1, 8), host_pool, now=Clock(), page_size=64, window_parts=1)


def test_a_load_in_another_process_that_finds_nothing_gives_no_batch(alone: Tiers) -> None:
    """A batch without pages would name payloads that the process has not kept."""
    reports: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    executor, remote = OrderExecutor(alone, TierEvents(), reports.put), RemoteTiers(alone, None, range(1))
    load = PrefixLoad(remote, STORED)
    executor.execute_before_step(remote.pop_orders())
    while load._loading and not load._loading[0][0].done():
        remote.on_report(reports.get(timeout=60))
    assert load.pop_batch() is None and load.is_over
    executor.execute_before_step(remote.pop_orders())  # drops a second batch that is still being loaded
    assert remote.num_loading_batches == 0 and not executor._loads


def test_clearing_also_removes_pages_that_are_still_to_be_written(alone: Tiers) -> None:
    begun, go_on = threading.Event(), threading.Event()
    alone._host_writer.submit(lambda: (begun.set(), go_on.wait(60)))
    assert begun.wait(60)
    alone.offload(STORED[:2], np.zeros((2, SIZE), np.uint8))
    alone.clear()
    go_on.set()
    alone._host_writer.submit(lambda: None).result(timeout=60)
    assert all(map(alone.lacks, STORED))
