"""One training step: loss, gradient, AdamW on float32 weights, and the update of the router's bias.

`SavedState` is the form of checkpoints: layer by layer, so that any mesh can restore its part.
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
from training.pipeline.stages import StageParams, cut, extract_stage, join


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of one device: float32 parameters, the optimizer's moments, and the number of steps (int32 scalar)."""

    params: Params
    optimizer: Any
    step: jax.Array


def learning_rate(config: TrainingConfig) -> optax.Schedule:
    """Returns the learning rate's schedule: linear warm-up, then a cosine down to the last step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.learning_rate * config.final_rate_fraction,
    )


def optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    """Returns the optimizer: clipping by the global norm, then AdamW without decay of norms and the router's bias."""
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw(config, declare(config.model)))


def adamw(config: TrainingConfig, declared: Any) -> optax.GradientTransformation:
    """Returns AdamW for the parameters of the tree `declared` of `ParamSpec`s."""
    decays = jax.tree.map(lambda spec: spec.init == "normal", declared)
    return optax.adamw(
        learning_rate(config), config.adam_b1, config.adam_b2, weight_decay=config.weight_decay, mask=decays
    )


def initial_state(config: TrainingConfig) -> TrainState:
    """Returns the state before the first step, with random parameters from the run's seed."""
    params = initialize(config.model, jax.random.key(config.seed), jnp.float32, std=config.init_std)
    return TrainState(params, optimizer(config).init(params), jnp.zeros((), jnp.int32))


def compute_copy(params: Params, cfg: ModelConfig, dtype: Any) -> Params:
    """Returns the parameters in `dtype` for computing; the router stays float32."""
    return jax.tree.map(lambda spec, leaf: leaf.astype(spec.dtype_in(dtype)), declare(cfg), params)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def train_step(
    state: TrainState, tokens: jax.Array, routed_experts: jax.Array | None = None, *, config: TrainingConfig
) -> tuple[TrainState, dict[str, Any]]:
    """Trains on `tokens`, int32 [B, S]; returns the next state and the scalars to report.

    `routed_experts` `[B, S, num_moe_layers, K]` replay a rollout's routing (`dsv3.model.forward.forward`).
    """
    (_, metrics), gradient = jax.value_and_grad(_objective, has_aux=True)(state.params, tokens, config, routed_experts)
    counts = metrics.pop("expert_counts")
    updates, moments = optimizer(config).update(gradient, state.optimizer, state.params)
    params = shift_router_bias(optax.apply_updates(state.params, updates), counts, config.router_bias_rate)
    metrics["gradient_norm"] = optax.tree.norm(gradient)
    metrics["expert_load_peak"] = expert_load_peak(counts)
    return TrainState(params, moments, state.step + 1), metrics


def expert_load_peak(counts: Any) -> Any:
    """Returns the busiest expert's load over the mean, averaged over the layers of `counts` [layers, E]."""
    return (counts.max(axis=1) / counts.mean(axis=1)).mean()


def _objective(
    params: Params, tokens: jax.Array, config: TrainingConfig, routed_experts: jax.Array | None
) -> tuple[jax.Array, dict[str, Any]]:
    computed = compute_copy(params, config.model, jnp.dtype(config.compute_dtype))
    output = forward(
        computed,
        config.model,
        tokens,
        with_mtp=config.model.num_nextn_predict_layers > 0,
        backend=training_backend(),
        routed=balanced(LOCAL_EXPERTS, config, tokens.shape[0]),
        fp8_products=config.fp8_products,
        routed_experts=routed_experts,
    )
    return objective(output, tokens, config.mtp_weight)


def shift_router_bias(params: Params, counts: jax.Array, rate: float) -> Params:
    """Raises the router's bias by `rate` for experts with fewer tokens than the mean and lowers it for the others.

    `counts`, [num_moe_layers + MTP modules, E], are the step's tokens per expert. The method is balancing without an
    auxiliary loss (arXiv:2408.15664; DeepSeek-V3 report, 2.1.2). The optimizer never moves a bias: its gradient is 0.
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
    """Returns the change of the biases [layers, E] of experts with `counts` tokens: `rate`, 0 or `-rate`."""
    counts = counts.astype(jnp.float32)
    return rate * jnp.sign(counts.mean(axis=1, keepdims=True) - counts)


def shift_bias(layers: Any, change: jax.Array) -> Any:
    """Returns MoE layers with `change` [layers, E] added to their router's bias."""
    moe = dataclasses.replace(layers.moe, router_bias=layers.moe.router_bias + change)
    return dataclasses.replace(layers, moe=moe)


@functools.partial(jax.jit, static_argnames="config")
def evaluate(params: Params, tokens: jax.Array, *, config: TrainingConfig) -> dict[str, jax.Array]:
    """Measures main and MTP loss on `tokens`, int32 [B, S], and the share of MTP drafts that greedy decoding accepts.

    A draft is accepted if the MTP module and the main model have the same most likely token i + 2. The share may differ
    for text that the model generates.
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

    `params` has separate arrays for each layer. `moments` is AdamW's state, with trees like `params`.
    """

    params: StageParams
    moments: Any


@functools.partial(jax.jit, static_argnames="cfg")
def by_layer(state: TrainState, cfg: ModelConfig) -> SavedState:
    """Returns the state of one device in the form of checkpoints, as copies."""
    (everything,) = cut(cfg, 1)
    _, moments = state.optimizer
    return SavedState(
        extract_stage(state.params, cfg, everything),
        map_parts(lambda params: extract_stage(params, cfg, everything), moments, kind=Params),
    )


def stacked(saved: SavedState, cfg: ModelConfig, step: int) -> TrainState:
    """Returns the state of one device from a saved one; both are arrays on this host."""
    moments = map_parts(lambda params: join([params], cfg), saved.moments)
    return TrainState(join([saved.params], cfg), (optax.EmptyState(), moments), jax.numpy.int32(step))


def first_leaf(leaf: Any, *_: Any) -> Any:
    """Returns the first of equal leaves."""
    return leaf


def map_parts(
    function: Callable[..., Any], *states: Any, kind: type = StageParams, other: Callable[..., Any] = first_leaf
) -> Any:
    """Returns an optimizer's state with `function` applied to each tree of parameters, and `other` to other leaves.

    `kind` is the type of trees of parameters. Both functions get one node of each of the states.
    """
    return jax.tree.map(
        lambda *nodes: function(*nodes) if isinstance(nodes[0], kind) else other(*nodes),
        *states,
        is_leaf=lambda node: isinstance(node, kind),
    )
