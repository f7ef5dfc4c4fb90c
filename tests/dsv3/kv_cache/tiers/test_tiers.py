"""The tiers of one process beside a store that hangs."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from dsv3.kv_cache.tiers import tiers
from dsv3.kv_cache.tiers.host_pool import HostPool, host_pool_bytes
from dsv3.kv_cache.tiers.tiers import Tiers

SIZE = 64
HELD = [bytes([i]) * 32 for i in range(8)]
"""Keys of the pages in the host's memory."""


class Hanging:
    """A store whose every call waits until it is let go."""

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
    for key in HELD:
        host_pool.put(key, np.full(SIZE, key[0], np.uint8))
    return Tiers((1, 8), host_pool, store, now=Clock(), page_size=64)


class Clock:
    """Stands still until it is set forward."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def elsewhere(i: int) -> list[bytes]:
    return [b"elsewhere".ljust(31) + bytes([i])]


def test_a_store_that_hangs_holds_up_no_load_from_the_hosts_memory(pages: Tiers, store: Hanging) -> None:
    """Look-ups and loads had the same threads."""
    for i in range(20):
        assert pages.lookup(elsewhere(i), 0) is not None
        pages.begin_load(elsewhere(i), 1)
    for _ in range(8):
        assert store.called.acquire(timeout=60), "four look-ups and four loads hang"
    batch = pages.begin_load(HELD, 8).result(timeout=60)
    assert batch.num_pages == 8 and (batch.values[:, 0] == np.arange(8)).all()


def test_a_load_that_hangs_holds_up_no_look_up(pages: Tiers, store: Hanging) -> None:
    for i in range(20):
        pages.begin_load(elsewhere(i), 1)
    for _ in range(4):
        assert store.called.acquire(timeout=60)
    assert pages.lookup(elsewhere(0), 0) is not None
    assert store.called.acquire(timeout=60), "the store is asked all the same"


def test_a_look_up_without_answer_has_the_store_left_alone(pages: Tiers) -> None:
    asked = pages.lookup(elsewhere(0), 0)
    assert asked is not None and not asked.is_over
    pages.now.seconds += tiers.LOOK_UP_S + 0.1
    assert asked.is_over and pages.has_store
    asked.end()
    assert not pages.has_store and pages.lookup(elsewhere(1), 0) is None
    pages.now.seconds += 100.0
    assert pages.has_store, "it is tried again later"


def test_questions_that_wait_for_a_store_are_bounded(pages: Tiers, store: Hanging, monkeypatch) -> None:
    monkeypatch.setattr(tiers, "_MOST_QUESTIONS", 10)
    asked = [pages.lookup(elsewhere(i), 0) for i in range(12)]
    assert [each is None for each in asked] == [False] * 10 + [True] * 2
    store.released.set()
    for each in asked[:10]:
        each.answer.result(timeout=60)
    while pages._questions:  # the last is let go behind its answer
        time.sleep(0.001)
    assert pages.lookup(elsewhere(0), 0) is not None
