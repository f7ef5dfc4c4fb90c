"""Every family member computes what transformers computes: float32 logits within 1e-4 of the largest."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.dsv3.model.golden import DIRECTORY, MEMBERS, data, model, relative_error, run


@pytest.mark.parametrize("member", MEMBERS)
def test_logits(member: str) -> None:
    params, cfg = model(member)
    golden = data(member)
    out = run(params, cfg, golden["input_ids"])
    assert out.logits.dtype == jnp.float32
    assert relative_error(out.logits, golden["logits"]) < 1e-4
    counts = np.asarray(out.expert_counts[: cfg.num_moe_layers])
    assert counts.shape == (cfg.num_moe_layers, cfg.n_routed_experts)
    assert (counts.sum(axis=1) == golden["input_ids"].size * cfg.num_experts_per_tok).all()


def test_mtp_logits() -> None:
    params, cfg = model("deepseek_v3")
    golden = data("deepseek_v3")
    out = run(params, cfg, golden["input_ids"])
    assert len(out.mtp_logits) == cfg.num_nextn_predict_layers == 2
    for depth, logits in enumerate(out.mtp_logits):
        assert relative_error(logits, golden[f"mtp_logits_{depth}"]) < 1e-4
    assert out.expert_counts.shape == (cfg.num_moe_layers + 2, cfg.n_routed_experts)


def test_mtp_projection_reads_the_embedding_first() -> None:
    params, cfg = model("deepseek_v3")
    golden = data("deepseek_v3")
    swapped = dataclasses.replace(params.mtp, proj=jnp.roll(params.mtp.proj, cfg.hidden_size, axis=-1))
    out = run(dataclasses.replace(params, mtp=swapped), cfg, golden["input_ids"])
    assert relative_error(out.mtp_logits[0], golden["mtp_logits_0"]) > 0.1


def test_the_golden_data_needs_yarn() -> None:
    """Kimi's: test_families.py."""
    params, cfg = model("deepseek_v3")
    golden = data("deepseek_v3")
    out = run(params, dataclasses.replace(cfg, yarn=None, num_nextn_predict_layers=0), golden["input_ids"])
    assert relative_error(out.logits, golden["logits"]) > 0.05


@pytest.mark.parametrize("member", ["deepseek_v3", "moonlight"])
def test_the_golden_data_needs_the_selection_bias(member: str) -> None:
    params, cfg = model(member)
    golden = data(member)
    zeros = jnp.zeros_like(params.moe.moe.router_bias)
    unbiased = jax.tree.map(lambda a: zeros if a is params.moe.moe.router_bias else a, params)
    out = run(unbiased, cfg, golden["input_ids"])
    assert relative_error(out.logits, golden["logits"]) > 0.05


def test_greedy_continuations() -> None:
    params, cfg = model("greedy")
    golden = json.loads((DIRECTORY / "greedy" / "greedy.json").read_text())
    rows = [prompt + greedy for prompt, greedy in zip(golden["prompts"], golden["greedy"], strict=True)]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    best = np.asarray(run(params, cfg, tokens).logits).argmax(-1)
    for row, prompt, greedy in zip(best, golden["prompts"], golden["greedy"], strict=True):
        assert row[len(prompt) - 1 : len(prompt) + len(greedy) - 1].tolist() == greedy


def test_bfloat16_follows_float32() -> None:
    params, cfg = model("moonlight")
    golden = data("moonlight")
    routers = (params.moe.moe.router, params.moe.moe.router_bias)
    half = jax.tree.map(lambda a: a if any(a is r for r in routers) else a.astype(jnp.bfloat16), params)
    out = run(half, cfg, golden["input_ids"])
    assert out.hidden.dtype == jnp.bfloat16
    assert out.logits.dtype == jnp.float32
    assert np.abs(out.logits - golden["logits"]).mean() < 0.1 * np.abs(golden["logits"]).mean()
