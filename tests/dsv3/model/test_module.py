"""The NNX face holds the declared tree and computes what the plain functions compute."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3.config import ModelConfig
from dsv3.model import Params, abstract, forward
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
    module = DeepseekV3.create(CFG, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    wanted = abstract(CFG, jnp.bfloat16)
    assert jax.tree.structure(module.params()) == jax.tree.structure(wanted)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), module.params())
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), wanted)
    assert module.moe.moe.router.dtype == jnp.float32
    assert len(jax.tree.leaves(nnx.state(module, nnx.Param))) == len(jax.tree.leaves(wanted))


def test_split_and_merge_round_trip() -> None:
    params = random_params(1)
    graph, state = nnx.split(DeepseekV3(CFG, params))
    again = nnx.merge(graph, state).params()
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True))


def test_calls_the_plain_forward_pass() -> None:
    params = random_params(2)
    tokens = jnp.arange(12).reshape(2, 6)
    module = DeepseekV3(CFG, params)
    out = nnx.jit(lambda m, t: m(t, with_mtp=True))(module, tokens)
    wanted = jax.jit(lambda p, t: forward(p, CFG, t, with_mtp=True))(params, tokens)
    np.testing.assert_array_equal(out.logits, wanted.logits)
    np.testing.assert_array_equal(out.mtp_logits[0], wanted.mtp_logits[0])
    np.testing.assert_allclose(module.logits(out.hidden), wanted.logits, atol=1e-5)


def test_every_parameter_gets_a_gradient() -> None:
    params = random_params(3)
    tokens = jax.random.randint(jax.random.key(4), (4, 16), 0, CFG.vocab_size)

    def loss(params):
        out = forward(params, CFG, tokens, with_mtp=True)
        scores = jax.nn.log_softmax(out.logits[:, :-1])
        main = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()
        ahead = jax.nn.log_softmax(out.mtp_logits[0][:, :-1])
        return -main - jnp.take_along_axis(ahead, tokens[:, 2:, None], axis=-1).mean()

    gradients = jax.jit(jax.grad(loss))(params)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradients))
    zero = [jax.tree_util.keystr(k) for k, g in jax.tree.leaves_with_path(gradients) if not jnp.any(g != 0)]
    assert zero == [".moe.moe.router_bias", ".mtp.layers.moe.router_bias"]  # it only moves the selection
