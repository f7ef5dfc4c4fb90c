"""Fetches pages from an instance of several processes, each of which gives those of its own ranks."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from dsv3.kv_cache.keys import Key

_PAUSE_S = 0.05  # between two rounds of questions, while none of the processes has the next page

Land = Callable[[Key, np.ndarray], object]
FetchOne = Callable[[str, Sequence[Key], float, Land], int]
"""Fetches from one address; `dsv3.kv_cache.transfer.client.Peers.fetch` says how."""


def fetch_from_any(
    fetch: FetchOne, addresses: Sequence[str], keys: Sequence[Key], patience_s: float, land: Land
) -> int:
    """Fetches pages in the order of `keys` from whichever of `addresses` has them; returns how many have come.

    Asks one after the other for the next page alone. Who gives it has most likely computed those behind it too, and is
    asked for all. Waits `patience_s` for each page that nobody has yet. Raises OSError where pages are missing and an
    address has failed; what came before has been landed.
    """
    came, last, left = 0, time.monotonic(), list(addresses)
    failure: OSError | None = None

    def note(key: Key, value: np.ndarray) -> None:
        nonlocal came, last
        land(key, value)
        came, last = came + 1, time.monotonic()

    while left and came < len(keys):
        before = came
        for address in list(left):
            try:
                if fetch(address, keys[came : came + 1], 0.0, note):
                    fetch(address, keys[came:], patience_s, note)
                    left.sort(key=address.__ne__)  # it is asked first from now on
                    break
            except OSError as error:
                left.remove(address)
                failure = error
        if came == before:
            if time.monotonic() - last > patience_s:
                break
            time.sleep(_PAUSE_S)
    if failure is not None and came < len(keys):
        raise failure
    return came
