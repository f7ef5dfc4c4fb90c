"""Replayed routing: given experts, the router's weights for them, and their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.model.forward import forward
from tests.dsv3.model import golden

TOKENS = np.arange(2, 34, dtype=np.int32).reshape(2, 16)


@functools.partial(jax.jit, static_argnums=1)
def loss_and_gradient(params, cfg, routed_experts):
    def loss(params):
        out = forward(params, cfg, jnp.asarray(TOKENS), routed_experts=routed_experts)
        return jnp.sum(out.hidden**2), out

    (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return out, gradient


def test_given_experts_get_the_routers_weights_and_gradients() -> None:
    params, cfg = golden.model("greedy")
    shape = (*TOKENS.shape, cfg.num_moe_layers, cfg.num_experts_per_tok)
    given = np.broadcast_to(np.array([5, 2, 11, 8]), shape)
    out, gradient = loss_and_gradient(params, cfg, given)
    used = np.isin(np.arange(cfg.n_routed_experts), given[0, 0, 0])
    assert np.array_equal(np.asarray(out.expert_counts), np.where(used, TOKENS.size, 0)[None].repeat(2, 0))
    for leaf in (gradient.moe.moe.router, gradient.moe.moe.gate_up, gradient.moe.moe.down):
        moved = np.abs(np.asarray(leaf)).reshape(*leaf.shape[:2], -1).sum(axis=-1) > 0
        assert np.array_equal(moved, np.broadcast_to(used, moved.shape))


def test_a_negative_id_leaves_the_choice_to_the_router() -> None:
    """The router chooses there alone. Ids may have any integer type; those out of range give the last expert."""
    params, cfg = golden.model("greedy")
    shape = (*TOKENS.shape, cfg.num_moe_layers, cfg.num_experts_per_tok)
    own = golden.run(params, cfg, TOKENS)
    kept, _ = loss_and_gradient(params, cfg, np.full(shape, -1))
    np.testing.assert_allclose(kept.logits, own.logits, atol=1e-4)
    assert np.array_equal(kept.expert_counts, own.expert_counts)
    some = np.full(shape, -1)
    some[0, 3, 1] = [0, 1, 2, 999]
    changed, _ = loss_and_gradient(params, cfg, some)
    difference = np.abs(np.asarray(changed.hidden) - np.asarray(kept.hidden)).max(axis=-1)
    assert np.argwhere(difference > 1e-4).tolist() == [[0, 3]], "the last layer of one token, which no other sees"
    assert changed.expert_counts[1, -1] == kept.expert_counts[1, -1] + 1
    with pytest.raises(ValueError, match=r"routed_experts: shape \(2, 16, 3, 4\) instead of \(2, 16, 2, 4\)"):
        forward(params, cfg, TOKENS, routed_experts=np.zeros((2, 16, 3, 4), np.uint8))
