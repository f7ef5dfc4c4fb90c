"""What each pipeline stage holds and computes: some layers, and what stands before the first or behind the last."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import ModelConfig
from dsv3.model.decoder import Residual, Stack, run_layer
from dsv3.model.forward import predict, whole_sequences
from dsv3.model.layers.experts import RoutedExperts
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

    `ends` has no layers: the embedding in the first stage, what follows the last layer in the last. `layers` are
    stacks of one layer each. A stack of several would make the weight gradient of each layer as large as the stack.
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
    """Cuts the model in stages of equally many layers; where they do not divide, the first ones get one more.

    The last stage has the logits and the MTP modules besides. Raises ValueError where a stage would have no layer.
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


def take(params: Params, cfg: ModelConfig, stage: Stage, pick: Pick = operator.getitem) -> StageParams:
    """Returns the part of `params`, or of a tree like it, that belongs to `stage`; every leaf belongs to one stage.

    `pick` takes from a leaf of a stack the layer that a slice names.
    """

    def layer(index: int) -> LayerParams:
        dense = cfg.num_dense_layers
        stack, place = (params.dense, index) if index < dense else (params.moe, index - dense)
        return jax.tree.map(lambda leaf: pick(leaf, slice(place, place + 1)), stack)

    ends = Params(
        embed=params.embed if stage.first else None,
        dense=None,
        moe=None,
        norm=params.norm if stage.last else None,
        head=params.head if stage.last else None,
        mtp=params.mtp if stage.last else None,
    )
    return StageParams(ends, tuple(layer(i) for i in range(stage.begin, stage.end)))


def stage_part(whole: StageParams, stage: Stage) -> StageParams:
    """Returns the part of a stage of a tree that has all layers; no array moves."""
    ends, first, last = whole.ends, stage.first, stage.last
    ends = Params(
        embed=ends.embed if first else None,
        dense=None,
        moe=None,
        norm=ends.norm if last else None,
        head=ends.head if last else None,
        mtp=ends.mtp if last else None,
    )
    return StageParams(ends, whole.layers[stage.begin : stage.end])


def merge(parts: Sequence[StageParams]) -> StageParams:
    """Returns the tree with all layers whose parts these are; no array moves."""
    ends = dataclasses.replace(parts[-1].ends, embed=parts[0].ends.embed)
    return StageParams(ends, tuple(layer for part in parts for layer in part.layers))


def join(parts: Sequence[StageParams], cfg: ModelConfig) -> Params:
    """Returns the tree whose parts `take` returned for every stage, in order; leaves are numpy arrays on this host."""
    layers = [layer for part in parts for layer in part.layers]
    dense, moe = layers[: cfg.num_dense_layers], layers[cfg.num_dense_layers :]
    first, last = parts[0].ends, parts[-1].ends
    return Params(first.embed, _stack(dense), _stack(moe), last.norm, last.head, last.mtp)


def _stack(layers: list[LayerParams]) -> Any:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *layers) if layers else None


def declare_stage(cfg: ModelConfig, stage: Stage) -> StageParams:
    """Returns the part of the stage in `declare(cfg)`; its stacks still say how deep those of the whole model are."""
    return take(declare(cfg), cfg, stage, lambda spec, _: spec)


def needs_embedding(cfg: ModelConfig, stage: Stage) -> bool:
    """Returns whether a stage behind the first computes with the embedding: the MTP modules do, and a tied head."""
    return stage.last and not stage.first and (cfg.num_nextn_predict_layers > 0 or cfg.tie_word_embeddings)


def partitions(cfg: ModelConfig, stage: Stage, *, computing: bool) -> StageParams:
    """Returns how the stage's parameters lie on the devices of a rank.

    `computing` says whether they are what the stage computes with, which may include the embedding, or what it owns.
    """
    declared = declare_stage(cfg, stage)
    if computing and needs_embedding(cfg, stage):
        declared = dataclasses.replace(declared, ends=dataclasses.replace(declared.ends, embed=declare(cfg).embed))
    return mesh.partitions(declared, TABLE)


def weights(own: StageParams, embedding: jax.Array | None, config: TrainingConfig, stage: Stage) -> StageParams:
    """Returns what a stage computes with: its parameters in the dtype of the run, the router's in float32.

    `embedding` `[W, D]` is the first stage's, for a stage that `needs_embedding`.
    """
    dtype = jnp.dtype(config.compute_dtype)
    cast = jax.tree.map(lambda spec, leaf: leaf.astype(spec.dtype_in(dtype)), declare_stage(config.model, stage), own)
    if embedding is None:
        return cast
    return dataclasses.replace(cast, ends=dataclasses.replace(cast.ends, embed=embedding.astype(dtype)))


def compute(
    config: TrainingConfig, stage: Stage, length: int, routed: RoutedExperts
) -> Callable[..., tuple[jax.Array, dict[str, Any]]]:
    """Returns the stage as a function `(weights, x, data) -> (y, report)` of rows of `length` tokens on one device.

    `routed` computes the routed experts. x and y are residual streams `[T, D]`. The last stage's y is the rows' part of
    the objective, a scalar, and its `data` are the rows' tokens `[B, S]` and the whole batch's `target_counts`; others
    have none. `report` holds `expert_counts` int32 [MoE layers, E], None without such layers, and the last stage's
    losses.
    """
    cfg = config.model

    def run(weights: StageParams, x: jax.Array, data: Any) -> tuple[jax.Array, dict[str, Any]]:
        rows = x.shape[0] // length
        experts = balanced(routed, config, rows)
        context = whole_sequences(cfg, rows, length, training_backend(), experts, config.fp8_products)
        tallies, residual = [], Residual(x)
        for layer in weights.layers:
            residual, _, router_stats = run_layer(Stack(layer, 0), 0, context, residual, None)
            tallies += [] if router_stats is None else [router_stats.counts]
        counts = jnp.stack(tallies) if tallies else None
        if not stage.last:
            return residual.stream, {"expert_counts": counts}
        tokens, target_counts = data
        with_mtp = cfg.num_nextn_predict_layers > 0
        how: dict[str, Any] = {"backend": training_backend(), "routed": experts, "fp8_products": config.fp8_products}
        output = predict(weights.ends, cfg, tokens, residual, counts, with_mtp=with_mtp, **how)
        return objective(output, tokens, config.mtp_weight, target_counts)

    return run
