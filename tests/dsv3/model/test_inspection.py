"""Inspection computes what training and serving compute, and shows what is inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.config.model import PAGE_SIZE
from dsv3.model import inspection
from dsv3.model.batch import PrefillBatch
from dsv3.model.inspection import Inspection, inspect
from dsv3.model.steps import prefill
from tests.dsv3.model import golden

LENGTH = 20


@pytest.fixture(scope="module")
def member() -> str:
    return "deepseek_v3"


@pytest.fixture(scope="module")
def tokens(member) -> np.ndarray:
    return golden.data(member)["input_ids"][0, :LENGTH].astype(np.int32)


@pytest.fixture(scope="module")
def seen(member, tokens) -> Inspection:
    return inspect(*golden.model(member), tokens)


def test_shapes_are_those_of_the_docstrings(member, tokens, seen) -> None:
    _, cfg = golden.model(member)
    T, D, H = len(tokens), cfg.hidden_size, cfg.num_attention_heads
    assert seen.embeddings.shape == seen.hidden.shape == (T, D) and seen.logits.shape == (T, cfg.vocab_size)
    assert [each.layer for each in seen.layers] == list(range(cfg.num_hidden_layers))
    for each in seen.layers:
        assert each.hidden.shape == (T, D) and each.latents.shape == (T, cfg.latent_dim)
        assert each.attention.shape == (H, T, T)
        if each.layer < cfg.num_dense_layers:
            assert each.expert_ids is each.router_logits is each.expert_weights is None
        else:
            assert each.router_logits.shape == (T, cfg.n_routed_experts)
            assert each.expert_ids.shape == each.expert_weights.shape == (T, cfg.num_experts_per_tok)
    assert seen.expert_load.shape == (cfg.num_moe_layers, cfg.n_routed_experts)
    assert (seen.expert_load.sum(axis=1) == T * cfg.num_experts_per_tok).all()


def test_it_computes_what_transformers_does(member, seen) -> None:
    """Also for a model with softmax scores and without a query latent."""
    other = "deepseek_v2_lite"
    found = inspect(*golden.model(other), golden.data(other)["input_ids"][0, :LENGTH], layers=[], attention=False)
    for name, each in ((member, seen), (other, found)):
        assert golden.relative_error(each.logits, golden.data(name)["logits"][0, :LENGTH]) < 1e-4


def test_latents_and_load_are_those_of_a_served_step(member, tokens, seen) -> None:
    params, cfg = golden.model(member)
    numbers = jnp.arange(LENGTH)
    batch = PrefillBatch(jnp.array(tokens), numbers, jnp.array([0, LENGTH]), jnp.array([0]), jnp.array([[0]]))
    pages = {"latents": jnp.zeros((cfg.num_cache_layers, PAGE_SIZE, cfg.latent_dim))}
    served = jax.jit(prefill, static_argnums=1)(params, cfg, batch, pages)
    for each in seen.layers:
        assert golden.relative_error(each.latents, served.pages["latents"][each.layer, :LENGTH]) < 1e-4
    assert (seen.expert_load == np.asarray(served.expert_counts)[: cfg.num_moe_layers]).all()
    assert golden.relative_error(seen.hidden, served.hidden) < 1e-4


def test_attention_is_causal_and_sums_to_one(seen) -> None:
    for each in seen.layers:
        assert np.allclose(each.attention.sum(axis=-1), 1, atol=1e-5)
        assert not np.triu(each.attention, 1).any()


def test_recording_some_layers_changes_no_value(member, tokens, seen) -> None:
    part = inspect(*golden.model(member), tokens, layers=[1], attention=False)
    [only] = part.layers
    assert only.layer == 1 and only.attention is None
    assert (only.hidden == seen.layers[1].hidden).all() and (part.logits == seen.logits).all()


def test_a_hook_sees_layers_in_order_and_may_change_the_stream(member, tokens, seen) -> None:
    model, layers = golden.model(member), []
    same = inspect(*model, tokens, hook=lambda values: layers.append(values.layer))
    assert layers == [each.layer for each in seen.layers] and (same.logits == seen.logits).all()

    def silence(values):
        return values.hidden * (np.arange(LENGTH) != 3)[:, None] if values.layer == 0 else None

    changed = inspect(*model, tokens, hook=silence)
    assert (changed.logits[:3] == seen.logits[:3]).all()
    assert all((changed.logits[i] != seen.logits[i]).any() for i in range(3, LENGTH))
    restored = inspect(*model, tokens, hook=lambda values: seen.layers[values.layer].hidden)
    assert np.allclose(restored.logits, seen.logits)


def test_invalid_arguments_are_rejected(member, tokens, monkeypatch) -> None:
    model = golden.model(member)
    for change, words in (
        ({"layers": [99]}, r"layers \[99\] do not exist"),
        ({"layers": [-1]}, r"layers \[-1\] do not exist"),
        ({"hook": lambda values: np.zeros(3)}, "hook returned shape"),
    ):
        with pytest.raises(ValueError, match=words):
            inspect(*model, tokens, **change)
    with pytest.raises(ValueError, match="token_ids is empty"):
        inspect(*model, [])
    monkeypatch.setattr(inspection, "MAX_BYTES", 10_000)
    with pytest.raises(ValueError, match="attention=False"):
        inspect(*model, tokens)
