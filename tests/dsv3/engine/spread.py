"""Parameters in host memory as the step functions of spread experts take them: what `load_spread` loads."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dsv3.config.model import ModelConfig
from dsv3.engine.expert_parallel import SpreadParams, first_expert_map
from dsv3.model.params import Params, declare
from dsv3.model.tensor_parallel import arrange
from sharding.experts.placement import placement_of
from sharding.mesh import rank_size


def spread_experts(params: Params, cfg: ModelConfig, mesh: Mesh, num_redundant_experts: int) -> SpreadParams:
    """Returns the parameters with experts copied into the replicas of `first_expert_map`, and rows arranged."""
    expert_map = first_expert_map(cfg, mesh, num_redundant_experts)
    moe, mtp = np.split(expert_map.phy2log, [cfg.num_moe_layers])
    declared, arranged = declare(cfg), arrange(params, cfg, rank_size(mesh))

    def replicated(chosen: np.ndarray, specs: Any, tree: Any) -> Any:
        layer = np.arange(len(chosen))[:, None]

        def one(spec: Any, leaf: Any) -> Any:
            return jax.tree.map(lambda a: a[layer, chosen], leaf) if "experts" in spec.axes else leaf

        return jax.tree.map(one, specs, tree)

    placed = dataclasses.replace(
        arranged, moe=replicated(moe, declared.moe, arranged.moe), mtp=replicated(mtp, declared.mtp, arranged.mtp)
    )
    return SpreadParams(placed, placement_of(expert_map, num_redundant_experts + 1))
