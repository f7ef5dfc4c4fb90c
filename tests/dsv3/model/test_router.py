"""Expert selection against a plain implementation of the papers, and known differences between implementations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from configs.deepseek_v2 import DEEPSEEK_V2, DEEPSEEK_V2_LITE
from configs.deepseek_v3 import DEEPSEEK_V3
from configs.kimi import KIMI_K2
from dsv3.config.model import ModelConfig
from dsv3.model.layers.router import Routing, _topk_experts, route, router_logits
from pallas_kernels import native
from pallas_kernels.backend import Backend

BF16, F32 = jnp.bfloat16, jnp.float32
BACKENDS = [Backend.REFERENCE, *([Backend.NATIVE] if native.library().targets else [])]
routed = jax.jit(lambda *args: route(*args, None), static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 4))
def chosen(cfg: ModelConfig, x: jax.Array, weight: jax.Array, bias: jax.Array | None, backend: Backend) -> Routing:
    return route(cfg, router_logits(x, weight[None], 0, backend), bias, backend)


def choose_plainly(cfg: ModelConfig, logits: np.ndarray, bias: np.ndarray) -> tuple[list[int], list[float]]:
    """One token at a time with Python lists."""
    scores = 1 / (1 + np.exp(-logits)) if cfg.scoring_func == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    choice = scores + bias
    groups = np.split(np.arange(len(choice)), cfg.n_group)
    ranks = 2 if cfg.topk_method == "noaux_tc" else 1
    strength = [sum(sorted(choice[g])[-ranks:]) for g in groups]
    kept = sorted(range(cfg.n_group), key=lambda g: -strength[g])[: cfg.topk_group]
    within = [e for g in kept for e in groups[g]]
    ids = sorted(within, key=lambda e: -choice[e])[: cfg.num_experts_per_tok]
    weights = scores[ids] / (scores[ids].sum() if cfg.norm_topk_prob else 1) * cfg.routed_scaling_factor
    return ids, weights.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cfg", [DEEPSEEK_V3, DEEPSEEK_V2, DEEPSEEK_V2_LITE, KIMI_K2])
def test_against_plain_python(cfg: ModelConfig, backend: Backend) -> None:
    D, E = 16, cfg.n_routed_experts
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(20, D)).astype(np.float32), rng.normal(size=(E, D)).astype(np.float32)
    bias = rng.normal(0, 0.3, E).astype(np.float32) if cfg.topk_method == "noaux_tc" else None
    ids, weights = map(np.asarray, chosen(cfg, x, weight, bias, backend))
    for t in range(len(x)):
        plain = choose_plainly(cfg, x[t] @ weight.T, np.zeros(E) if bias is None else bias)
        assert ids[t].tolist() == plain[0]
        np.testing.assert_allclose(weights[t], plain[1], rtol=1e-4)


_LIMITED = dataclasses.replace(DEEPSEEK_V3, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3)
_best = jax.jit(_topk_experts, static_argnums=(0, 2))


@pytest.mark.skipif(len(BACKENDS) == 1, reason=native.library().reason)
@settings(max_examples=200, deadline=None)
@given(
    scores=arrays(np.float32, (3, 8), elements=st.sampled_from([0.0, -0.0, 0.25, 0.5, 0.75, -np.inf, np.inf, np.nan])),
    method=st.sampled_from(["noaux_tc", "group_limited_greedy", "greedy"]),
)
@example(scores=np.array([[-0.0] * 4 + [0.0] + [-0.0] * 3] * 3, np.float32), method="group_limited_greedy")
@example(scores=np.array([[-0.0] * 4 + [0.0] + [-0.0] * 3] * 3, np.float32), method="noaux_tc")
def test_kernels_order_scores_as_top_k_does(scores: np.ndarray, method: str) -> None:
    """Scores with ties, infinities and NaN: each row has K distinct experts even for a broken request."""
    cfg = dataclasses.replace(_LIMITED, topk_method=method)
    expected, found = (np.asarray(_best(cfg, scores, backend)) for backend in BACKENDS)
    np.testing.assert_array_equal(found, expected)


def test_a_masked_expert_never_wins_over_a_negative_score() -> None:
    cfg = dataclasses.replace(
        DEEPSEEK_V3, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, routed_scaling_factor=1.0
    )
    bias = np.array([-0.6, -0.7, -0.9, -0.95], np.float32)  # every biased score is below zero
    ids, weights = routed(cfg, np.zeros((1, 4), np.float32), bias)
    assert ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[0.5, 0.5]])


def test_the_bias_affects_the_selection_and_not_the_weights() -> None:
    cfg = dataclasses.replace(KIMI_K2, n_routed_experts=3, num_experts_per_tok=1, norm_topk_prob=False)
    logits = np.array([[2.0, 1.0, 0.0]], np.float32)
    assert routed(cfg, logits, np.zeros(3, np.float32))[0].tolist() == [[0]]
    ids, weights = routed(cfg, logits, np.array([0.0, 0.0, 9.0], np.float32))
    assert ids.tolist() == [[2]]
    assert float(weights[0, 0]) == pytest.approx(0.5 * cfg.routed_scaling_factor)


def test_bfloat16_is_scored_in_float32() -> None:
    """Activations and the router's weights agree to the bit: nothing is rounded between them and the logits."""
    rng = np.random.default_rng(0)
    x, stack = (rng.normal(size=shape).astype(jnp.bfloat16) for shape in ((8, 64), (3, 256, 64)))
    logits = jax.jit(router_logits, static_argnums=3)
    wanted = logits(x.astype(np.float32), stack.astype(np.float32), 1, None)
    for weight in (stack.astype(np.float32), stack):
        found = logits(x, weight, 1, None)
        assert found.dtype == jnp.float32
        assert (found == wanted).all()


@pytest.mark.parametrize(
    ("x", "weight", "addressed"), [(BF16, BF16, True), (BF16, F32, False), (F32, F32, False), (F32, BF16, False)]
)
def test_the_kernel_takes_what_it_multiplies_exactly(x, weight, addressed) -> None:
    """Two bfloat16 operands; wider ones use the float32 path."""
    args = (jnp.zeros((8, 64), x), jnp.zeros((3, 16, 64), weight), 1)
    traced = str(jax.make_jaxpr(lambda *args: router_logits(*args, Backend.MOSAIC))(*args))
    assert ("bf16_dense_split" in traced) == addressed
    assert ("dot_general" in traced) != addressed
