"""What an engine is made of."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dsv3.config.engine import EngineConfig
from dsv3.config.model import ModelConfig
from dsv3.engine.functions import StepFunctions
from dsv3.engine.memory import Accounted
from sharding.mesh import RANKS, rank_mesh, rank_size, shardings


@dataclasses.dataclass(frozen=True)
class EngineComponents:
    """A model and where it is served.

    `functions` are the model's step functions (`model_functions()`, or a stand-in with the same signatures), `params`
    its parameters as these take them. The engine owns them from then on: experts that it moves are written in place.
    `model_cfg` gives vocabulary, end tokens and cache layout, `cfg` the limits. The devices of `mesh` may belong to
    several processes. `tokenizer` is the `tokenizer.json` that grammars are run over; without one no answer can be held
    to a grammar. `description` is what people are told of the model, `memory` by what account the pool was sized; None:
    nothing bounds it, as on a CPU.

    Raises ValueError where the mesh has other ranks than the limits say.
    """

    functions: StepFunctions
    params: Any
    model_cfg: ModelConfig
    cfg: EngineConfig
    mesh: Mesh
    tokenizer: Path | None = None
    description: str = ""
    memory: Accounted | None = None

    def __post_init__(self) -> None:
        ranks = self.mesh.shape[RANKS[0]] * self.mesh.shape[RANKS[1]]
        if (ranks, rank_size(self.mesh)) != (self.cfg.num_ranks, self.cfg.tensor_parallel_size):
            raise ValueError(
                f"{self.cfg.num_ranks} ranks of tensor_parallel_size {self.cfg.tensor_parallel_size} were asked for, "
                f"but the mesh has {ranks} of {rank_size(self.mesh)} devices each"
            )

    @property
    def shapes(self) -> "EngineComponents":
        """The same with shapes for parameters, with the shardings that they are served with."""

        def place(sharding: Any, part: Any) -> Any:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part)

        where = shardings(self.functions.param_specs, self.mesh)
        return dataclasses.replace(self, params=jax.tree.map(place, where, self.params))

    @property
    def takes_grammars(self) -> bool:
        """Whether answers may be held to grammars."""
        return self.tokenizer is not None

    @classmethod
    def on_devices(
        cls,
        functions: StepFunctions,
        params: Any,
        model_cfg: ModelConfig,
        cfg: EngineConfig,
        devices: list[jax.Device] | None = None,
    ) -> "EngineComponents":
        """Returns parts on a mesh of `devices`, the first of the default backend if not given.

        Raises ValueError where there are too few or too many.
        """
        devices = devices or jax.devices()[: cfg.num_devices]
        if len(devices) != cfg.num_devices:
            raise ValueError(
                f"{cfg.num_ranks} ranks of tensor_parallel_size {cfg.tensor_parallel_size} need {cfg.num_devices} "
                f"devices, but {len(devices)} were given"
            )
        return cls(functions, params, model_cfg, cfg, rank_mesh(devices, cfg.num_nodes, cfg.tensor_parallel_size))
