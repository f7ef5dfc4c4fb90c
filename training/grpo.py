"""Reinforcement learning with an `LLM` as the rollout engine: group relative policy optimization (GRPO).

A step samples a group of completions for each prompt, rewards each one, and raises the probability of those that are
better than the mean of their group (DeepSeekMath, arXiv:2402.03300). The loss is clipped token by token and averaged
over all tokens of the batch, without a reference model.

The engine samples at temperature 1 without filters, so the log-probabilities that it returns are those of its sampler.
If it is batch-invariant, the trained policy may have the same bits (`training.served`): before the first update of a
batch each ratio is then 1, and the divergence 0.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dsv3 import LLM, SamplingParams
from dsv3.config.model import ModelConfig
from dsv3.model.forward import forward
from dsv3.model.params import Params
from training.loss import training_backend
from training.served import served_logprobs, with_values_of
from training.step import TrainState, compute_copy
from training.tokenizer import PAD_ID

Reward = Callable[[str, str], float]
"""Gives the reward of a completion: its arguments are the prompt and the completion's text."""

LENGTH_MULTIPLE = 32
"""Rows are padded to a multiple, so that few lengths are compiled."""


@dataclasses.dataclass(frozen=True)
class GrpoConfig:
    """Settings of a run. `group_size` completions of at most `max_tokens` tokens are sampled for each prompt.

    `epochs` optimizer steps are made with each batch of completions. The ratio of the trained policy to the sampler's
    is clipped to 1 - `clip_low` and 1 + `clip_high`. `compute_dtype` and `fp8_products` should be the engine's.
    """

    model: ModelConfig
    group_size: int = 16
    max_tokens: int = 32
    stop: tuple[str, ...] = ()
    learning_rate: float = 1e-4
    epochs: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_norm: float = 1.0
    compute_dtype: str = "float32"
    fp8_products: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"group_size {self.group_size}: a completion is compared with others of its group; give 2")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollouts:
    """B completions behind their prompts, padded on the right to S tokens.

    `tokens` int32 `[B, S]`. `sampled` bool `[B, S - 1]` marks the targets `tokens[:, 1:]` that the engine sampled;
    `logprobs` float32 `[B, S - 1]` are the engine's log-probabilities of them. `advantages` float32 `[B]`.
    `routed_experts` int16 `[B, S, MoE layers, K]` are the experts to which the trainer routes each token: those that
    the engine chose, or -1 where the trainer's router chooses.
    """

    tokens: Any
    sampled: Any
    logprobs: Any
    advantages: Any
    routed_experts: Any


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Returns rewards `[P, n]` less the mean of their group, over its standard deviation; 0 where all are equal."""
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    return np.asarray(centered / np.maximum(rewards.std(axis=1, keepdims=True), 1e-6), np.float32)


def sample(
    llm: LLM, prompts: Sequence[str], reward: Reward, config: GrpoConfig, *, seed: int, replay: bool
) -> tuple[Rollouts, np.ndarray]:
    """Samples a group of completions for each prompt; returns them with their rewards, float32 `[prompts, group_size]`.

    The same `seed` and weights give the same completions. With `replay` the experts that the engine chose are kept,
    which needs an engine with `enable_return_routed_experts`. Raises RuntimeError where a completion has failed, as
    with weights that are not finite.
    """
    params = SamplingParams(
        n=config.group_size,
        max_tokens=config.max_tokens,
        stop=config.stop,
        seed=seed,
        temperature=1.0,
        logprobs=0,
        return_routed_experts=replay,
    )
    outputs = llm.generate(prompts, params)
    failed = [each.error for output in outputs for each in output.outputs if each.finish_reason == "error"]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(outputs) * config.group_size} completions have failed: {failed[0]}")
    rewards = np.asarray(
        [[reward(output.prompt or "", each.text) for each in output.outputs] for output in outputs], np.float32
    )
    longest = max(len(output.prompt_token_ids) for output in outputs) + config.max_tokens
    length = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    rows = [(output, each) for output in outputs for each in output.outputs]
    tokens = np.full((len(rows), length), PAD_ID, np.int32)
    sampled = np.zeros((len(rows), length - 1), bool)
    logprobs = np.zeros((len(rows), length - 1), np.float32)
    layers, chosen = config.model.num_moe_layers, config.model.num_experts_per_tok
    routed = np.full((len(rows), length, layers, chosen), -1, np.int16)
    for row, (output, each) in enumerate(rows):
        start, end = len(output.prompt_token_ids), len(output.prompt_token_ids) + len(each.token_ids)
        tokens[row, :end] = output.prompt_token_ids + each.token_ids
        sampled[row, start - 1 : end - 1] = True
        logprobs[row, start - 1 : end - 1] = [token.logprob for token in each.logprobs or []]
        if replay:
            assert each.routed_experts is not None  # asked for
            routed[row, : end - 1] = each.routed_experts
    return Rollouts(tokens, sampled, logprobs, advantages(rewards).reshape(-1), routed), rewards


def token_logprobs(params: Params, config: GrpoConfig, rollouts: Rollouts) -> jax.Array:
    """Returns the trained policy's log-probabilities of `tokens[:, 1:]`, float32 `[B, S - 1]`."""
    computed = compute_copy(params, config.model, jnp.dtype(config.compute_dtype))
    output = forward(
        computed,
        config.model,
        rollouts.tokens,
        backend=training_backend(),
        fp8_products=config.fp8_products,
        routed_experts=rollouts.routed_experts,
    )
    logits = output.logits[:, :-1].astype(jnp.float32)
    picked = jnp.take_along_axis(logits, rollouts.tokens[:, 1:, None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def engine_logprobs(params: Params, config: GrpoConfig, rollouts: Rollouts) -> jax.Array:
    """Returns what `token_logprobs` does, with the bits of a batch-invariant engine; it cannot be traced."""
    how: dict[str, Any] = {"dtype": config.compute_dtype, "fp8": config.fp8_products}
    return served_logprobs(params, config.model, rollouts.tokens, rollouts.routed_experts, **how)


def objective(
    params: Params, config: GrpoConfig, rollouts: Rollouts, served: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss, a float32 scalar, and its report.

    With `served`, the `engine_logprobs` of these parameters, they are the values of the trained policy's
    log-probabilities, and only the gradient is the trainer's.
    `kl` is the estimate mean(r - 1 - log r) of the divergence of the sampler from the trained policy, where r is the
    ratio of their probabilities; before the first update of a batch it is the gap between trainer and engine, as is
    `largest_difference` of log-probabilities. `trainer_difference` is that of the trainer's own forward.
    """
    trained = token_logprobs(params, config, rollouts)
    policy = trained if served is None else with_values_of(served, trained)
    difference, own = (jnp.where(rollouts.sampled, each - rollouts.logprobs, 0.0) for each in (policy, trained))
    ratio = jnp.exp(difference)
    clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    advantage = rollouts.advantages[:, None]
    count = jnp.maximum(rollouts.sampled.sum(), 1)
    gain = jnp.where(rollouts.sampled, jnp.minimum(ratio * advantage, clipped * advantage), 0.0)
    metrics = {
        "kl": (ratio - 1 - difference).sum() / count,
        "largest_difference": jnp.abs(difference).max(),
        "trainer_difference": jnp.abs(own).max(),
        "clipped": (ratio != clipped).sum() / count,
    }
    return -gain.sum() / count, metrics


def optimizer(config: GrpoConfig) -> optax.GradientTransformation:
    """Returns Adam behind clipping by the global norm."""
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optax.adam(config.learning_rate))


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def policy_step(
    state: TrainState, rollouts: Rollouts, served: jax.Array | None = None, *, config: GrpoConfig
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Makes one optimizer step; returns the next state and the scalars to report. `served` is that of `objective`."""
    (loss, metrics), gradient = jax.value_and_grad(objective, has_aux=True)(state.params, config, rollouts, served)
    updates, moments = optimizer(config).update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics |= {"loss": loss, "gradient_norm": optax.tree.norm(gradient)}
    return TrainState(params, moments, state.step + 1), metrics


def train(
    llm: LLM,
    params: Params,
    prompts: Sequence[str],
    reward: Reward,
    config: GrpoConfig,
    *,
    steps: int,
    replay: bool = True,
    exact: bool = False,
) -> Iterator[dict[str, float]]:
    """Trains for `steps` steps; yields the report of each when the engine has its weights.

    `params` are the engine's weights in float32, which are overwritten; `replay` is that of `sample`. With `exact` the
    policy's log-probabilities have the engine's bits (`engine_logprobs`). A report has the mean `reward` of the step's
    completions and the metrics of `objective`, those of the first epoch. Raises ValueError for `exact` with an engine
    whose bits depend on the batch.
    """
    if exact and not llm.engine.cfg.batch_invariant:
        raise ValueError("exact: this engine's bits depend on the batch; make the LLM with batch_invariant=True")
    state = TrainState(params, optimizer(config).init(params), jnp.zeros((), jnp.int32))
    for step in range(steps):
        seed = config.seed + step * config.group_size
        rollouts, rewards = sample(llm, prompts, reward, config, seed=seed, replay=replay)
        reports = []
        for _ in range(config.epochs):
            served = engine_logprobs(state.params, config, rollouts) if exact else None
            state, metrics = policy_step(state, rollouts, served, config=config)
            reports.append(metrics)
        llm.update_weights(compute_copy(state.params, config.model, jnp.float32), version=str(step + 1))
        yield {"reward": float(rewards.mean())} | {name: float(value) for name, value in reports[0].items()}
