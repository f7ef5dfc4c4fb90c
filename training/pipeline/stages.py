"""Pipeline stages: the layers of each, the embedding of the first, head and MTP modules of the last."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import ModelConfig
from dsv3.model.decoder import DecoderLayer, Stack
from dsv3.model.forward import predict, uncached_context
from dsv3.model.layers.experts import RoutedExperts
from dsv3.model.layers.hyper_connections import residual_of
from dsv3.model.params import LayerParams, Params, declare
from sharding import mesh
from training.config import TrainingConfig
from training.loss import balanced, objective, training_backend
from training.pipeline.ranks import TABLE

Pick = Callable[[Any, slice], Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StageParams:
    """The parameters of one stage, or a tree like them (gradients, moments, declarations).

    `ends` has the embedding in the first stage, and norm, head and MTP modules in the last. `layers` are stacks of one
    layer each, as in a larger stack each layer's weight gradient would have the size of the stack.
    """

    ends: Params
    layers: tuple[LayerParams, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Layers `begin` to `end` of the main model; the last stage also has the MTP modules."""

    index: int
    begin: int
    end: int
    first: bool
    last: bool


def cut(cfg: ModelConfig, stages: int) -> tuple[Stage, ...]:
    """Cuts the model into stages of equally many layers; the first ones get the remainder, one each.

    The last stage also has the head and the MTP modules. Raises ValueError if there are fewer layers than stages.
    """
    layers, more = divmod(cfg.num_hidden_layers, stages)
    if not layers:
        raise ValueError(f"{cfg.num_hidden_layers} layers do not fill {stages} pipeline stages; use fewer ranks")
    ends = [layers * (i + 1) + min(i + 1, more) for i in range(stages)]
    begins = [0, *ends[:-1]]
    return tuple(
        Stage(i, begin, end, first=i == 0, last=i == stages - 1)
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True))
    )


def extract_stage(params: Params, cfg: ModelConfig, stage: Stage, pick: Pick = operator.getitem) -> StageParams:
    """Returns the part of `params`, or of a tree like it, that belongs to `stage`; every leaf belongs to one stage.

    `pick(leaf, slice)` returns one layer of a stack's leaf.
    """

    def layer(index: int) -> LayerParams:
        dense = cfg.num_dense_layers
        stack, place = (params.dense, index) if index < dense else (params.moe, index - dense)
        return jax.tree.map(lambda leaf: pick(leaf, slice(place, place + 1)), stack)

    return StageParams(_stage_ends(params, stage), tuple(layer(i) for i in range(stage.begin, stage.end)))


def slice_stage(whole: StageParams, stage: Stage) -> StageParams:
    """Returns the part of a stage of a tree with all layers; copies nothing."""
    return StageParams(_stage_ends(whole.ends, stage), whole.layers[stage.begin : stage.end])


def _stage_ends(params: Params, stage: Stage) -> Params:
    """Returns the parameters of a stage outside of its layers."""
    return Params(
        embed=params.embed if stage.first else None,
        dense=None,
        moe=None,
        norm=params.norm if stage.last else None,
        head=params.head if stage.last else None,
        mtp=params.mtp if stage.last else None,
    )


def merge(parts: Sequence[StageParams]) -> StageParams:
    """Returns the tree with all layers from the parts of all stages; copies nothing."""
    ends = dataclasses.replace(parts[-1].ends, embed=parts[0].ends.embed)
    return StageParams(ends, tuple(layer for part in parts for layer in part.layers))


def join(parts: Sequence[StageParams], cfg: ModelConfig) -> Params:
    """Returns the whole tree from the parts of all stages, in order; leaves are numpy arrays on this host."""
    layers = [layer for part in parts for layer in part.layers]
    dense, moe = layers[: cfg.num_dense_layers], layers[cfg.num_dense_layers :]
    first, last = parts[0].ends, parts[-1].ends
    return Params(first.embed, _stack(dense), _stack(moe), last.norm, last.head, last.mtp)


def _stack(layers: list[LayerParams]) -> Any:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *layers) if layers else None


def declare_stage(cfg: ModelConfig, stage: Stage) -> StageParams:
    """Returns the stage's part of `declare(cfg)`; its stacks still have the depth of the whole model's."""
    return extract_stage(declare(cfg), cfg, stage, lambda spec, _: spec)


def needs_embedding(cfg: ModelConfig, stage: Stage) -> bool:
    """Returns whether a stage after the first needs the embedding, for MTP modules or a tied head."""
    return stage.last and not stage.first and (cfg.num_nextn_predict_layers > 0 or cfg.tie_word_embeddings)


def partitions(cfg: ModelConfig, stage: Stage, *, computing: bool) -> StageParams:
    """Returns the partitions of the stage's parameters over the devices of a rank.

    With `computing` those that it computes with, which may include the embedding, else those that it owns.
    """
    declared = declare_stage(cfg, stage)
    if computing and needs_embedding(cfg, stage):
        declared = dataclasses.replace(declared, ends=dataclasses.replace(declared.ends, embed=declare(cfg).embed))
    return mesh.partitions(declared, TABLE)


def weights(own: StageParams, embedding: jax.Array | None, config: TrainingConfig, stage: Stage) -> StageParams:
    """Returns the weights that a stage computes with: its parameters in the run's dtype, the router's in float32.

    `embedding` `[W, D]` is the first stage's, for a stage that `needs_embedding`.
    """
    dtype = jnp.dtype(config.compute_dtype)
    cast = jax.tree.map(lambda spec, leaf: leaf.astype(spec.dtype_in(dtype)), declare_stage(config.model, stage), own)
    if embedding is None:
        return cast
    return dataclasses.replace(cast, ends=dataclasses.replace(cast.ends, embed=embedding.astype(dtype)))


def compute(
    config: TrainingConfig, stage: Stage, routed: RoutedExperts
) -> Callable[..., tuple[jax.Array, dict[str, Any]]]:
    """Returns the stage as a function `(weights, x, data) -> (y, report)` of rows on one device.

    `routed` computes the routed experts. x and y are residual streams `[T, D]`. The last stage's y is the rows' part of
    the objective, a scalar, and its `data` are the rows' tokens `[B, S]` and the whole batch's `target_counts`; other
    stages have no data. `report` has `expert_counts` int32 [MoE layers, E] (None without MoE layers) and the last
    stage's losses.
    """
    cfg, length = config.model, config.sequence_length

    def run(weights: StageParams, x: jax.Array, data: Any) -> tuple[jax.Array, dict[str, Any]]:
        rows = x.shape[0] // length
        experts = balanced(routed, config, rows)
        context = uncached_context(cfg, rows, length, training_backend(), experts, config.fp8_products)
        layer_counts, residual = [], residual_of(cfg, x)
        for layer in weights.layers:
            stack = Stack(layer, 0)
            residual, _, router_stats = DecoderLayer(stack, stack.place(0), context).run(residual, None)
            layer_counts += [] if router_stats is None else [router_stats.counts]
        counts = jnp.stack(layer_counts) if layer_counts else None
        if not stage.last:
            return residual.flat(), {"expert_counts": counts}
        tokens, target_counts = data
        with_mtp = cfg.num_nextn_predict_layers > 0
        how: dict[str, Any] = {"backend": training_backend(), "routed": experts, "fp8_products": config.fp8_products}
        output = predict(weights.ends, cfg, tokens, residual, counts, with_mtp=with_mtp, **how)
        return objective(output, tokens, config.mtp_weight, target_counts)

    return run
