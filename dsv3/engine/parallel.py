"""The served model over the devices of a mesh, as the engine's step functions.

Routed experts are spread over all devices; with tensor parallelism the devices of a rank split the rest among them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from dsv3.config import ModelConfig
from dsv3.engine.communication import Communication, Form
from dsv3.engine.expert_map import first_expert_map
from dsv3.engine.functions import SpreadExperts, StepFunctions
from dsv3.model import decoder, steps
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.model.expert_parallel import ExpertParallel
from dsv3.model.micro_batches import decode_overlapped, decode_with_hooks, prefill_overlapped, prefill_with_hooks
from dsv3.model.params import MoeParams, Params, declare
from dsv3.model.steps import StepOutput
from dsv3.model.tensor_parallel import Shards, arrange
from pallas_kernels.backend import Backend
from sharding.placement import Placement, placement_of
from sharding.rules import partition, rank_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpreadParams:
    """Parameters whose experts stand in physical slots `[L, R, ...]`, and where each logical expert's copies are."""

    params: Params
    placement: Placement


def spread_experts(params: Params, cfg: ModelConfig, mesh: Mesh, num_redundant_experts: int) -> SpreadParams:
    """Parameters as the step functions take them: experts copied into the slots of `first_expert_map`.

    What the devices of a rank split is arranged for it (`tensor_parallel.arrange`). The MTP modules are left out: they
    are not served. Raises ValueError where the model does not divide over the mesh.
    """
    expert_map = first_expert_map(cfg, mesh, num_redundant_experts)
    layer = np.arange(cfg.num_moe_layers)[:, None]

    def to_slots(spec: Any, leaf: Any) -> Any:
        return jax.tree.map(lambda a: a[layer, expert_map.phy2log], leaf) if "experts" in spec.axes else leaf

    arranged = arrange(dataclasses.replace(params, mtp=None), cfg, rank_size(mesh))
    placed = jax.tree.map(to_slots, _declared(cfg), arranged)
    return SpreadParams(placed, placement_of(expert_map, num_redundant_experts + 1))


def expert_parallel_functions(
    cfg: ModelConfig,
    mesh: Mesh,
    num_redundant_experts: int,
    backend: Backend | None = None,
    *,
    transport: str = "auto",
    dtype: DTypeLike = jnp.bfloat16,
    fp8: bool | None = None,
) -> StepFunctions:
    """Step functions on `SpreadParams`; transport and form of a step are chosen for each bucket while it is traced.

    `transport` "auto" or one by name. `dtype` of activations and `fp8` (whether expert weights are FP8; None: as in
    the configuration) say what a row takes on the wire. Raises ValueError for a transport these devices do not have.
    """
    slots = cfg.n_routed_experts + num_redundant_experts
    communication = Communication.over(mesh, cfg, slots, transport=transport, dtype=dtype, fp8=fp8)
    shards = Shards(rank_size(mesh))

    def run(spread: SpreadParams, batch: Any, pages: jax.Array, tokens: int, forms: dict[Form, Any]) -> StepOutput:
        is_prefill = isinstance(batch, PrefillBatch)
        form = communication.form(tokens, is_prefill)
        routed = ExpertParallel(communication.transport(tokens, is_prefill), spread.placement, shards)
        arguments = (spread.params, cfg, batch, pages)
        if form is Form.PLAIN:
            return forms[form](*arguments, backend=backend, routed=routed, shards=shards)
        return forms[form](*arguments, backend=backend, routed=routed)

    def prefill(spread: SpreadParams, cfg: ModelConfig, batch: PrefillBatch, pages: jax.Array) -> StepOutput:
        return run(spread, batch, pages, batch.tokens.shape[0], _PREFILL)

    def decode(spread: SpreadParams, cfg: ModelConfig, batch: DecodeBatch, pages: jax.Array) -> StepOutput:
        return run(spread, batch, pages, batch.tokens.size, _DECODE)

    def logits(spread: SpreadParams, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
        return decoder.logits(spread.params, cfg, hidden)

    specs = jax.tree.map(lambda spec: partition(spec.axes), _declared(cfg))
    placed = SpreadParams(specs, Placement(PartitionSpec(), PartitionSpec()))
    groups, machine = cfg.n_group, communication.machine
    experts = SpreadExperts(cfg.num_moe_layers, cfg.n_routed_experts, slots, groups, machine, _take, _put)
    return StepFunctions(prefill, decode, logits, placed, experts, communication.traffic)


_PREFILL = {Form.PLAIN: steps.prefill, Form.HOOKED: prefill_with_hooks, Form.OVERLAPPED: prefill_overlapped}
_DECODE = {Form.PLAIN: steps.decode, Form.HOOKED: decode_with_hooks, Form.OVERLAPPED: decode_overlapped}


def _take(spread: SpreadParams) -> tuple[Any, Placement]:
    """The routed experts' stacks and where they stand."""
    moe = _moe(spread.params)
    return (moe.gate_up, moe.down), spread.placement


def _put(spread: SpreadParams, stacks: Any, placement: Placement) -> SpreadParams:
    """`spread` with other stacks and places."""
    gate_up, down = stacks
    params, layers = spread.params, spread.params.moe
    assert layers is not None
    moe = dataclasses.replace(_moe(params), gate_up=gate_up, down=down)
    return SpreadParams(dataclasses.replace(params, moe=dataclasses.replace(layers, moe=moe)), placement)


def _moe(params: Params) -> MoeParams:
    assert params.moe is not None and params.moe.moe is not None  # `first_expert_map` refuses models without
    return params.moe.moe


def _declared(cfg: ModelConfig) -> Params:
    return dataclasses.replace(declare(cfg), mtp=None)
