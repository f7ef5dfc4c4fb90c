"""The served model over the devices of a mesh, as the engine's step functions, and its weights.

Routed experts are spread over all devices; with tensor parallelism the devices of a rank divide the rest among them.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from dsv3.checkpoint import load_params
from dsv3.config.engine import ForwardProgram
from dsv3.config.model import ModelConfig
from dsv3.engine.communication import Communication
from dsv3.engine.components import Reading
from dsv3.engine.functions import BlockFunctions, DraftFunctions, SpreadExperts, StepFunctions
from dsv3.kv_cache.layout import Pool
from dsv3.model import decoder, dspark, steps
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.model.layers.expert_parallel import ExpertParallel
from dsv3.model.params import LayerParams, MoeParams, Params, declare
from dsv3.model.steps import StepOutput
from dsv3.model.tensor_parallel import Shards
from dsv3.model.vocabulary import SharedEmbedding, Vocabulary
from pallas_kernels.backend import Backend
from sharding.experts.eplb import ExpertMap, rebalance_experts
from sharding.experts.placement import Placement, placement_of
from sharding.experts.traffic import LayerRows, Traffic
from sharding.experts.transport import build
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine, partitions, rank_size, shardings


def first_expert_map(cfg: ModelConfig, mesh: Mesh, num_redundant_experts: int) -> ExpertMap:
    """Maps `n_routed_experts + num_redundant_experts` replicas for an even load, before one is measured.

    Its layers are the decoder's MoE layers, then those that make drafts. The replicas of an expert are on different
    devices, so that they help from the start.

    Raises ValueError where the devices do not divide the replicas, or the model has no routed experts.
    """
    if not cfg.num_moe_layers:
        raise ValueError("expert parallelism needs a model with routed experts; use data_parallel_size alone")
    machine, replicas = Machine.from_mesh(mesh), cfg.n_routed_experts + num_redundant_experts
    rows = LayerRows.from_widths(1, cfg.num_experts_per_tok, cfg.hidden_size, fp8_dispatch=False)
    build(TransportKind.RING, machine, replicas, rows)  # raises where devices do not divide replicas
    # `rebalance_experts` packs equal loads in order, which puts both replicas of an expert on one device. With slightly
    # decreasing loads it fills devices in the opposite order the second time.
    decreasing = np.linspace(1.001, 1, cfg.n_routed_experts)
    layers = cfg.num_moe_layers + cfg.num_draft_layers
    load = np.broadcast_to(decreasing, (layers, cfg.n_routed_experts))
    return rebalance_experts(load, replicas, cfg.n_group, machine.nodes, machine.devices)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpreadParams:
    """Parameters whose experts are stacks of replicas `[L, Er, ...]`, and their placement.

    The layers of `placement` are the main model's MoE layers, then those that make drafts.
    """

    params: Params
    placement: Placement


def expert_parallel_functions(
    cfg: ModelConfig,
    mesh: Mesh,
    num_redundant_experts: int,
    backend: Backend | None = None,
    *,
    transport: str = "auto",
    combine: str = "auto",
    dtype: DTypeLike = jnp.bfloat16,
    fp8: bool | None = None,
    overlaps: bool = True,
) -> StepFunctions:
    """Returns the step functions on `SpreadParams`.

    Transport and schedule are chosen per bucket while its step is traced; `transport`, `combine`, `dtype` (of
    activations), `fp8` (of expert weights) and `overlaps` are those of `Communication.from_mesh`. Raises ValueError for
    a transport that these devices do not have.
    """
    replicas = cfg.n_routed_experts + num_redundant_experts
    wire_options: dict[str, Any] = {"transport": transport, "combine": combine, "dtype": dtype, "fp8": fp8}
    communication = Communication.from_mesh(mesh, cfg, replicas, **wire_options, overlaps=overlaps)
    shards, vocabulary = Shards(rank_size(mesh)), Vocabulary.from_mesh(cfg, mesh)

    own = functools.partial(_own, vocabulary)

    def step_arguments(spread: SpreadParams, tokens: int, is_prefill: bool) -> dict[str, Any]:
        """Returns the arguments of `steps.prefill` or `decode` for a step of `tokens` tokens per rank."""
        return {
            "backend": backend,
            "routed": ExpertParallel(communication.transport(tokens, is_prefill), shards),
            "placement": spread.placement,
            "schedule": communication.schedule(tokens, is_prefill),
        }

    def prefill(spread: SpreadParams, cfg: ModelConfig, batch: PrefillBatch, pages: Pool) -> StepOutput:
        arguments = step_arguments(spread, batch.tokens.shape[0], True)
        out = steps.prefill(own(spread), cfg, batch, pages, **arguments)
        return _with_all_overflows(out, arguments["routed"], communication)

    def decode(spread: SpreadParams, cfg: ModelConfig, batch: DecodeBatch, pages: Pool) -> StepOutput:
        arguments = step_arguments(spread, batch.tokens.size, False)
        out = steps.decode(own(spread), cfg, batch, pages, **arguments)
        return _with_all_overflows(out, arguments["routed"], communication)

    def logits(spread: SpreadParams, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
        return decoder.logits(spread.params, cfg, hidden, backend)

    def traffic(program: ForwardProgram) -> Traffic:
        if program.of_module:
            return communication.draft_traffic(program.tokens)
        return communication.traffic(program.tokens, program.kind == "prefill")

    placed = SpreadParams(partitions(declare(cfg), vocabulary.table), Placement(PartitionSpec(), PartitionSpec()))
    draft = _draft_functions(cfg, communication, shards, vocabulary, backend, dtype)
    layers = tuple(filter(None, (cfg.num_moe_layers, cfg.num_draft_layers)))
    experts = SpreadExperts(layers, cfg.n_routed_experts, replicas, cfg.n_group, communication.machine, _take, _put)
    connect = functools.partial(communication.connect, mesh)
    which = communication.overlaps, vocabulary, connect, communication.library_bytes
    return StepFunctions(prefill, decode, logits, placed, experts, traffic, draft, dtype, True, *which)


def _with_all_overflows(out: StepOutput, routed: ExpertParallel, communication: Communication) -> StepOutput:
    """Returns the output with the most overflows of any device: one number is exchanged, behind the last layer."""
    if not routed.transport.hops:
        return out
    return dataclasses.replace(out, overflows=jax.lax.pmax(out.overflows, communication.machine.axes))


def _draft_functions(
    cfg: ModelConfig,
    communication: Communication,
    shards: Shards,
    vocabulary: Vocabulary,
    backend: Backend | None,
    dtype: DTypeLike,
) -> DraftFunctions | BlockFunctions | None:
    """Returns the functions of the layers that make drafts, if the model has some."""

    def over_devices(step: Callable[..., StepOutput], spread: SpreadParams, tokens: int, *given: Any) -> StepOutput:
        """Runs a step of `tokens` tokens per rank with its experts on all devices."""
        routed = ExpertParallel(communication.draft_transport(tokens), shards)
        placement = jax.tree.map(lambda array: array[cfg.num_moe_layers :], spread.placement)
        arguments: dict[str, Any] = {"backend": backend, "routed": routed, "placement": placement}
        return _with_all_overflows(step(_own(vocabulary, spread), *given, **arguments), routed, communication)

    def predict(
        spread: SpreadParams,
        cfg: ModelConfig,
        batch: PrefillBatch | DecodeBatch,
        pages: Pool,
        draft_input: jax.Array,
    ) -> StepOutput:
        return over_devices(steps.predict, spread, batch.tokens.size, cfg, batch, pages, draft_input)

    def propose(spread: SpreadParams, cfg: ModelConfig, batch: DecodeBatch, pages: Pool) -> StepOutput:
        tokens = batch.tokens.size * dspark.dspark_of(cfg).block_size
        return over_devices(dspark.propose, spread, tokens, cfg, batch, pages)

    def write(spread: SpreadParams, *given: Any) -> Pool:
        return dspark.write_context(spread.params, *given, backend=backend)

    def choose(spread: SpreadParams, *given: Any) -> tuple[jax.Array, jax.Array]:
        return dspark.choose(spread.params, *given)

    if cfg.dspark is not None:
        return BlockFunctions(dtype, write, propose, choose)
    return DraftFunctions(dtype, predict) if cfg.num_nextn_predict_layers else None


def _own(vocabulary: Vocabulary, spread: SpreadParams) -> Params:
    """Returns the parameters of this device, as the steps take them."""
    params = spread.params
    return dataclasses.replace(params, embed=SharedEmbedding(params.embed, vocabulary))


def _take(spread: SpreadParams) -> tuple[tuple[Any, ...], Placement]:
    """Returns the routed experts of each stack of MoE layers, and their placement."""
    params = spread.params
    stacks = (params.moe,) if params.mtp is None else (params.moe, params.mtp.layers)
    return tuple((moe.gate_up, moe.down) for moe in map(_moe, stacks)), spread.placement


def _put(spread: SpreadParams, stacks: tuple[Any, ...], placement: Placement) -> SpreadParams:
    """Returns `spread` with other experts and another placement."""
    params = dataclasses.replace(spread.params, moe=_with_experts(spread.params.moe, stacks[0]))
    if params.mtp is not None:
        mtp = dataclasses.replace(params.mtp, layers=_with_experts(params.mtp.layers, stacks[1]))
        params = dataclasses.replace(params, mtp=mtp)
    return SpreadParams(params, placement)


def _with_experts(layers: LayerParams | None, experts: tuple[Any, Any]) -> LayerParams:
    assert layers is not None
    gate_up, down = experts
    return dataclasses.replace(layers, moe=dataclasses.replace(_moe(layers), gate_up=gate_up, down=down))


def _moe(layers: LayerParams | None) -> MoeParams:
    assert layers is not None and layers.moe is not None  # `first_expert_map` refuses models without
    return layers.moe


def load_replicated(
    directory: str | os.PathLike[str], cfg: ModelConfig, specs: Any, mesh: Mesh, read: Reading
) -> Params:
    """Loads the parameters onto every device of `mesh`, partitioned by `specs`; each process reads them once.

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
    """Loads the parameters with experts in the replicas of `first_expert_map`, partitioned by `specs`.

    The mesh may span processes: each reads what its own devices hold. Raises as `load_params` and `first_expert_map`.
    """
    expert_map = first_expert_map(cfg, mesh, num_redundant_experts)
    where = shardings(specs, mesh)
    first = placement_of(expert_map, num_redundant_experts + 1)  # with capacity for any other of as many replicas
    placement = jax.tree.map(
        lambda array, where: jax.make_array_from_callback(array.shape, where, array.__getitem__), first, where.placement
    )
    params = load_params(
        directory,
        cfg,
        shardings=where.params,
        phy2log=expert_map.phy2log,
        tensor_parallel_size=rank_size(mesh),
        **dataclasses.asdict(read),
    )
    return SpreadParams(params, placement)
