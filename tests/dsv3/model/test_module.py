"""The NNX module holds the declared tree and gives the results of the plain functions."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3.config.model import ModelConfig
from dsv3.model import Params, abstract, forward
from dsv3.model.forward import ForwardOutput
from dsv3.model.module import DeepseekV3

CFG = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    intermediate_size=24,
    moe_intermediate_size=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    q_lora_rank=8,
    num_nextn_predict_layers=1,
)


def random_params(seed: int) -> Params:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0, 0.3, s.shape), s.dtype), abstract(CFG, jnp.float32))


def test_the_tree_is_the_declared_one() -> None:
    created = jax.eval_shape(lambda: DeepseekV3.create(CFG, rngs=nnx.Rngs(0), dtype=jnp.bfloat16).params())
    wanted = abstract(CFG, jnp.bfloat16)
    assert jax.tree.structure(created) == jax.tree.structure(wanted)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), created)
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), wanted)
    module = DeepseekV3(CFG, random_params(0))
    assert module.moe.moe.router.dtype == jnp.float32
    assert len(jax.tree.leaves(nnx.state(module, nnx.Param))) == len(jax.tree.leaves(wanted))


def test_split_and_merge_round_trip() -> None:
    params = random_params(1)
    graph, state = nnx.split(DeepseekV3(CFG, params))
    again = nnx.merge(graph, state).params()
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True))


def test_calls_the_plain_forward_pass() -> None:
    """Its program is that of the plain functions. That every parameter gets a gradient: training/test_step.py."""
    params, tokens = random_params(2), jnp.arange(12).reshape(2, 6)

    def as_module(params: Params, tokens: jax.Array) -> ForwardOutput:
        return DeepseekV3(CFG, params)(tokens, with_mtp=True)

    def plain(params: Params, tokens: jax.Array) -> ForwardOutput:
        return forward(params, CFG, tokens, with_mtp=True)

    traced, wanted = (str(jax.make_jaxpr(function)(params, tokens)) for function in (as_module, plain))
    assert traced == wanted
    hidden = np.random.default_rng(0).normal(size=(3, CFG.hidden_size)).astype(np.float32)
    got = nnx.jit(lambda m, h: m.logits(h))(DeepseekV3(CFG, params), hidden)
    np.testing.assert_allclose(got, hidden @ np.asarray(params.head).T, atol=1e-5)
