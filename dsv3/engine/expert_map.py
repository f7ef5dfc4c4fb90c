"""Which slot holds which expert when serving starts."""

import numpy as np
from jax.sharding import Mesh

from dsv3.config import ModelConfig
from sharding.eplb import ExpertMap, rebalance_experts
from sharding.rules import machine_of
from sharding.transport import Kind, build, load_of


def first_expert_map(cfg: ModelConfig, mesh: Mesh, num_redundant_experts: int) -> ExpertMap:
    """The map to `n_routed_experts + num_redundant_experts` slots for an even load, for lack of a measured one.

    The copies of an expert are on different devices, so that they help before a load has been measured.

    Raises ValueError where the devices do not divide the slots, or the model has no routed experts.
    """
    if not cfg.num_moe_layers:
        raise ValueError("expert parallelism needs a model with routed experts; use data_parallel_size alone")
    machine, slots = machine_of(mesh), cfg.n_routed_experts + num_redundant_experts
    build(Kind.RING, machine, slots, load_of(1, cfg.num_experts_per_tok, cfg.hidden_size, fp8_dispatch=False))
    # EPLB packs equal loads in order, which puts both copies of an expert on one device. Loads that fall a little make
    # it fill devices in the opposite order the second time.
    falling = np.linspace(1.001, 1, cfg.n_routed_experts)
    load = np.broadcast_to(falling, (cfg.num_moe_layers, cfg.n_routed_experts))
    return rebalance_experts(load, slots, cfg.n_group, machine.nodes, machine.ranks)
