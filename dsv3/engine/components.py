"""What an engine is made of: functions, parameters, limits, devices."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from dsv3.config.engine import EngineConfig
from dsv3.config.model import ModelConfig
from dsv3.engine.functions import StepFunctions
from dsv3.engine.memory import PoolSizing
from sharding.mesh import CONTEXT, RANKS, rank_mesh, rank_size, shardings


@dataclasses.dataclass(frozen=True)
class Reading:
    """How weights are read: their dtype, whether a progress bar is shown, and what FP8, INT4 and FP4 become.

    `threads` of them read at once. With `shapes` no weight is read: shapes stand in for them.
    """

    dtype: Any
    fp8: Literal["keep", "dequantize", "quantize"]
    progress: bool
    int4: Literal["keep", "fp8", "dequantize"] = "keep"
    fp4: Literal["fp8", "keep"] = "fp8"
    shapes: bool = False
    threads: int = 8


@dataclasses.dataclass(frozen=True)
class EngineComponents:
    """A model and the devices that serve it.

    `functions` are the model's step functions (`model_functions()`, or a stand-in with the same signatures), `params`
    its parameters as these functions take them. The engine owns them from then on: experts that it moves are written in
    place. `model_cfg` has vocabulary, end tokens and cache layout, `cfg` the limits. The devices of `mesh` may belong
    to several processes. `tokenizer` is the `tokenizer.json` that grammars are compiled for; without one requests
    cannot be constrained. `description` is one line about the model, for logs and the dashboard. `memory` is the
    account that sized the page pool; None on a CPU. `reading` is how the weights were read; without it they cannot be
    updated.

    Raises ValueError where the mesh has other ranks than the limits.
    """

    functions: StepFunctions
    params: Any
    model_cfg: ModelConfig
    cfg: EngineConfig
    mesh: Mesh
    tokenizer: Path | None = None
    description: str = ""
    memory: PoolSizing | None = None
    reading: Reading | None = None

    def __post_init__(self) -> None:
        ranks = self.mesh.shape[RANKS[0]] * self.mesh.shape[RANKS[1]]
        if (ranks, rank_size(self.mesh)) != (self.cfg.num_ranks, self.cfg.tensor_parallel_size):
            raise ValueError(
                f"{self.cfg.num_ranks} ranks of tensor_parallel_size {self.cfg.tensor_parallel_size} were requested, "
                f"but the mesh has {ranks} of {rank_size(self.mesh)} devices each"
            )
        divided = self.cfg.decode_context_parallel_size
        if not self.mesh.shape[CONTEXT] == self.model_cfg.context_shards == divided:
            raise ValueError(
                f"decode_context_parallel_size {divided} was requested, but the mesh divides pages over "
                f"{self.mesh.shape[CONTEXT]} devices, and the model's pages suit {self.model_cfg.context_shards}"
            )

    @property
    def shapes(self) -> "EngineComponents":
        """The same components with shapes and serving shardings in place of parameters."""

        def with_sharding(sharding: Any, subtree: Any) -> Any:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), subtree)

        tree = shardings(self.functions.param_specs, self.mesh)
        return dataclasses.replace(self, params=jax.tree.map(with_sharding, tree, self.params))

    @classmethod
    def on_devices(
        cls,
        functions: StepFunctions,
        params: Any,
        model_cfg: ModelConfig,
        cfg: EngineConfig,
        devices: list[jax.Device] | None = None,
    ) -> "EngineComponents":
        """Returns components on a mesh of `devices`, by default the first of the default backend.

        Raises ValueError for too few or too many devices.
        """
        devices = devices or jax.devices()[: cfg.num_devices]
        if len(devices) != cfg.num_devices:
            raise ValueError(
                f"{cfg.num_ranks} ranks of tensor_parallel_size {cfg.tensor_parallel_size} need {cfg.num_devices} "
                f"devices, but {len(devices)} were given"
            )
        split = cfg.tensor_parallel_size, cfg.decode_context_parallel_size
        return cls(functions, params, model_cfg, cfg, rank_mesh(devices, cfg.num_nodes, *split))
