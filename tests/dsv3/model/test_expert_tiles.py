"""Tiles of routed experts follow the pairs that a device is likely to compute, not the room for those that may come."""

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.model.layers.experts import ExpertLayer, gate_up, moe
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.router import Routing
from pallas_kernels.backend import Backend
from tests.dsv3.model.golden import model


def test_room_that_stays_empty_makes_no_higher_tiles() -> None:
    params, cfg = model("moonlight")
    experts, E, K = params.moe.moe, cfg.n_routed_experts, cfg.num_experts_per_tok
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, cfg.hidden_size)), jnp.float32)
    ids = np.full((64, K), -1, np.int32)
    ids[:2] = np.arange(2 * K).reshape(2, K) % E  # two tokens came, and there is room for 64
    routing = Routing(jnp.asarray(ids), jnp.asarray(rng.random((64, K)), jnp.float32))

    def tile(numerics: Numerics) -> int:
        return jax.eval_shape(lambda x, to: gate_up(x, to, ExpertLayer(experts, 0, numerics)).order, x, routing).tile_m

    known, unknown = Numerics(Backend.REFERENCE, expert_pairs=2 * K), Numerics(Backend.REFERENCE)
    assert tile(known) < tile(unknown)
    assert tile(Numerics(Backend.REFERENCE, expert_pairs=10**6)) == tile(unknown)
    layers = [ExpertLayer(experts, 0, numerics) for numerics in (known, unknown)]
    outputs = jax.jit(lambda x: [moe(x, routing, layer) for layer in layers])(x)
    np.testing.assert_allclose(outputs[0][0], outputs[1][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(outputs[0][1].counts, outputs[1][1].counts)


def test_pairs_that_find_no_room_are_told() -> None:
    """Two tokens' pairs fit in room for as many, whatever they choose; of those of 64 tokens some must be lost."""
    params, cfg = model("moonlight")
    experts, E, K = params.moe.moe, cfg.n_routed_experts, cfg.num_experts_per_tok
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, cfg.hidden_size)), jnp.float32)
    weights = jnp.asarray(rng.random((64, K)), jnp.float32)
    whole, bounded = (
        ExpertLayer(experts, 0, Numerics(Backend.REFERENCE, expert_pairs=2 * K), pairs=n) for n in (None, 2 * K)
    )
    step = jax.jit(lambda ids, x: tuple(moe(x, Routing(ids, weights), layer) for layer in (whole, bounded)))
    for tokens, lost in ((2, 0), (64, 1)):
        for chosen in (np.arange(64 * K).reshape(64, K) % E, np.tile(np.arange(K), (64, 1))):
            ids = np.where(np.arange(64)[:, None] < tokens, chosen, -1).astype(np.int32)
            (expected, free), (y, router_stats) = step(ids, x)
            assert free.overflows is None and int(router_stats.overflows) == lost
            np.testing.assert_array_equal(router_stats.counts, free.counts)
            if not lost:
                np.testing.assert_array_equal(y, expected)


def test_a_step_expects_as_many_pairs_as_it_sends() -> None:
    _, cfg = model("moonlight")
    assert Numerics.from_config(cfg, None, 48).expert_pairs == 48 * cfg.num_experts_per_tok
    assert Numerics.from_config(cfg, None).expert_pairs is None
