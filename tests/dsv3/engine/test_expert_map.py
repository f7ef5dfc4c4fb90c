"""The expert map before any load has been measured."""

import dataclasses

import jax
import numpy as np
import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.engine.expert_parallel import first_expert_map
from sharding.experts.eplb import balancedness
from sharding.mesh import rank_mesh

DEVICES = 8


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("redundant", [8, 32, 64])
def test_copies_of_an_expert_are_on_different_devices_and_an_even_load_is_even(num_nodes, redundant):
    experts = DEEPSEEK_V3.n_routed_experts
    mesh = rank_mesh(jax.devices()[:DEVICES], num_nodes)
    first = first_expert_map(DEEPSEEK_V3, mesh, redundant)
    layers = DEEPSEEK_V3.num_moe_layers + DEEPSEEK_V3.num_nextn_predict_layers
    by_device = first.phy2log.reshape(layers, DEVICES, -1)
    assert first.logcnt.max() == 2
    assert all(len(set(row)) == len(row) for row in by_device[0].tolist())
    assert balancedness(np.ones((layers, experts)), first, DEVICES).min() > 0.95


def test_a_model_without_routed_experts_is_refused():
    dense = dataclasses.replace(DEEPSEEK_V3, first_k_dense_replace=DEEPSEEK_V3.num_hidden_layers)
    with pytest.raises(ValueError, match="needs a model with routed experts"):
        first_expert_map(dense, rank_mesh(jax.devices()[:DEVICES]), 0)
