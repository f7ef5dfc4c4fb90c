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

_QUERIES = 512  # at least so many rows of weights at once


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
    return jax.nn.softmax(_scores(q, k, pairs, cfg.softmax_scale), axis=-1), v, pairs


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


def _scores(q: jax.Array, k: jax.Array, pairs: jax.Array, scale: float) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * scale
    return jnp.where(pairs[:, None], scores, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array, pairs: jax.Array, scale: float) -> jax.Array:
    """Returns the weighted sums of values `[B, S, H, V]`; `pairs` `[.., S, S]` are causal.

    Weights exist for a block of queries at a time. The gradient computes them again from saved log-sum-exps, so memory
    grows with S, and multiplies in the dtype of v. JAX's own gradient saves all weights in float32.
    """
    return _attended_forward(q, k, v, pairs, scale)[0]


def _query_blocks(length: int) -> list[slice]:
    """Returns blocks of queries: of `_QUERIES`, or an eighth of all of them. Each attends to the keys up to its end."""
    block = max(_QUERIES, -(-length // 8))
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def _attended_forward(q, k, v, pairs, scale):
    out, sums = [], []
    for block in _query_blocks(q.shape[1]):
        keys = slice(block.stop)
        scores = _scores(q[:, block], k[:, keys], pairs[:, block, keys], scale)
        sums.append(jax.nn.logsumexp(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - sums[-1]).astype(v.dtype)
        out.append(jnp.einsum("bhqk,bkhv->bqhv", weights, v[:, keys]))
    whole = jnp.concatenate(out, axis=1)
    return whole, (q, k, v, pairs, whole, sums)


def _attended_backward(scale, saved, dy):
    q, k, v, pairs, out, sums = saved
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for block, lse in zip(_query_blocks(q.shape[1]), sums, strict=True):
        keys = slice(block.stop)
        own, seen, dy_own = q[:, block], k[:, keys], dy[:, block]
        weights = jnp.exp(_scores(own, seen, pairs[:, block, keys], scale) - lse)
        values = jnp.einsum("bhqk,bqhv->bkhv", weights.astype(v.dtype), dy_own, preferred_element_type=jnp.float32)
        dv = dv.at[:, keys].add(values)
        dw = jnp.einsum("bqhv,bkhv->bhqk", dy_own, v[:, keys], preferred_element_type=jnp.float32)
        along = jnp.einsum("bqhv,bqhv->bhq", dy_own, out[:, block], preferred_element_type=jnp.float32)[..., None]
        ds = (weights * (dw - along) * scale).astype(q.dtype)
        dq.append(jnp.einsum("bhqk,bkhd->bqhd", ds, seen, preferred_element_type=jnp.float32))
        dk = dk.at[:, keys].add(jnp.einsum("bhqk,bqhd->bkhd", ds, own, preferred_element_type=jnp.float32))
    return jnp.concatenate(dq, axis=1).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


softmax_attention.defvjp(_attended_forward, _attended_backward)
