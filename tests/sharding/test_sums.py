"""Sums as int8 with scales: their error, and that NaN and infinities stay non-finite."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.engine.communication import Communication
from sharding.experts.traffic import LayerRows
from sharding.mesh import rank_mesh
from sharding.words import pack_sums, packed_bytes, unpack_sums

ROWS, WIDTH = 3, 200  # a whole group and a partial one


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-30, 30), st.sampled_from([np.float32, jnp.bfloat16]))
def test_the_error_is_at_most_half_a_step(seed: int, exponent: int, dtype) -> None:
    rng = np.random.default_rng(seed)
    sums = (rng.normal(size=(ROWS, WIDTH)) * 2.0**exponent).astype(dtype)
    sums[1, :128] = 0
    words = pack_sums(sums)
    assert words.shape == (ROWS, packed_bytes(WIDTH) // 4)
    back = unpack_sums(words, jax.ShapeDtypeStruct(sums.shape, sums.dtype))
    assert back.dtype == dtype and not back[1, :128].any()
    exact, back = np.asarray(sums, np.float64), np.asarray(back, np.float64)
    for group in (slice(0, 128), slice(128, WIDTH)):
        largest = np.abs(exact[:, group]).max(axis=1, keepdims=True)
        rounding = 0 if dtype == np.float32 else np.abs(exact[:, group]) / 128
        assert (np.abs(back - exact)[:, group] <= largest / 254 * 1.001 + rounding).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_stay_non_finite(value: float) -> None:
    sums = np.ones((ROWS, WIDTH), np.float32)
    sums[2, 150] = value
    back = unpack_sums(pack_sums(sums), jax.ShapeDtypeStruct(sums.shape, sums.dtype))
    assert np.isfinite(back[:2]).all() and not np.isfinite(back[2, 128:]).any()


def test_a_combined_row_of_deepseek_v3_takes_half_the_bytes() -> None:
    rows = [LayerRows.from_widths(64, 8, 7168, fp8_dispatch=True, int8_sums=packed) for packed in (False, True)]
    dispatch = rows[0].dispatch_bytes
    assert [each.row_bytes(8, by_hop=True) - dispatch for each in rows] == [14336, 7392]
    assert rows[1].row_bytes(8) == rows[0].row_bytes(8), "transports that add sums in transit send them unpacked"


@pytest.mark.parametrize("transport", ["ring", "ragged"])
def test_transports_that_add_on_the_way_are_refused(transport: str, monkeypatch) -> None:
    monkeypatch.setattr("dsv3.engine.communication.check_ragged", lambda platform: None)
    with pytest.raises(ValueError, match=f"needs expert_transport auto, all_to_all or hierarchical, not '{transport}'"):
        Communication.from_mesh(rank_mesh(jax.devices()[:2]), DEEPSEEK_V3, 256, transport=transport, combine="int8")
