"""Weights from a model directory straight to the devices that serve them. No process holds more than its share."""

import dataclasses
import os
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from dsv3.checkpoint import load_params
from dsv3.config.model import ModelConfig
from dsv3.engine.assemble.functions import SpreadParams, first_expert_map, first_placement
from dsv3.model.params import Params
from sharding.mesh import rank_size, shardings


@dataclasses.dataclass(frozen=True)
class Reading:
    """How weights are read: their dtype, whether a progress bar is shown, and what FP8 and INT4 become.

    `threads` of them read at once. With `shapes` none is read, and shapes stand in their places.
    """

    dtype: Any
    fp8: Literal["keep", "dequantize", "quantize"]
    progress: bool
    int4: Literal["keep", "fp8", "dequantize"] = "keep"
    shapes: bool = False
    threads: int = 8


def load_replicated(
    directory: str | os.PathLike[str], cfg: ModelConfig, specs: Any, mesh: Mesh, read: Reading
) -> Params:
    """Loads the parameters onto every device of `mesh` as the partitions `specs` say; each process reads them once.

    Raises as `load_params` does.
    """
    return load_params(directory, cfg, shardings=shardings(specs, mesh), **dataclasses.asdict(read))


def load_spread(
    directory: str | os.PathLike[str],
    cfg: ModelConfig,
    specs: SpreadParams,
    mesh: Mesh,
    num_redundant_experts: int,
    read: Reading,
) -> SpreadParams:
    """Loads what `spread_experts` makes in memory: the replicas of `first_expert_map`, as the partitions `specs` say.

    The mesh may span processes: each reads what its own devices hold. Raises as `load_params` and `first_expert_map`.
    """
    expert_map = first_expert_map(cfg, mesh, num_redundant_experts)
    where = shardings(specs, mesh)
    placement = jax.tree.map(_on_devices, first_placement(expert_map, num_redundant_experts), where.placement)
    params = load_params(
        directory,
        cfg,
        shardings=where.params,
        phy2log=expert_map.phy2log,
        tensor_parallel_size=rank_size(mesh),
        **dataclasses.asdict(read),
    )
    return SpreadParams(params, placement)


def _on_devices(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """Returns `array`, which every process has, as one array of all processes."""
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
