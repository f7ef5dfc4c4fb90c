"""Fetches from an instance of several processes without knowing which process has which page."""

from collections.abc import Sequence

import numpy as np
import pytest

from dsv3.kv_cache.page_keys import Key
from dsv3.kv_cache.transfer import client
from dsv3.kv_cache.transfer.client import fetch_from_any
from dsv3.kv_cache.transfer.protocol import OnPage, PeerError

KEYS = [bytes([i]) * 32 for i in range(6)]


class Instance:
    """Processes by address: the keys that each has, or None for one that is dead."""

    def __init__(self, **processes: Sequence[Key] | None) -> None:
        self.processes, self.requests = processes, []

    def fetch(self, address: str, keys: Sequence[Key], patience_s: float, land: OnPage) -> int:
        self.requests.append((address, len(keys)))
        has = self.processes[address]
        if has is None:
            raise PeerError(f"{address} is dead")
        for count, key in enumerate(keys):
            if key not in has:
                return count
            land(key, np.empty(0, np.uint8))
        return len(keys)


def fetched(instance: Instance, patience_s: float = 0.0) -> tuple[int, list[Key], str]:
    """Returns how many pages count, which, and what was raised."""
    received: list[Key] = []
    try:
        count = fetch_from_any(
            instance.fetch, list(instance.processes), KEYS, patience_s, lambda key, _: received.append(key)
        )
    except PeerError as error:
        return len(received), received, str(error)
    return count, received, ""


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_ROUND_S", 1e-4)


def test_the_process_with_the_pages_is_found_and_serves_them_all() -> None:
    instance = Instance(a=[], b=KEYS, c=KEYS)
    assert fetched(instance) == (6, KEYS, "")
    assert instance.requests == [("a", 1), ("b", 1), ("b", 5)]


def test_pages_of_several_processes_arrive_in_order() -> None:
    assert fetched(Instance(a=KEYS[2:4], b=[*KEYS[:2], *KEYS[4:]])) == (6, KEYS, "")


def test_a_page_that_no_process_has_ends_the_fetch() -> None:
    instance = Instance(a=KEYS[:2], b=[])
    assert fetched(instance, 0.01) == (2, KEYS[:2], "")
    assert fetched(Instance(a=[], b=[]), 0.01) == (0, [], "")


def test_a_dead_process_costs_only_the_pages_it_alone_had() -> None:
    assert fetched(Instance(dead=None, b=KEYS)) == (6, KEYS, "")
    assert fetched(Instance(b=KEYS[:3], dead=None)) == (3, KEYS[:3], "dead is dead")
    assert fetched(Instance(one=None, two=None)) == (0, [], "two is dead")


def test_a_fetch_waits_for_pages_that_are_still_computed() -> None:
    has: list[Key] = []
    instance = Instance(a=[], b=has)
    fetch = instance.fetch

    def growing(address: str, keys: Sequence[Key], patience_s: float, land: OnPage) -> int:
        if len(instance.requests) % 7 == 6:
            has.append(KEYS[len(has)])
        return fetch(address, keys, patience_s, land)

    instance.fetch = growing
    assert fetched(instance, 60.0) == (6, KEYS, "")
