"""The losses against their definitions, and the sequence-wise one in the gradient of experts with its weight."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.model.forward import ForwardOutput, forward
from dsv3.model.layers.experts import LOCAL_EXPERTS, ExpertLayer, RouterStats
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.router import Routing
from dsv3.model.params import MoeParams, abstract
from training.config import TrainingConfig
from training.loss import balanced, cross_entropy, main_loss, mtp_loss, sequence_balance
from training.tokenizer import PAD_ID


def surprise(logits: np.ndarray, target: int) -> float:
    """Minus the logarithm of the target's probability, in float64."""
    logits = np.asarray(logits, np.float64)
    return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target])


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(3, 320, (2, 9)).astype(np.int32)


@pytest.fixture(scope="module")
def output(toy_config: TrainingConfig, tokens: np.ndarray) -> ForwardOutput:
    cfg, rng = toy_config.model, np.random.default_rng(1)
    params = jax.tree.map(
        lambda spec: rng.normal(scale=0.3, size=spec.shape).astype(spec.dtype), abstract(cfg, jnp.float32)
    )
    return jax.jit(lambda params, tokens: forward(params, cfg, tokens, with_mtp=True))(params, tokens)


def test_main_loss_is_the_surprise_of_the_next_token(output: ForwardOutput, tokens: np.ndarray) -> None:
    logits = np.asarray(output.logits)
    expected = np.mean([surprise(logits[b, i], tokens[b, i + 1]) for b in range(2) for i in range(8)])
    np.testing.assert_allclose(jax.jit(main_loss)(output, tokens), expected, rtol=1e-5)


def test_mtp_loss_is_the_surprise_of_the_token_after_next(output: ForwardOutput, tokens: np.ndarray) -> None:
    """Equation 24 of the DeepSeek-V3 report with k = 1: row i, which saw tokens 0 .. i + 1, predicts token i + 2."""
    logits = np.asarray(output.mtp_logits[0])
    expected = np.mean([surprise(logits[b, i], tokens[b, i + 2]) for b in range(2) for i in range(7)])
    np.testing.assert_allclose(jax.jit(mtp_loss)(output, tokens), expected, rtol=1e-5)


def test_padding_counts_for_nothing() -> None:
    logits = np.random.default_rng(1).normal(size=(1, 3, 5)).astype(np.float32)
    targets = np.array([[4, 3, PAD_ID]])
    expected = (surprise(logits[0, 0], 4) + surprise(logits[0, 1], 3)) / 2
    loss = jax.jit(cross_entropy)
    np.testing.assert_allclose(loss(logits, targets), expected, rtol=1e-5)
    assert float(loss(logits, np.full((1, 3), PAD_ID))) == 0.0


def defined(scores: np.ndarray, best: int) -> float:
    """Equations 17 to 20 of the report for the scores [T, E] of one sequence, written as there."""
    tokens, experts = scores.shape
    chosen = [set(np.argsort(-row)[:best]) for row in scores]
    loss = 0.0
    for i in range(experts):
        f = experts / (best * tokens) * sum(i in row for row in chosen)
        p = sum(row[i] / row.sum() for row in scores) / tokens
        loss += f * p
    return loss


def test_the_loss_is_that_of_the_report(toy_config: TrainingConfig) -> None:
    cfg = toy_config.model
    logits = np.random.default_rng(0).normal(size=(3, 5, cfg.n_routed_experts)).astype(np.float32)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = [defined(rows, cfg.num_experts_per_tok) for rows in scores]
    loss = jax.jit(sequence_balance, static_argnums=0)
    np.testing.assert_allclose(loss(cfg, logits), expected, rtol=1e-5)
    even = np.zeros((1, 4, 4), np.float32)
    even[0, [0, 1, 2, 3], [0, 1, 2, 3]] = even[0, [0, 1, 2, 3], [1, 2, 3, 0]] = 1
    np.testing.assert_allclose(loss(cfg, even), [1.0], rtol=1e-6)


class Double:
    """Routed experts that double what they get."""

    shards = LOCAL_EXPERTS.shards

    def __call__(self, x: jax.Array, routing: Routing, layer: ExpertLayer) -> tuple[jax.Array, RouterStats]:
        return 2 * x, RouterStats(jnp.zeros(4, jnp.int32), None)


def test_the_gradient_is_that_of_the_objective_with_the_loss_in_it(toy_config: TrainingConfig) -> None:
    config, rng = dataclasses.replace(toy_config, sequence_balance_weight=0.5, batch_size=2), np.random.default_rng(1)
    x, router = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 8), (1, 4, 8)))
    routing = Routing(np.zeros((6, 2), np.int32), np.ones((6, 2), np.float32))

    def attached(x: Any, router: Any) -> jax.Array:
        params = MoeParams(router=router, router_bias=None, gate_up=None, down=None, shared=None)
        layer = ExpertLayer(params, 0, Numerics.from_config(config.model, None))
        return jnp.sin(balanced(Double(), config, 2)(x, routing, layer)[0]).sum()

    def explicit(x: Any, router: Any) -> jax.Array:
        logits = (x @ router[0].T).reshape(2, 3, 4)
        return jnp.sin(2 * x).sum() + 0.5 * sequence_balance(config.model, logits).mean()

    got, wanted = (jax.jit(jax.grad(f, argnums=(0, 1)))(x, router) for f in (attached, explicit))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, wanted)
    assert np.abs(got[1]).max() > 1e-3


def test_without_a_weight_the_experts_stay_as_they_are(toy_config: TrainingConfig) -> None:
    assert balanced(LOCAL_EXPERTS, dataclasses.replace(toy_config, sequence_balance_weight=0.0), 2) is LOCAL_EXPERTS
