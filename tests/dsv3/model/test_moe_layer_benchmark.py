"""The GPU benchmark of the MoE layer on a CPU: its operands, a layer in small, and what it says without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import fp8_gemm, moe_layer
from pallas_kernels.backend import Backend


def test_what_arrives_is_what_even_routing_sends() -> None:
    ids, weights = moe_layer.arrivals()
    assert ids.shape == weights.shape == (3888, 2)
    np.testing.assert_array_equal(np.bincount(ids[ids >= 0]), [512, 512])
    rows = (ids >= 0).any(axis=1).reshape(144, 27).sum(axis=1)
    assert set(rows) == {7, 8}, "seven rows and a ninth from each rank"
    assert (weights[ids < 0] == 0).all()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(RANKS=4, TOKENS=8, HIDDEN=256, WIDTH=128, LAYERS=2, ROWS=32, PAIRS=16).items():
        monkeypatch.setattr(moe_layer, name, value)


def test_a_layer_takes_the_layer_it_is_told(small: None) -> None:
    """Cases compare a backend with the reference; here both are the reference, so they agree."""
    routed, shared, layer = moe_layer.all_cases(Backend.REFERENCE)
    assert layer.flops == routed.flops + shared.flops
    arrays = jax.jit(moe_layer.operands)(jax.random.key(0))
    assert fp8_gemm.difference(layer, arrays) == 0
    call = jax.jit(lambda arrays, i: jnp.concatenate(layer.call(arrays, i)).astype(jnp.float32))
    first, second, again = (np.asarray(call(arrays, i)) for i in (0, 1, 2))
    assert first.shape == (32 + 8, 256)
    assert np.isfinite(first).all()
    assert np.abs(first - second).max() > 0.1
    np.testing.assert_array_equal(first, again)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["moe_layer"])
    assert moe_layer.main() == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err
