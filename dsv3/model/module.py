"""The model as a Flax NNX module, for notebooks and training loops that are written with Flax.

Server and trainer use the plain tree. This is the only use of Flax in the project.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3.config.model import ModelConfig
from dsv3.model.decoder import logits
from dsv3.model.forward import ForwardOutput, forward
from dsv3.model.params import Params, declare, initialize


class _Group(nnx.Module):
    """The parameters of one dataclass of the declared tree, under the same names."""

    def __init__(self, tree: Any):
        _set_fields(self, tree)


class DeepseekV3(nnx.Module):
    """A model of the DeepSeek-V3 family with the declared parameters as `nnx.Param` leaves.

    Attributes have the names of `Params` (`model.moe.attention.qkv_a`), so optimizers and checkpoints see the same tree
    as the server.
    """

    def __init__(self, cfg: ModelConfig, params: Params):
        """Wraps existing parameters; shares their arrays."""
        self.cfg = cfg
        _set_fields(self, params)

    @classmethod
    def create(cls, cfg: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32, std: float = 0.02) -> "DeepseekV3":
        """Returns random parameters in `dtype` (router float32), normal with standard deviation `std`."""
        return cls(cfg, initialize(cfg, rngs.params(), dtype, std=std))

    def params(self) -> Params:
        """Returns the plain tree that the served steps and `forward` take; shares the module's arrays."""
        return _collect(declare(self.cfg), self)

    def __call__(self, tokens: jax.Array, *, with_mtp: bool = False) -> ForwardOutput:
        """Runs `forward` on `tokens` `[B, S]` int32."""
        return forward(self.params(), self.cfg, tokens, with_mtp=with_mtp)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits float32 `[..., W]` of hidden states `[..., D]`."""
        return logits(self.params(), self.cfg, hidden)


def _set_fields(module: nnx.Module, tree: Any) -> None:
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if value is not None:
            value = _Group(value) if dataclasses.is_dataclass(value) else nnx.Param(value)
        setattr(module, field.name, value)


def _collect(declared: Any, module: Any) -> Any:
    values = {}
    for field in dataclasses.fields(declared):
        spec, value = getattr(declared, field.name), getattr(module, field.name)
        if dataclasses.is_dataclass(spec) and isinstance(value, nnx.Module):
            value = _collect(spec, value)
        values[field.name] = value[...] if isinstance(value, nnx.Param) else value
    return type(declared)(**values)
