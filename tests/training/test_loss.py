"""The losses against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.model.forward import ForwardOutput, forward
from dsv3.model.params import abstract
from training.config import TrainingConfig
from training.loss import cross_entropy, main_loss, mtp_loss
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
