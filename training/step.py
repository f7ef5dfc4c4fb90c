"""One training step: loss, gradient, AdamW on float32 weights, and the router's bias, which AdamW does not move.

`SavedState` is what a checkpoint holds of it: layer by layer, so that any mesh can take its part.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dsv3.config.model import ModelConfig
from dsv3.model.forward import forward
from dsv3.model.layers.experts import LOCAL_EXPERTS
from dsv3.model.params import Params, declare, initialize
from training.config import TrainingConfig
from training.loss import balanced, main_loss, mtp_loss, objective, training_backend
from training.pipeline.stages import StageParams, cut, join, take


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a checkpoint holds: float32 parameters, the optimiser's moments, and the steps done (int32 scalar)."""

    params: Params
    optimizer: Any
    step: jax.Array


def learning_rate(config: TrainingConfig) -> optax.Schedule:
    """Returns the learning rate's schedule: a linear warm-up, then a cosine that ends at the last step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.learning_rate * config.final_rate_fraction,
    )


def optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    """Returns the optimiser: clipping by the global norm, then AdamW; norms and the router's bias do not decay."""
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw(config, declare(config.model)))


def adamw(config: TrainingConfig, declared: Any) -> optax.GradientTransformation:
    """Returns AdamW for the parameters of the tree `declared`, which holds a `ParamSpec` at every leaf."""
    decays = jax.tree.map(lambda spec: spec.init == "normal", declared)
    return optax.adamw(
        learning_rate(config), config.adam_b1, config.adam_b2, weight_decay=config.weight_decay, mask=decays
    )


def initial_state(config: TrainingConfig) -> TrainState:
    """Returns random parameters from the run's seed, and no step done."""
    params = initialize(config.model, jax.random.key(config.seed), jnp.float32, std=config.init_std)
    return TrainState(params, optimizer(config).init(params), jnp.zeros((), jnp.int32))


def compute_copy(params: Params, cfg: ModelConfig, dtype: Any) -> Params:
    """Returns the parameters in `dtype`, which the model computes in; the router stays float32."""
    return jax.tree.map(lambda spec, leaf: leaf.astype(spec.dtype_in(dtype)), declare(cfg), params)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def train_step(state: TrainState, tokens: jax.Array, *, config: TrainingConfig) -> tuple[TrainState, dict[str, Any]]:
    """Trains on `tokens`, int32 [B, S]; returns the next state and the scalars to report."""
    (_, metrics), gradient = jax.value_and_grad(_objective, has_aux=True)(state.params, tokens, config)
    counts = metrics.pop("expert_counts")
    updates, moments = optimizer(config).update(gradient, state.optimizer, state.params)
    params = shift_router_bias(optax.apply_updates(state.params, updates), counts, config.router_bias_rate)
    metrics["gradient_norm"] = optax.tree.norm(gradient)
    metrics["expert_load_peak"] = expert_load_peak(counts)
    return TrainState(params, moments, state.step + 1), metrics


def expert_load_peak(counts: Any) -> Any:
    """Returns the busiest expert's load over the mean, averaged over the layers of `counts` [layers, E]."""
    return (counts.max(axis=1) / counts.mean(axis=1)).mean()


def _objective(params: Params, tokens: jax.Array, config: TrainingConfig) -> tuple[jax.Array, dict[str, Any]]:
    computed = compute_copy(params, config.model, jnp.dtype(config.compute_dtype))
    output = forward(
        computed,
        config.model,
        tokens,
        with_mtp=config.model.num_nextn_predict_layers > 0,
        backend=training_backend(),
        routed=balanced(LOCAL_EXPERTS, config, tokens.shape[0]),
        fp8_products=config.fp8_products,
    )
    return objective(output, tokens, config.mtp_weight)


def shift_router_bias(params: Params, counts: jax.Array, rate: float) -> Params:
    """Raises the router's bias by `rate` for experts with fewer tokens than the mean and lowers it for the others.

    `counts`, [num_moe_layers + MTP modules, E], are the step's tokens per expert. The method is balancing without an
    auxiliary loss (arXiv:2408.15664; DeepSeek-V3 report, 2.1.2). The optimiser never moves a bias: its gradient is 0.
    """
    change = router_bias_change(counts, rate)
    mtp_modules = 0 if params.mtp is None else params.mtp.norm.shape[0]
    main = change.shape[0] - mtp_modules
    params = dataclasses.replace(params, moe=shift_bias(params.moe, change[:main]))
    if params.mtp is None:
        return params
    mtp = dataclasses.replace(params.mtp, layers=shift_bias(params.mtp.layers, change[main:]))
    return dataclasses.replace(params, mtp=mtp)


def router_bias_change(counts: jax.Array, rate: float) -> jax.Array:
    """Returns what is added to the biases [layers, E] of experts that got `counts` tokens: `rate`, or minus it."""
    counts = counts.astype(jnp.float32)
    return rate * jnp.sign(counts.mean(axis=1, keepdims=True) - counts)


def shift_bias(layers: Any, change: jax.Array) -> Any:
    """Returns MoE layers with `change` [layers, E] added to their router's bias."""
    moe = dataclasses.replace(layers.moe, router_bias=layers.moe.router_bias + change)
    return dataclasses.replace(layers, moe=moe)


@functools.partial(jax.jit, static_argnames="config")
def evaluate(params: Params, tokens: jax.Array, *, config: TrainingConfig) -> dict[str, jax.Array]:
    """Measures main and MTP loss on `tokens`, int32 [B, S], and the share of MTP drafts that greedy decoding accepts.

    A draft is accepted if the MTP module and the main model have the same most likely token i + 2. The share is that
    of this text; a model that writes its own text may differ.
    """
    computed = compute_copy(params, config.model, jnp.dtype(config.compute_dtype))
    output = forward(
        computed, config.model, tokens, with_mtp=config.model.num_nextn_predict_layers > 0, backend=training_backend()
    )
    metrics = {"loss": main_loss(output, tokens), "mtp_loss": mtp_loss(output, tokens)}
    if output.mtp_logits:
        drafts = output.mtp_logits[0].argmax(axis=-1)  # [B, S - 1]
        metrics["mtp_acceptance"] = (drafts == output.logits[:, 1:].argmax(axis=-1)).mean()
    return metrics


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
