"""The expert map with which serving starts."""

import numpy as np
from jax.sharding import Mesh

from dsv3.config.model import ModelConfig
from sharding.experts.eplb import ExpertMap, rebalance_experts
from sharding.experts.kind import Kind
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import build
from sharding.mesh import Machine


def first_expert_map(cfg: ModelConfig, mesh: Mesh, num_redundant_experts: int) -> ExpertMap:
    """Maps `n_routed_experts + num_redundant_experts` replicas for an even load, for lack of a measured one.

    Its layers are the decoder's MoE layers, then the MTP modules. The replicas of an expert are on different devices,
    so that they help before a load has been measured.

    Raises ValueError where the devices do not divide the replicas, or the model has no routed experts.
    """
    if not cfg.num_moe_layers:
        raise ValueError("expert parallelism needs a model with routed experts; use data_parallel_size alone")
    machine, replicas = Machine.from_mesh(mesh), cfg.n_routed_experts + num_redundant_experts
    rows = LayerRows.from_widths(1, cfg.num_experts_per_tok, cfg.hidden_size, fp8_dispatch=False)
    build(Kind.RING, machine, replicas, rows)  # refuses what does not divide
    # EPLB packs equal loads in order, which puts both replicas of an expert on one device. Loads that fall a little
    # make it fill devices in the opposite order the second time.
    falling = np.linspace(1.001, 1, cfg.n_routed_experts)
    layers = cfg.num_moe_layers + cfg.num_nextn_predict_layers
    load = np.broadcast_to(falling, (layers, cfg.n_routed_experts))
    return rebalance_experts(load, replicas, cfg.n_group, machine.nodes, machine.devices)
