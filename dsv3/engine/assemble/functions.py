"""The served model over the devices of a mesh, as the engine's step functions.

Routed experts are spread over all devices; with tensor parallelism the devices of a rank split the rest among them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from dsv3.config.engine import ForwardProgram
from dsv3.config.model import ModelConfig
from dsv3.engine.assemble.communication import Communication
from dsv3.engine.functions import DraftFunctions, SpreadExperts, StepFunctions
from dsv3.kv_cache.layout import Pool
from dsv3.model import decoder, steps
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.model.layers.expert_parallel import ExpertParallel
from dsv3.model.params import LayerParams, MoeParams, Params, declare
from dsv3.model.steps import StepOutput
from dsv3.model.tensor_parallel import Shards, arrange
from dsv3.model.vocabulary import SharedEmbedding, Vocabulary
from pallas_kernels.backend import Backend
from sharding.experts.eplb import ExpertMap, rebalance_experts
from sharding.experts.placement import Placement, placement_of
from sharding.experts.traffic import LayerRows, Traffic
from sharding.experts.transport import build
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine, partitions, rank_size


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
    build(TransportKind.RING, machine, replicas, rows)  # refuses what does not divide
    # EPLB packs equal loads in order, which puts both replicas of an expert on one device. Loads that fall a little
    # make it fill devices in the opposite order the second time.
    falling = np.linspace(1.001, 1, cfg.n_routed_experts)
    layers = cfg.num_moe_layers + cfg.num_nextn_predict_layers
    load = np.broadcast_to(falling, (layers, cfg.n_routed_experts))
    return rebalance_experts(load, replicas, cfg.n_group, machine.nodes, machine.devices)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpreadParams:
    """Parameters whose experts are stacks of replicas `[L, Er, ...]`, and where these stand.

    The layers of `placement` are the main model's MoE layers, then the MTP modules.
    """

    params: Params
    placement: Placement


def spread_experts(params: Params, cfg: ModelConfig, mesh: Mesh, num_redundant_experts: int) -> SpreadParams:
    """Returns the parameters as the step functions take them: experts copied into the replicas of `first_expert_map`.

    Rows that the devices of a rank split are arranged for it (`tensor_parallel.arrange`). Raises ValueError where the
    model does not divide over the mesh.
    """
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
    return SpreadParams(placed, first_placement(expert_map, num_redundant_experts))


def first_placement(expert_map: ExpertMap, num_redundant_experts: int) -> Placement:
    """Returns the placement of a map, with room for any other of as many replicas: numpy arrays."""
    return placement_of(expert_map, num_redundant_experts + 1)


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

    Transport and schedule are chosen per bucket while its step is traced. `transport` is "auto" or a name, `combine`
    "auto" or "int8" (sums come back packed). `dtype` of activations and `fp8` (whether expert weights are FP8; None:
    as in the configuration) say what a row takes on the wire. Unless it `overlaps`, one collective is under way at a
    time. Raises ValueError for a transport these devices do not have.
    """
    replicas = cfg.n_routed_experts + num_redundant_experts
    how_sent: dict[str, Any] = {"transport": transport, "combine": combine, "dtype": dtype, "fp8": fp8}
    communication = Communication.from_mesh(mesh, cfg, replicas, **how_sent, overlaps=overlaps)
    shards, vocabulary = Shards(rank_size(mesh)), Vocabulary.from_mesh(cfg, mesh)

    own = functools.partial(_own, vocabulary)

    def how(spread: SpreadParams, tokens: int, is_prefill: bool) -> dict[str, Any]:
        """Returns how a step of `tokens` tokens per rank runs, as arguments of `steps.prefill` or `decode`."""
        return {
            "backend": backend,
            "routed": ExpertParallel(communication.transport(tokens, is_prefill), shards),
            "placement": spread.placement,
            "schedule": communication.schedule(tokens, is_prefill),
        }

    def predicting(spread: SpreadParams, tokens: int) -> dict[str, Any]:
        """Returns how an MTP module's step of `tokens` tokens per rank runs."""
        routed = ExpertParallel(communication.draft_transport(tokens), shards)
        placement = jax.tree.map(lambda array: array[cfg.num_moe_layers :], spread.placement)
        return {"backend": backend, "routed": routed, "placement": placement}

    def agreed(out: StepOutput, routed: ExpertParallel) -> StepOutput:
        """Returns the output with the most overflows of any device: one number crosses, behind the last layer."""
        if not routed.transport.hops:
            return out
        return dataclasses.replace(out, overflows=jax.lax.pmax(out.overflows, communication.machine.axes))

    def prefill(spread: SpreadParams, cfg: ModelConfig, batch: PrefillBatch, pages: Pool) -> StepOutput:
        chosen = how(spread, batch.tokens.shape[0], True)
        return agreed(steps.prefill(own(spread), cfg, batch, pages, **chosen), chosen["routed"])

    def decode(spread: SpreadParams, cfg: ModelConfig, batch: DecodeBatch, pages: Pool) -> StepOutput:
        chosen = how(spread, batch.tokens.size, False)
        return agreed(steps.decode(own(spread), cfg, batch, pages, **chosen), chosen["routed"])

    def logits(spread: SpreadParams, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
        return decoder.logits(spread.params, cfg, hidden, backend)

    def predict(
        spread: SpreadParams,
        cfg: ModelConfig,
        batch: PrefillBatch | DecodeBatch,
        pages: Pool,
        hidden: jax.Array,
    ) -> StepOutput:
        chosen = predicting(spread, batch.tokens.size)
        return agreed(steps.predict(own(spread), cfg, batch, pages, hidden, **chosen), chosen["routed"])

    def traffic(program: ForwardProgram) -> Traffic:
        if program.of_module:
            return communication.draft_traffic(program.tokens)
        return communication.traffic(program.tokens, program.kind == "prefill")

    placed = SpreadParams(partitions(declare(cfg), vocabulary.table), Placement(PartitionSpec(), PartitionSpec()))
    draft = DraftFunctions(dtype, predict, predict) if cfg.num_nextn_predict_layers else None
    experts = _experts(cfg, replicas, communication.machine)
    which = communication.overlaps, vocabulary
    return StepFunctions(prefill, decode, logits, placed, experts, traffic, draft, dtype, True, *which)


def _own(vocabulary: Vocabulary, spread: SpreadParams) -> Params:
    """Returns the parameters of this device, as the steps take them."""
    params = spread.params
    return dataclasses.replace(params, embed=SharedEmbedding(params.embed, vocabulary))


def _experts(cfg: ModelConfig, replicas: int, machine: Machine) -> SpreadExperts:
    """Returns what the engine knows of the experts: stacks of the main model, and of its MTP modules if it has some."""
    layers = tuple(filter(None, (cfg.num_moe_layers, cfg.num_nextn_predict_layers)))
    return SpreadExperts(layers, cfg.n_routed_experts, replicas, cfg.n_group, machine, _take, _put)


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
