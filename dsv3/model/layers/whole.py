"""Attention of whole sequences without a cache: in training, and for a look inside."""

from typing import Any

import jax
import jax.numpy as jnp

from dsv3.config import ModelConfig
from dsv3.model.layers.attention import Attend, Projected, expand
from dsv3.model.layers.linear import Index, Numerics
from dsv3.model.layers.sparse import visible_pairs
from dsv3.model.params import AttentionParams
from pallas_kernels import mla


def causal_attend(cfg: ModelConfig, batch: int, numerics: Numerics) -> Attend:
    """Attends in training: `batch` equally long sequences lie one after the other; there is no cache.

    The state is None; where layers share an indexer's choice it is that of `no_choice`.
    """

    def attend(tokens, params, layer, cache_layer, state):
        weights, v, pairs = attention_weights(cfg, batch, tokens, params, layer, cache_layer, state, numerics)
        out = jnp.einsum("bhqk,bkhv->bqhv", weights.astype(v.dtype), v).reshape(-1, *v.shape[2:])
        return out, None if state is None else pairs

    return attend


def no_choice(cfg: ModelConfig, batch: int, length: int) -> jax.Array | None:
    """Returns the state before the first layer: which tokens see which, where layers share that, else None."""
    shares = cfg.indexer is not None and cfg.indexer.shared_layers
    return jnp.zeros((batch, length, length), jnp.bool) if shares else None


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
    """Returns attention weights float32 `[B, H, S, S]`, values `[B, S, H, V]`, and who sees whom, bool `[B, S, S]`."""
    own, shared, v = expand(tokens.latent, params, layer, numerics)
    k = mla.whole_keys(own, shared)
    q, k, v = (a.reshape(batch, -1, *a.shape[1:]) for a in (tokens.q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * cfg.softmax_scale
    if tokens.index is None:
        pairs = jnp.tril(jnp.ones((1, *scores.shape[-2:]), jnp.bool))
    else:
        pairs = visible_pairs(cfg, tokens.index, batch, cache_layer, last)
    return jax.nn.softmax(jnp.where(pairs[:, None], scores, -jnp.inf), axis=-1), v, pairs
