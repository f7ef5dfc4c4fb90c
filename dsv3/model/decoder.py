"""Decoder layers, and the loop over them that every mode shares."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.config import ModelConfig
from dsv3.model import experts
from dsv3.model.attention import Attend, Projected, project
from dsv3.model.linear import Index, Numerics, at, linear, mlp
from dsv3.model.norm import rms_norm
from dsv3.model.params import LayerParams, MoeParams, Params
from dsv3.model.rope import Rotation
from dsv3.model.router import route, router_logits
from dsv3.model.tensor_parallel import ONE_DEVICE, Shards


@dataclasses.dataclass(frozen=True)
class Step:
    """What the layers of one step have in common.

    `valid` `[T]` marks the rows that are no padding. `routed` computes routed experts: here, or wherever they live.
    `shards` are the devices that split the rest of each layer.
    """

    cfg: ModelConfig
    rotation: Rotation
    attend: Attend
    valid: jax.Array
    numerics: Numerics
    routed: experts.RoutedExperts = experts.moe
    shards: Shards = ONE_DEVICE


def run_layers(
    layers: LayerParams, step: Step, x: jax.Array, state: Any, first_cache_layer: int
) -> tuple[jax.Array, Any, experts.Tally | None]:
    """Runs a stack of layers on `x` `[T, D]`; also returns the attention state and the experts' tally by layer."""
    L = layers.input_norm.shape[0]

    def body(carry: tuple[jax.Array, Any], layer: jax.Array) -> tuple[tuple[jax.Array, Any], experts.Tally | None]:
        x, state, tally = run_layer(layers, layer, step, *carry, first_cache_layer + layer)
        return (x, state), tally

    (x, state), tally = jax.lax.scan(body, (x, state), jnp.arange(L, dtype=jnp.int32))
    return x, state, tally


def run_layer(
    layers: LayerParams, layer: Index, step: Step, x: jax.Array, state: Any, cache_layer: Index
) -> tuple[jax.Array, Any, experts.Tally | None]:
    """One decoder layer: attention, then a dense MLP or the experts, each after a norm and around a residual."""
    x, state = attention_block(layers, layer, step, x, state, cache_layer)
    normed = rms_norm(x, at(layers.post_norm, layer), step.cfg.rms_norm_eps)
    if layers.mlp is not None:
        with jax.named_scope("mlp"):
            return x + step.shards.sum(mlp(normed, layers.mlp, layer, step.numerics)), state, None
    assert layers.moe is not None  # a layer has either
    with jax.named_scope("moe"):
        ids, weights = choose_experts(layers.moe, layer, step, normed)
        y, tally = step.routed(normed, ids, weights, layers.moe, layer, step.numerics)
        return x + y + shared_expert(layers.moe, layer, step, normed), state, tally


def attention_block(
    layers: LayerParams, layer: Index, step: Step, x: jax.Array, state: Any, cache_layer: Index
) -> tuple[jax.Array, Any]:
    """`x` `[T, D]` after attention and its residual, and the attention state."""
    heads, state = core(layers, layer, step, queries(layers, layer, step, x), state, cache_layer)
    return output(layers, layer, step, x, heads), state


def queries(layers: LayerParams, layer: Index, step: Step, x: jax.Array) -> Projected:
    """The part of attention before its core: norm and projections of `x` `[T, D]`."""
    with jax.named_scope("attention"):
        normed = rms_norm(x, at(layers.input_norm, layer), step.cfg.rms_norm_eps)
        return project(normed, layers.attention, layer, step.cfg, step.rotation, step.numerics)


@jax.named_scope("attention")
def core(
    layers: LayerParams, layer: Index, step: Step, tokens: Projected, state: Any, cache_layer: Index
) -> tuple[jax.Array, Any]:
    """Cache write and attention core: `[T, H, V]` of the heads of this device, and the attention state."""
    return step.attend(tokens, layers.attention, layer, cache_layer, state)


@jax.named_scope("attention")
def output(layers: LayerParams, layer: Index, step: Step, x: jax.Array, heads: jax.Array) -> jax.Array:
    """`x` after the output projection of `heads` and the residual."""
    out = linear(heads.reshape(heads.shape[0], -1), layers.attention.o, layer, step.numerics)
    return x + step.shards.sum(out)


@jax.named_scope("router")
def choose_experts(moe: MoeParams, layer: Index, step: Step, normed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids and weights `[T, K]` of each row's experts; -1 in padding rows."""
    bias = None if moe.router_bias is None else at(moe.router_bias, layer)
    ids, weights = route(step.cfg, router_logits(normed, moe.router, layer, step.numerics.backend), bias)
    return jnp.where(step.valid[:, None], ids, -1), weights


@jax.named_scope("shared_expert")
def shared_expert(moe: MoeParams, layer: Index, step: Step, normed: jax.Array) -> jax.Array | float:
    """The shared expert's part `[T, D]`, added unscaled; 0 in a model without one."""
    return 0.0 if moe.shared is None else step.shards.sum(mlp(normed, moe.shared, layer, step.numerics))


def run_decoder(params: Params, step: Step, x: jax.Array, state: Any) -> tuple[jax.Array, Any, experts.Tally | None]:
    """All layers of the main model and its final norm: hidden `[T, D]`, state, the experts' tally by MoE layer."""
    cfg, tally = step.cfg, None
    if params.dense is not None:
        x, state, _ = run_layers(params.dense, step, x, state, 0)
    if params.moe is not None:
        x, state, tally = run_layers(params.moe, step, x, state, cfg.num_dense_layers)
    return rms_norm(x, params.norm, cfg.rms_norm_eps), state, tally


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """Embeddings `[..., D]` of `tokens` `[...]`; ids out of range give the last row, never undefined memory."""
    return params.embed.at[tokens].get(mode="clip")


@jax.named_scope("head")
def logits(params: Params, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits float32 `[..., W]` of hidden states `[..., D]` taken after the final norm."""
    head = params.embed if cfg.tie_word_embeddings else params.head
    return jnp.einsum("...d,wd->...w", hidden, head, preferred_element_type=jnp.float32)
