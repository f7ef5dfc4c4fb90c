"""Every other model family gives the results of its transformers class, from its published file format."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.config.model import ModelConfig
from dsv3.model.layers.rope import amplitude
from dsv3.model.params import Params
from tests.dsv3.model.golden import data, model, relative_error, run

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "axk1", "kimi_k25", "mistral4", "mistral_large_3")


def batch(family: str) -> np.ndarray:
    """The sequence with golden logits, and the 32 prompts with their continuations: one shape for all tests."""
    golden = data(family)
    known, prompts, greedy = golden["input_ids"][0], golden["prompts"], golden["greedy"]
    tokens = np.zeros((len(prompts) + 1, prompts.shape[1] + greedy.shape[1]), np.int32)
    tokens[0, : len(known)] = known
    for row, prompt, more in zip(tokens[1:], prompts, greedy, strict=True):
        length = (prompt >= 0).sum()
        row[:length], row[length : length + len(more)] = prompt[:length], more
    return tokens


def error(logits: jax.Array, family: str, name: str = "logits") -> float:
    expected = data(family)[name][0]
    return relative_error(logits[0, : len(expected)], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_32_greedy_continuations(family: str) -> None:
    golden = data(family)
    out = run(*model(family), batch(family))
    assert error(out.logits, family) < 1e-4
    assert len(golden["greedy"]) == 32
    for row, prompt, more in zip(np.asarray(out.logits[1:]), golden["prompts"], golden["greedy"], strict=True):
        start = (prompt >= 0).sum() - 1
        assert row[start : start + len(more)].argmax(-1).tolist() == more.tolist()


def test_the_module_of_glm() -> None:
    params, cfg = model("glm4_moe_lite")
    assert cfg.num_nextn_predict_layers == 1
    out = run(params, cfg, batch("glm4_moe_lite"))
    assert error(out.mtp_logits[0], "glm4_moe_lite", "mtp_logits_0") < 1e-4


def with_leaf(params: Params, leaf: jax.Array, value: jax.Array) -> Params:
    return jax.tree.map(lambda a: value if a is leaf else a, params)


def paired_otherwise(params: Params, cfg: ModelConfig) -> Params:
    """Permutes rows, which has the effect of an indexer with the other pairing in the same program."""
    P, Y = cfg.qk_rope_head_dim, cfg.indexer.head_dim
    halves = np.arange(P).reshape(-1, 2).T.reshape(-1)  # of pairs of neighbors
    order = np.arange(Y)
    order[:P] = np.argsort(halves) if cfg.indexer.interleaved else halves

    def moved(a: jax.Array) -> jax.Array:
        a = np.asarray(a)
        return a.reshape(len(a), -1, Y, *a.shape[2:])[:, :, order].reshape(a.shape)

    stacks = [stack.attention.indexer for stack in (params.dense, params.moe) if stack is not None]
    rows = [a for each in stacks if each is not None for a in (each.q_b, each.k, each.k_norm, each.k_bias)]
    return jax.tree.map(lambda a: moved(a) if any(a is row for row in rows) else a, params)


def changed(family: str) -> tuple[Params, ModelConfig]:
    """The model without the feature that distinguishes its family."""
    params, cfg = model(family)
    moe = params.moe
    if cfg.indexer is not None:  # wrong RoPE pairing: a bug that several engines had, invisible in short texts
        return paired_otherwise(params, cfg), cfg
    if family == "axk1":
        return with_leaf(params, moe.post_moe_norm, jnp.ones_like(moe.post_moe_norm)), cfg
    if family == "glm4_moe_lite":
        return with_leaf(params, moe.moe.router_bias, jnp.zeros_like(moe.moe.router_bias)), cfg
    if family == "kimi_k25":
        return params, dataclasses.replace(cfg, yarn=None)
    if family == "mistral4":
        return params, dataclasses.replace(cfg, query_scaling=None)
    return params, dataclasses.replace(cfg, norm_topk_prob=False)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "glm_moe_dsa"])  # as deepseek_v32
def test_the_golden_data_needs_the_feature_of_its_family(family: str) -> None:
    params, cfg = changed(family)
    assert error(run(params, cfg, batch(family)).logits, family) > 0.01


def test_the_softmax_has_a_temperature_only_if_the_file_sets_it() -> None:
    """transformers' config.json has mscale_all_dim 1, Mistral's params.json has apply_scale false."""
    assert model("mistral4")[1].softmax_scale > 1.5 * model("mistral4")[1].qk_head_dim ** -0.5
    params, cfg = model("mistral_large_3")
    assert cfg.softmax_scale == cfg.qk_head_dim**-0.5
    warm = dataclasses.replace(cfg, yarn=dataclasses.replace(cfg.yarn, mscale=1.0, mscale_all_dim=1.0))
    assert amplitude(warm.yarn) == amplitude(cfg.yarn)
    factor = warm.softmax_scale / cfg.softmax_scale  # applied to the queries: equivalent, and needs no other program
    for stack in (params.dense, params.moe):
        if stack is not None:
            params = with_leaf(params, stack.attention.q_b, stack.attention.q_b * factor)
    assert error(run(params, cfg, batch("mistral_large_3")).logits, "mistral_large_3") > 0.01
