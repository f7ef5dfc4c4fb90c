"""GRPO: advantages within a group, a loss whose gradient raises what was better, and the gap between two policies."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.llm import Completion, RequestOutput
from dsv3.model.forward import forward
from tests.training.pipeline.test_run import random_params
from training.config import TrainingConfig
from training.grpo import GrpoConfig, Rollouts, advantages, objective, optimizer, policy_step, sample, token_logprobs
from training.loss import training_backend
from training.step import TrainState

scores = jax.jit(token_logprobs, static_argnums=1)
loss_of = jax.jit(objective, static_argnums=1)


@pytest.fixture
def config(toy_config: TrainingConfig) -> GrpoConfig:
    return GrpoConfig(toy_config.model, group_size=2, learning_rate=3e-3)


@pytest.fixture
def params(toy_config: TrainingConfig):
    return random_params(toy_config.model, toy_config.init_std)


def rollouts_of(params, config: GrpoConfig, advantage: list[float]) -> Rollouts:
    """Two completions of four tokens behind a prompt of four, with this policy's own log-probabilities."""
    tokens = np.array([[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 8, 14, 13, 12, 11]], np.int32)
    sampled = np.zeros((2, 7), bool)
    sampled[:, 3:] = True
    routed = np.full((2, 8, config.model.num_moe_layers, config.model.num_experts_per_tok), -1, np.int16)
    made = Rollouts(tokens, sampled, np.zeros((2, 7), np.float32), np.array(advantage, np.float32), routed)
    return dataclasses.replace(made, logprobs=np.asarray(scores(params, config, made)))


def test_a_completion_is_compared_with_its_group() -> None:
    got = advantages(np.array([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 4.0]]))
    np.testing.assert_allclose(got[0], [1, -1, -1, 1])
    np.testing.assert_array_equal(got[1], 0)
    assert got.dtype == np.float32 and got[2, 3] > 1.7
    with pytest.raises(ValueError, match="group_size 1"):
        GrpoConfig(None, group_size=1)


def test_failed_completions_are_no_rollouts(config: GrpoConfig) -> None:
    """Weights that are not finite would give empty answers, and a loss of 0 from then on."""
    failed = Completion(0, finish_reason="error", error="the logits were not finite")
    llm = SimpleNamespace(generate=lambda prompts, _: [RequestOutput("a", [5], [Completion(1), failed])])
    with pytest.raises(RuntimeError, match="1 of 2 completions have failed: the logits were not finite"):
        sample(llm, ["a"], lambda *_: 0.0, config, seed=0, replay=False)


def test_log_probabilities_are_those_of_the_next_tokens(params, config: GrpoConfig) -> None:
    made = rollouts_of(params, config, [1, -1])
    run = jax.jit(lambda params, tokens: forward(params, config.model, tokens, backend=training_backend()).logits)
    wanted = np.asarray(jax.nn.log_softmax(run(params, made.tokens)))[:, :-1]
    np.testing.assert_allclose(
        made.logprobs, np.take_along_axis(wanted, made.tokens[:, 1:, None], 2)[..., 0], rtol=1e-5
    )


def test_learning_raises_the_better_completion_and_stops_at_the_clip(params, config: GrpoConfig) -> None:
    """Tokens that were not sampled have no part in it."""
    made = rollouts_of(params, config, [1, -1])
    loss, metrics = loss_of(params, config, made)
    assert float(loss) == pytest.approx(0.0, abs=1e-6)
    assert float(metrics["kl"]) == float(metrics["largest_difference"]) == float(metrics["clipped"]) == 0.0
    state = TrainState(params, optimizer(config).init(params), jnp.zeros((), jnp.int32))
    before = made.logprobs[:, 3:].sum(axis=1)
    for _ in range(12):
        state, metrics = policy_step(state, made, config=config)
    after = np.asarray(scores(state.params, config, made))[:, 3:].sum(axis=1)
    assert after[0] > before[0] and after[1] < before[1]
    assert float(metrics["clipped"]) > 0.5 and float(metrics["kl"]) > 0
    far, _ = policy_step(state, dataclasses.replace(made, sampled=np.zeros_like(made.sampled)), config=config)
    assert int(far.step) == 13


def test_replayed_experts_are_used(params, config: GrpoConfig) -> None:
    """The gap to a policy that routed otherwise goes away when its choices are replayed."""
    made = rollouts_of(params, config, [1, -1])
    other = np.zeros_like(made.routed_experts) + np.arange(config.model.num_experts_per_tok, dtype=np.int16)
    replayed = dataclasses.replace(made, routed_experts=other)
    rolled = dataclasses.replace(made, logprobs=np.asarray(scores(params, config, replayed)))
    _, without = loss_of(params, config, rolled)
    _, with_replay = loss_of(params, config, dataclasses.replace(rolled, routed_experts=other))
    assert float(without["largest_difference"]) > 1e-4 > 1e-6 > float(with_replay["largest_difference"])
