"""The training step: it learns, and only the load moves the router's bias."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dsv3.model.layers.router import route, router_logits
from dsv3.model.params import Params
from tests.training.pipeline.test_processes import first_state
from training.config import TrainingConfig
from training.step import TrainState, evaluate, learning_rate, shift_router_bias, train_step


@pytest.fixture
def state(toy_config: TrainingConfig) -> TrainState:
    return first_state(toy_config)


def test_loss_falls_on_a_regular_stream(toy_config: TrainingConfig, state: TrainState) -> None:
    tokens = np.tile(np.arange(10, 18), (4, 4)).astype(np.int32)  # of the shape that other tests compile for
    first = evaluate(state.params, tokens, config=toy_config)
    for _ in range(40):
        state, metrics = train_step(state, tokens, config=toy_config)
    last = evaluate(state.params, tokens, config=toy_config)
    assert int(state.step) == 40
    for name in ("loss", "mtp_loss"):
        assert float(first[name]) > 5.0
        assert float(last[name]) < 1.0
    assert float(last["mtp_acceptance"]) > 0.8
    assert all(np.isfinite(value) for value in metrics.values())
    steps_of_bias = np.asarray(state.params.moe.moe.router_bias) / toy_config.router_bias_rate
    assert np.abs(steps_of_bias).max() >= 1
    np.testing.assert_allclose(steps_of_bias, np.round(steps_of_bias), atol=1e-3)  # AdamW added nothing
    assert without_gradient(state) == [".moe.moe.router_bias", ".mtp.layers.moe.router_bias"]  # only moves the choice


def without_gradient(state: TrainState) -> list[str]:
    """Returns the parameters whose gradients have always been 0."""
    moments = jax.tree.leaves_with_path(optax.tree.get(state.optimizer, "nu"))
    return [jax.tree_util.keystr(path) for path, moment in moments if not np.any(np.asarray(moment))]


def test_a_step_replays_given_experts(toy_config: TrainingConfig, state: TrainState) -> None:
    """They reach the model, which checks their shape; `test_replay.py` has what it does with them."""
    tokens, model = np.zeros((4, 32), np.int32), toy_config.model
    step = functools.partial(train_step, config=toy_config)
    given = np.zeros((*tokens.shape, model.num_moe_layers, model.num_experts_per_tok), np.uint8)
    jax.eval_shape(step, state, tokens, given)
    with pytest.raises(ValueError, match="routed_experts: shape"):
        jax.eval_shape(step, state, tokens, given[..., 1:])


def test_bias_rises_for_idle_experts_and_falls_for_busy_ones(state: TrainState) -> None:
    counts = jnp.array([[9, 1, 1, 1], [3, 3, 3, 3]], jnp.int32)  # the main model's MoE layer, then the MTP module's
    moved = shift_router_bias(state.params, counts, 0.25)
    np.testing.assert_allclose(moved.moe.moe.router_bias, [[-0.25, 0.25, 0.25, 0.25]])
    np.testing.assert_allclose(moved.mtp.layers.moe.router_bias, [[0.0, 0.0, 0.0, 0.0]])
    assert moved.embed is state.params.embed


def test_balancing_evens_out_a_lopsided_router(toy_config: TrainingConfig, state: TrainState) -> None:
    """The bias alone, with fixed weights, evens out the load of a biased router."""
    cfg, params = toy_config.model, state.params
    x = jax.random.normal(jax.random.key(1), (512, cfg.hidden_size)) + 1.0
    logits = router_logits(x, params.moe.moe.router, 0, None)

    @jax.jit
    def step(params: Params) -> tuple[Params, jax.Array]:
        ids, _ = route(cfg, logits, params.moe.moe.router_bias[0], None)
        counts = jnp.bincount(ids.reshape(-1), length=cfg.n_routed_experts)
        return shift_router_bias(params, jnp.stack([counts, counts]), 0.005), counts.max() / counts.mean()

    peaks = []
    for _ in range(150):
        params, peak = step(params)
        peaks.append(float(peak))
    assert peaks[0] > 1.4
    assert max(peaks[-10:]) < 1.2


def test_learning_rate_warms_up_and_decays_to_its_fraction(toy_config: TrainingConfig) -> None:
    schedule = learning_rate(
        dataclasses.replace(toy_config, steps=40, warmup_steps=10, learning_rate=1.0, final_rate_fraction=0.1)
    )
    np.testing.assert_allclose([schedule(0), schedule(5), schedule(10)], [0.0, 0.5, 1.0], rtol=1e-6)
    np.testing.assert_allclose(schedule(40), 0.1, rtol=1e-6)
    assert schedule(20) > schedule(30)


def test_too_few_steps_for_the_schedule_are_refused(toy_config: TrainingConfig) -> None:
    with pytest.raises(ValueError, match="4 steps are too few for 4 of warm-up"):
        dataclasses.replace(toy_config, warmup_steps=4)
