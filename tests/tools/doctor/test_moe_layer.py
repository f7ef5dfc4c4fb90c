"""The cases of the MoE layer on a CPU: their operands, and a layer in small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import checks
from pallas_kernels.backend import Backend
from tools.doctor import moe_layer


def test_arrivals_are_those_of_even_routing() -> None:
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


def test_a_case_uses_the_weights_of_the_given_layer(small: None) -> None:
    """Cases compare a backend with the reference; here both are the reference, so they agree."""
    routed, shared, layer = moe_layer.all_cases()
    assert layer.flops == routed.flops + shared.flops
    assert checks.check(layer, Backend.REFERENCE).passed
    arrays = jax.jit(moe_layer.operands)(jax.random.key(0))
    parts = jax.jit(lambda arrays, i: layer.call(arrays, i, Backend.REFERENCE))

    def call(arrays: dict, i: int) -> jax.Array:
        return jnp.concatenate(list(parts(arrays, i).values())).astype(jnp.float32)

    first, second, again = (np.asarray(call(arrays, i)) for i in (0, 1, 2))
    assert first.shape == (32 + 8, 256)
    assert np.isfinite(first).all()
    assert np.abs(first - second).max() > 0.1
    np.testing.assert_array_equal(first, again)
