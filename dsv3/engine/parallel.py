"""The served model with its routed experts spread over the ranks of a mesh, as the engine's step functions."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dsv3.config import ModelConfig
from dsv3.engine.step_bodies import StepFunctions
from dsv3.model import decoder, steps
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.model.expert_parallel import ExpertParallel
from dsv3.model.micro_batches import decode_overlapped, prefill_overlapped
from dsv3.model.overlap import worth_overlapping
from dsv3.model.params import Params, declare
from dsv3.model.steps import StepOutput
from pallas_kernels.backend import Backend
from sharding.collectives import Overlap, resolve_overlap
from sharding.eplb import rebalance_experts
from sharding.placement import Placement, placement_of
from sharding.rules import machine_of, partition
from sharding.transport import Kind, Transport, build, choose, load_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpreadParams:
    """Parameters whose experts stand in physical slots `[L, R, ...]`, and where each logical expert's copies are."""

    params: Params
    placement: Placement


def spread_experts(params: Params, cfg: ModelConfig, mesh: Mesh, num_redundant_experts: int) -> SpreadParams:
    """Copies experts into `n_routed_experts + num_redundant_experts` slots, evenly, for lack of a measured load.

    The MTP modules are left out: they are not served. Raises ValueError where the ranks do not divide the slots, or the
    model has no routed experts.
    """
    if params.moe is None:
        raise ValueError("expert parallelism needs a model with routed experts")
    machine, slots = machine_of(mesh), cfg.n_routed_experts + num_redundant_experts
    build(Kind.RING, machine, slots, load_of(1, cfg.num_experts_per_tok, cfg.hidden_size, fp8_dispatch=False))
    even = np.ones((cfg.num_moe_layers, cfg.n_routed_experts))
    expert_map = rebalance_experts(even, slots, cfg.n_group, machine.nodes, machine.ranks)
    layer = np.arange(cfg.num_moe_layers)[:, None]

    def to_slots(spec: Any, leaf: Any) -> Any:
        return jax.tree.map(lambda a: a[layer, expert_map.phy2log], leaf) if "experts" in spec.axes else leaf

    served = dataclasses.replace(params, mtp=None)
    placed = jax.tree.map(to_slots, _declared(cfg), served)
    return SpreadParams(placed, placement_of(expert_map, num_redundant_experts + 1))


def expert_parallel_functions(
    cfg: ModelConfig, mesh: Mesh, num_redundant_experts: int, backend: Backend | None = None
) -> StepFunctions:
    """Step functions on `SpreadParams`; transport and overlap are chosen for each bucket while it is traced."""
    slots = cfg.n_routed_experts + num_redundant_experts
    machine, overlap = machine_of(mesh), resolve_overlap(mesh.devices.flat[0].platform)

    def transport(tokens: int) -> Transport:
        load = load_of(tokens, cfg.num_experts_per_tok, cfg.hidden_size, fp8_dispatch=cfg.fp8 is not None)
        return choose(machine, slots, load, overlap)

    def run(spread: SpreadParams, batch: Any, pages: jax.Array, tokens: int, plain: Any, overlapped: Any) -> StepOutput:
        is_prefill = isinstance(batch, PrefillBatch)
        step, chosen = plain, transport(tokens)
        if overlap is not Overlap.NONE and tokens % 2 == 0 and worth_overlapping(tokens, machine.ranks, is_prefill):
            half = transport(tokens // 2)
            step, chosen = (overlapped, half) if half.hops else (plain, chosen)
        routed = ExpertParallel(chosen, spread.placement)
        return step(spread.params, cfg, batch, pages, backend=backend, routed=routed)

    def prefill(spread: SpreadParams, cfg: ModelConfig, batch: PrefillBatch, pages: jax.Array) -> StepOutput:
        return run(spread, batch, pages, batch.tokens.shape[0], steps.prefill, prefill_overlapped)

    def decode(spread: SpreadParams, cfg: ModelConfig, batch: DecodeBatch, pages: jax.Array) -> StepOutput:
        return run(spread, batch, pages, batch.tokens.size, steps.decode, decode_overlapped)

    def logits(spread: SpreadParams, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
        return decoder.logits(spread.params, cfg, hidden)

    specs = jax.tree.map(lambda spec: partition(spec.axes), _declared(cfg))
    return StepFunctions(prefill, decode, logits, SpreadParams(specs, Placement(PartitionSpec(), PartitionSpec())))


def _declared(cfg: ModelConfig) -> Params:
    return dataclasses.replace(declare(cfg), mtp=None)
