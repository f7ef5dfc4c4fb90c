"""An expert-parallel MTP module uses its own expert placement, not that of the main model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dsv3.model import mtp
from dsv3.model.decoder import LayerContext
from dsv3.model.layers.attention import LatentAttention
from dsv3.model.layers.expert_parallel import ExpertParallel
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.rope import rotation
from dsv3.model.layers.uncached_attention import causal_attend
from dsv3.model.params import Params, abstract, declare
from sharding.experts.eplb import map_of
from sharding.experts.placement import Placement, placement_of
from sharding.experts.transport import Ring
from sharding.mesh import RANK_SPEC, Machine, partitions, rank_mesh
from tests.dsv3.model.test_module import CFG

T = 4


def parameters() -> Params:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: rng.normal(0, 0.3, s.shape).astype(s.dtype), abstract(CFG, jnp.float32))


def inputs(ranks: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(ranks, T, CFG.hidden_size)).astype(np.float32)
    return hidden, rng.integers(0, CFG.vocab_size, (ranks, T)).astype(np.int32)


def predict(params: Params, hidden: jax.Array, tokens: jax.Array, placement: Placement | None = None, **context):
    positions = jnp.arange(T, dtype=jnp.int32)
    attention = LatentAttention(CFG, rotation(CFG, positions), causal_attend(CFG, 1, Numerics()))
    shared = LayerContext(CFG, attention, jnp.ones(T, bool), Numerics(), **context)
    return mtp.predict(params, shared, 0, hidden, tokens, None, placement)[0]


def over_two_devices(with_placement: bool) -> np.ndarray:
    """The module's replicas stand in reverse order, which the main model's placement would not know."""
    mesh = rank_mesh(jax.devices()[:2])
    order = np.arange(CFG.n_routed_experts)[None, ::-1]
    params, placement = parameters(), placement_of(map_of(order, CFG.n_routed_experts), 1)
    moe = params.mtp.layers.moe
    moe = dataclasses.replace(moe, gate_up=moe.gate_up[:, order[0]], down=moe.down[:, order[0]])
    layers = dataclasses.replace(params.mtp.layers, moe=moe)
    params = dataclasses.replace(params, mtp=dataclasses.replace(params.mtp, layers=layers))
    routed = ExpertParallel(Ring(Machine.from_mesh(mesh), CFG.n_routed_experts // 2))

    def body(params: Params, placement: Placement, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        own = placement if with_placement else None
        return predict(params, hidden[0], tokens[0], own, routed=routed)[None]

    specs = (partitions(declare(CFG)), PartitionSpec(), RANK_SPEC, RANK_SPEC)
    step = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=RANK_SPEC, check_vma=False)
    return np.asarray(jax.jit(step)(params, placement, *inputs(2)))


def test_two_devices_give_the_result_of_one() -> None:
    alone = jax.jit(jax.vmap(predict, (None, 0, 0)))(parameters(), *inputs(2))
    np.testing.assert_allclose(over_two_devices(with_placement=True), alone, rtol=1e-5, atol=1e-5)


def test_a_module_without_a_placement_is_rejected() -> None:
    with pytest.raises(ValueError, match="these layers' experts have no placement"):
        over_two_devices(with_placement=False)
