"""The toy with routed experts, which generates other tokens where experts are not where the placement says.

An expert's weight is its own number. The tokens that a request decodes select the expert that its first token names, in
each layer. So all layers move alike, and a map whose layers differ is that of half a move.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dsv3.config.model import ModelConfig
from dsv3.engine.device.devices import Devices
from dsv3.engine.functions import SpreadExperts, StepFunctions
from dsv3.kv_cache.layout import Pool
from dsv3.model.batch import DecodeBatch, PrefillBatch
from sharding.experts.eplb import ExpertMap, rebalance_experts
from sharding.experts.placement import Placement, placement_of
from sharding.experts.rebalance import LayerMove
from sharding.experts.traffic import Traffic
from sharding.mesh import DEVICES, Machine
from tests.dsv3.engine import toy

LAYERS, EXPERTS, REPLICAS = 3, 3, 4
ENDS = "ends"
FIRST: ExpertMap = rebalance_experts(np.ones((LAYERS, EXPERTS)), REPLICAS, 1, 1, 2)


class ToyParams(NamedTuple):
    """`weights` [L, Er, 1] float32, and their placement."""

    weights: Any
    placement: Placement


class CountedOutput(NamedTuple):
    hidden: Any
    pages: Any
    expert_counts: Any
    overflows: Any


PARAMS = ToyParams(FIRST.phy2log[:, :, None].astype(np.float32), placement_of(FIRST, REPLICAS - EXPERTS + 1))
_SPECS = ToyParams(PartitionSpec(None, DEVICES), Placement(PartitionSpec(), PartitionSpec()))


def spread_over(mesh: Mesh) -> SpreadExperts:
    """What the engine knows of the experts, on at most two devices."""
    return SpreadExperts((LAYERS,), EXPERTS, REPLICAS, 1, Machine.from_mesh(mesh), _take, _put)


def functions(mesh: Mesh) -> StepFunctions:
    """The toy's step functions; a device whose replicas are not those of the placement gets other tokens."""
    experts = spread_over(mesh)

    def prefill(params: ToyParams, cfg: ModelConfig, batch: PrefillBatch, pages: Pool) -> CountedOutput:
        return counted(toy.prefill(wrong(params), cfg, batch, pages), jnp.zeros(EXPERTS, jnp.int32))

    def decode(params: ToyParams, cfg: ModelConfig, batch: DecodeBatch, pages: Pool) -> CountedOutput:
        out = toy.decode(wrong(params), cfg, batch, pages)
        latents = out.pages["latents"]
        first = latents[jnp.clip(batch.page_table[:, 0], 0, latents.shape[0] - 1), 0, 0].astype(jnp.int32)
        chosen = (first[:, None] % EXPERTS == jnp.arange(EXPERTS)) & (batch.lengths > 0)[:, None]
        return counted(out, chosen.sum(axis=0, dtype=jnp.int32))

    def wrong(params: ToyParams) -> jax.Array:
        """Zero, or more where an expert that the placement has on this device is not there."""
        weights, placement = params.weights[..., 0], params.placement
        place = placement.replicas - jax.lax.axis_index(experts.machine.axes) * weights.shape[1]
        found = jnp.take_along_axis(weights[:, None], jnp.clip(place, 0, weights.shape[1] - 1), axis=2)
        missing = found != jnp.arange(EXPERTS, dtype=weights.dtype)[:, None]
        return jnp.sum(missing & (place >= 0) & (place < weights.shape[1])).astype(jnp.float32)

    def counted(out: toy.ToyOutput, chosen: jax.Array) -> CountedOutput:
        return CountedOutput(*out, jnp.broadcast_to(chosen, (LAYERS, EXPERTS)), jnp.zeros((), jnp.int32))

    return StepFunctions(prefill, decode, toy.logits, _SPECS, experts, lambda program: Traffic())


Move = Callable[[Devices, LayerMove], jax.Array]


def ending(move: Move, order: Path) -> Move:
    """Moves layers, but this process gets the signal whose number is in `order` at the last layer.

    The leader gets it before its part of that move, when the others have its command; a follower after its part.
    """

    def moves(devices: Devices, layer_move: LayerMove) -> jax.Array:
        ends = int(layer_move.layer) == LAYERS - 1 and order.exists()
        intact = None if ends and jax.process_index() == 0 else move(devices, layer_move)
        if ends:
            number = int(order.read_text())
            order.unlink()
            os.kill(os.getpid(), number)
        return intact

    return moves


def _take(params: ToyParams) -> tuple[tuple[Any, ...], Placement]:
    return (params.weights,), params.placement


def _put(params: ToyParams, stacks: tuple[Any, ...], placement: Placement) -> ToyParams:
    return ToyParams(stacks[0], placement)
