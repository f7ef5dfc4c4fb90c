"""The state of a run as a checkpoint holds it: layer by layer, so that any mesh can take its part."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from dsv3.config.model import ModelConfig
from dsv3.model.params import Params
from training.pipeline.stages import StageParams, cut, join, take
from training.step import TrainState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SavedState:
    """A `TrainState` without its step, which is the checkpoint's name.

    `params` has all layers, each in arrays of its own. `moments` is AdamW's state, with trees like `params` in it.
    """

    params: StageParams
    moments: Any


@functools.partial(jax.jit, static_argnames="cfg")
def by_layer(state: TrainState, cfg: ModelConfig) -> SavedState:
    """Returns the state of one device as it is saved, in arrays of its own."""
    (everything,) = cut(cfg, 1)
    _, moments = state.optimizer
    return SavedState(
        take(state.params, cfg, everything),
        map_parts(lambda params: take(params, cfg, everything), moments, kind=Params),
    )


def stacked(saved: SavedState, cfg: ModelConfig, step: int) -> TrainState:
    """Returns the state of one device, as arrays on this host, from saved ones on this host."""
    moments = map_parts(lambda params: join([params], cfg), saved.moments)
    return TrainState(join([saved.params], cfg), (optax.EmptyState(), moments), jax.numpy.int32(step))


def first_of(leaf: Any, *_: Any) -> Any:
    """Returns the first of leaves that are all alike."""
    return leaf


def map_parts(
    function: Callable[..., Any], *states: Any, kind: type = StageParams, other: Callable[..., Any] = first_of
) -> Any:
    """Returns an optimiser's state with `function` of each tree of parameters in it, and `other` of each other leaf.

    `kind` is what a tree of parameters is. Both functions take a node of each of the states.
    """
    return jax.tree.map(
        lambda *nodes: function(*nodes) if isinstance(nodes[0], kind) else other(*nodes),
        *states,
        is_leaf=lambda node: isinstance(node, kind),
    )
