"""Attention of whole sequences without a KV cache, for training and inspection."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.config.model import ModelConfig
from dsv3.model.layers.attention import Attend, Projected, materialize_kv
from dsv3.model.layers.indexer import shares_topk
from dsv3.model.layers.linear import Index, Numerics
from dsv3.model.layers.sparse import visible_pairs
from dsv3.model.params import AttentionParams
from pallas_kernels import mla


def causal_attend(cfg: ModelConfig, batch: int, numerics: Numerics) -> Attend:
    """Attends without a cache: `batch` sequences of one length lie one after the other.

    The state is None, or the top-k mask if layers share an indexer's top-k (`initial_topk_mask`).
    """

    def attend(tokens, params, place, state):
        q, k, v = _heads(batch, tokens, params, place.layer, numerics)
        pairs = _pairs(cfg, batch, tokens, place.cache_layer, state, q.shape[1])
        out = softmax_attention(q, k, v, pairs, cfg.softmax_scale)
        return out.reshape(-1, *v.shape[2:]), None if state is None else pairs

    return attend


def initial_topk_mask(cfg: ModelConfig, batch: int, length: int) -> jax.Array | None:
    """Returns the state before the first layer: an empty mask if layers share an indexer's top-k, else None."""
    return jnp.zeros((batch, length, length), jnp.bool) if shares_topk(cfg) else None


def attention_weights(
    cfg: ModelConfig,
    batch: int,
    tokens: Projected,
    params: AttentionParams,
    layer: Index,
    cache_layer: Index,
    last: Any,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns attention weights float32 `[B, H, S, S]`, values `[B, S, H, V]` and the mask, bool `[B, S, S]`."""
    q, k, v = _heads(batch, tokens, params, layer, numerics)
    pairs = _pairs(cfg, batch, tokens, cache_layer, last, q.shape[1])
    return _weights(q, k, pairs, cfg.softmax_scale), v, pairs


def _heads(
    batch: int, tokens: Projected, params: AttentionParams, layer: Index, numerics: Numerics
) -> tuple[jax.Array, ...]:
    """Returns queries and keys `[B, S, H, N + P]` and values `[B, S, H, V]`."""
    own, shared, v = materialize_kv(tokens.latent, params, layer, numerics)
    return tuple(a.reshape(batch, -1, *a.shape[1:]) for a in (tokens.q, mla.whole_keys(own, shared), v))


def _pairs(cfg: ModelConfig, batch: int, tokens: Projected, cache_layer: Index, last: Any, length: int) -> jax.Array:
    """Returns the mask `[.., S, S]`: causal, or the top-k tokens of an indexer."""
    if tokens.index is None:
        return jnp.tril(jnp.ones((1, length, length), jnp.bool))
    return visible_pairs(cfg, tokens.index, batch, cache_layer, last)


def _weights(q: jax.Array, k: jax.Array, pairs: jax.Array, scale: float) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * scale
    return jax.nn.softmax(jnp.where(pairs[:, None], scores, -jnp.inf), axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array, pairs: jax.Array, scale: float) -> jax.Array:
    """Returns the weighted sums of values `[B, S, H, V]`.

    Its gradient saves the weights in the dtype of v and multiplies in that dtype. JAX's own gradient saves float32
    weights, masks and maxima, and widens every product to float32.
    """
    return _attended_forward(q, k, v, pairs, scale)[0]


def _attended_forward(q, k, v, pairs, scale):
    weights = _weights(q, k, pairs, scale).astype(v.dtype)
    out = jnp.einsum("bhqk,bkhv->bqhv", weights, v)
    return out, (q, k, v, weights, out)


def _attended_backward(scale, saved, dy):
    q, k, v, weights, out = saved
    dv = jnp.einsum("bhqk,bqhv->bkhv", weights, dy, preferred_element_type=jnp.float32)
    dw = jnp.einsum("bqhv,bkhv->bhqk", dy, v, preferred_element_type=jnp.float32)
    along = jnp.einsum("bqhv,bqhv->bhq", dy, out, preferred_element_type=jnp.float32)[..., None]
    ds = (weights.astype(jnp.float32) * (dw - along) * scale).astype(q.dtype)
    dq = jnp.einsum("bhqk,bkhd->bqhd", ds, k, preferred_element_type=jnp.float32)
    dk = jnp.einsum("bhqk,bqhd->bkhd", ds, q, preferred_element_type=jnp.float32)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


softmax_attention.defvjp(_attended_forward, _attended_backward)
