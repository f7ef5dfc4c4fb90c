"""Search by comparing all with all, and binary search, give numpy's positions."""

import jax
import numpy as np
import pytest

from pallas_kernels import search as searching
from pallas_kernels.search import search


@pytest.mark.parametrize("at_once", [1 << 18, 0])
@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_equal_numpy(side: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches repeated values, like the ends of empty requests, and values above all."""
    monkeypatch.setattr(searching, "_AT_ONCE", at_once)
    ordered, values = np.array([0, 0, 3, 3, 3, 7, 9, 9], np.int32), np.arange(-1, 12, dtype=np.int32)
    found = jax.jit(lambda ordered, values: search(ordered, values, side))(ordered, values)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, np.searchsorted(ordered, values, side))


def test_a_short_search_has_no_chain_of_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = jax.ShapeDtypeStruct((16,), np.int32), jax.ShapeDtypeStruct((64,), np.int32)

    def gathers() -> int:
        return jax.jit(lambda *given: search(*given)).lower(*arrays).as_text().count("stablehlo.gather")

    assert gathers() == 0
    monkeypatch.setattr(searching, "_AT_ONCE", 16 * 64 - 1)
    assert gathers() > 3
