"""Attention to a window and compressed entries of whole sequences, without a cache: in training, and as a reference."""

import jax
import jax.numpy as jnp

from dsv3.config.model import ModelConfig
from dsv3.model.layers.attention import Attend, LayerPlace
from dsv3.model.layers.compressed_attention import (
    compressed_of,
    compressor_of,
    contributions,
    entry_rotation,
    in_window,
    index_scores,
    norm_and_rotate,
    num_complete,
    pool_window,
    window_rows,
)
from dsv3.model.layers.indexer import IndexTokens
from dsv3.model.layers.linear import layer_slice
from dsv3.model.params import CompressedAttentionParams, CompressorParams
from pallas_kernels import dsa
from pallas_kernels.compressed import sink_attention


def uncached_attend(cfg: ModelConfig, batch: int) -> Attend:
    """Attends without a cache: `batch` equally long sequences lie one after the other. The state is None."""

    def attend(tokens, params, place, state):
        q, latent = (a.reshape(batch, -1, *a.shape[1:]) for a in (tokens.q, tokens.latent))
        positions = jnp.arange(q.shape[1], dtype=jnp.int32)
        keys, visible = latent, jnp.broadcast_to(in_window(cfg, positions, positions), (batch, *2 * positions.shape))
        if (compressor := compressor_of(params, cfg, place.ratio)) is not None and len(positions) >= place.ratio:
            entries = _entries(cfg, tokens.entries, compressor, place, batch, latent.dtype)
            seen = _seen(cfg, tokens.index, params, place, batch, len(positions))
            keys, visible = jnp.concatenate([keys, entries], 1), jnp.concatenate([visible, seen], 2)
        out, _ = sink_attention(q, keys, visible, layer_slice(params.sink, place.layer), cfg.softmax_scale)
        return out.reshape(tokens.q.shape), state

    return attend


def _entries(
    cfg: ModelConfig,
    given: jax.Array,
    params: CompressorParams,
    place: LayerPlace,
    batch: int,
    dtype: jnp.dtype,
) -> jax.Array:
    """Returns the entries `[B, W, d]` of all whole windows."""
    overlaps, d = place.ratio == compressed_of(cfg).sparse_ratio, params.norm.shape[-1]
    positions = jnp.tile(jnp.arange(len(given) // batch, dtype=jnp.int32), batch)
    rows = contributions(given, params, place.of_ratio, positions).reshape(batch, -1, given.shape[-1])
    entries = jnp.arange(rows.shape[1] // place.ratio, dtype=jnp.int32)
    at = window_rows(place.ratio, entries, overlaps=overlaps)
    made = pool_window(rows[:, jnp.maximum(at, 0)], at >= 0, d)
    by = entry_rotation(cfg, jnp.tile(entries * place.ratio, batch))
    done = norm_and_rotate(made.reshape(-1, d), params, place.of_ratio, by, cfg.rms_norm_eps, dtype)
    return done.reshape(made.shape)


def _seen(
    cfg: ModelConfig,
    index: IndexTokens | None,
    params: CompressedAttentionParams,
    place: LayerPlace,
    batch: int,
    length: int,
) -> jax.Array:
    """Returns which entries each token attends to, bool `[B, S, W]`: all that are complete, or the indexer's choice."""
    count, best = length // place.ratio, compressed_of(cfg).indexer.topk
    visible = num_complete(place.ratio, jnp.arange(length, dtype=jnp.int32))
    seen = jnp.broadcast_to(jnp.arange(count) < visible[:, None], (batch, length, count))
    if index is None or count <= best:
        return seen
    assert params.indexer is not None
    q, weights = (a.reshape(batch, -1, *a.shape[1:]) for a in (index.q, index.weights))
    keys = _entries(cfg, index.key, params.indexer.compressor, place, batch, q.dtype)
    scores = jnp.where(seen, index_scores(q, weights, keys), -jnp.inf).reshape(-1, count)
    chosen = dsa.select_topk(scores, jnp.tile(visible, batch), best)
    rows = jnp.arange(len(scores))[:, None]
    return jnp.zeros(scores.shape, jnp.bool).at[rows, chosen].set(True, mode="drop").reshape(seen.shape)
