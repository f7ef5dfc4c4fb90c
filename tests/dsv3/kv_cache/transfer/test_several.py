"""Pages of an instance of several processes, of which nobody says which has what."""

from collections.abc import Sequence

import numpy as np
import pytest

from dsv3.kv_cache.page_keys import Key
from dsv3.kv_cache.transfer import client
from dsv3.kv_cache.transfer.client import fetch_from_any
from dsv3.kv_cache.transfer.protocol import Land, PeerError

KEYS = [bytes([i]) * 32 for i in range(6)]


class Instance:
    """Processes by address: the keys that each has, or None for one that is dead."""

    def __init__(self, **processes: Sequence[Key] | None) -> None:
        self.processes, self.asked = processes, []

    def fetch(self, address: str, keys: Sequence[Key], patience_s: float, land: Land) -> int:
        self.asked.append((address, len(keys)))
        has = self.processes[address]
        if has is None:
            raise PeerError(f"{address} is dead")
        for count, key in enumerate(keys):
            if key not in has:
                return count
            land(key, np.empty(0, np.uint8))
        return len(keys)


def fetched(instance: Instance, patience_s: float = 0.0) -> tuple[int, list[Key], str]:
    """Returns how many pages came, which, and what was raised."""
    landed: list[Key] = []
    try:
        came = fetch_from_any(
            instance.fetch, list(instance.processes), KEYS, patience_s, lambda key, _: landed.append(key)
        )
    except PeerError as error:
        return len(landed), landed, str(error)
    return came, landed, ""


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_ROUND_S", 1e-4)


def test_the_one_that_has_the_pages_is_found_and_asked_for_all() -> None:
    instance = Instance(a=[], b=KEYS, c=KEYS)
    assert fetched(instance) == (6, KEYS, "")
    assert instance.asked == [("a", 1), ("b", 1), ("b", 5)]


def test_pages_that_lie_with_several_come_in_order() -> None:
    assert fetched(Instance(a=KEYS[2:4], b=[*KEYS[:2], *KEYS[4:]])) == (6, KEYS, "")


def test_what_nobody_has_ends_the_fetch_in_time() -> None:
    instance = Instance(a=KEYS[:2], b=[])
    assert fetched(instance, 0.01) == (2, KEYS[:2], "")
    assert fetched(Instance(a=[], b=[]), 0.01) == (0, [], "")


def test_a_dead_one_costs_what_it_alone_had() -> None:
    assert fetched(Instance(dead=None, b=KEYS)) == (6, KEYS, "")
    assert fetched(Instance(b=KEYS[:3], dead=None)) == (3, KEYS[:3], "dead is dead")
    assert fetched(Instance(one=None, two=None)) == (0, [], "two is dead")


def test_pages_that_come_later_are_waited_for() -> None:
    has: list[Key] = []
    instance = Instance(a=[], b=has)
    fetch = instance.fetch

    def growing(address: str, keys: Sequence[Key], patience_s: float, land: Land) -> int:
        if len(instance.asked) % 7 == 6:
            has.append(KEYS[len(has)])
        return fetch(address, keys, patience_s, land)

    instance.fetch = growing
    assert fetched(instance, 60.0) == (6, KEYS, "")
