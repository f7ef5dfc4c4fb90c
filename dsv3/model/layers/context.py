"""Prefill over long contexts: cached tokens and new ones in expanded form, keys and values of a few heads at a time.

Absorbed attention multiplies 576 + 512 values per head and pair of tokens, expanded attention 192 + 128. Expanding a
cached token costs as much as 171 pairs save, and it costs it once per chunk, so chunks of more tokens expand
(`dsv3.engine.crossover` decides). Keys and values of all heads would take 64 KiB per token of DeepSeek-V3: 8.6 GB for
131,072 tokens. Those of a few heads fit, and no softmax is cut in parts: each head sees all its keys at once.

The batch has room for K = `expands` tokens. The products leave out the tiles of 128 that hold none, and attention reads
no others, so that a short context costs what it has.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.config.model import ModelConfig
from dsv3.model.batch import PrefillBatch
from dsv3.model.layers.attention import Attend, Core, prefill_places, writing
from dsv3.model.layers.masked import pack
from pallas_kernels import mla
from pallas_kernels.backend import Backend
from pallas_kernels.grouped import grouped_gemm_contiguous
from pallas_kernels.search import search

BYTES_AT_ONCE = 2**30
"""Keys and values that are there at once; absorbed queries and outputs of 4,096 new tokens of DeepSeek-V3 take more."""

_TILE = 128  # rows of a product's tile, and of the attention's blocks


def heads_at_once(heads: int, key_bytes: int) -> int:
    """Returns of how many `heads` the keys and values are made at once, which take `key_bytes` per head; a divisor."""
    return max((n for n in range(1, heads + 1) if heads % n == 0 and n * key_bytes <= BYTES_AT_ONCE), default=1)


def expanded_attend(cfg: ModelConfig, batch: PrefillBatch, pages_per_layer: int, backend: Backend | None) -> Attend:
    """Attends in prefill: new tokens to each other and to the cached ones, expanded. The state is the page pool."""
    core = _expanded_core(cfg, batch, pages_per_layer, backend)
    return writing(cfg, prefill_places(batch, cfg.page_size), pages_per_layer, backend, core)


def _expanded_core(cfg: ModelConfig, batch: PrefillBatch, pages_per_layer: int, backend: Backend | None) -> Core:
    K, R, V = batch.expands, cfg.kv_lora_rank, cfg.v_head_dim
    new, rows = jnp.diff(batch.cu_lengths), jnp.arange(len(batch.tokens), dtype=jnp.int32)
    lengths = jnp.where(new > 0, batch.context_lengths + new, 0)
    packed = pack(batch.page_table, lengths, K // cfg.page_size, cfg.page_size)
    request = search(batch.cu_lengths[1:], rows, side="right")
    live, first = rows < batch.cu_lengths[-1], packed.starts[jnp.minimum(request, len(new) - 1)]
    starts, ends = jnp.where(live, first, 0), jnp.where(live, first + batch.positions + 1, 0)
    own = jnp.where(live, first + batch.positions, K + rows)
    token = jnp.full(K, len(rows), jnp.int32).at[own].set(rows, mode="drop", unique_indices=True)
    tiles = jnp.where((packed.counts.reshape(-1, _TILE // cfg.page_size) > 0).any(axis=1), 0, -1)

    def attend(tokens, params, layer, cache_layer, pages):
        ids = cache_layer * pages_per_layer + packed.page_ids
        latents = mla.rows_of_pages(pages, ids, packed.counts, R, tokens.latent.dtype)
        mine = tokens.latent.at[token].get(mode="clip")  # unrounded, as new tokens see each other in the absorbed form
        latents = jnp.where((token < len(rows))[:, None], mine, latents)
        latents, shared = latents[:, :R], latents[:, R:]
        T, H, _ = tokens.q.shape
        heads = heads_at_once(H, K * (cfg.qk_nope_head_dim + V) * tokens.q.dtype.itemsize)
        how: dict[str, Any] = {"scale": cfg.softmax_scale, "shared_key": shared, "backend": backend}

        def up(stack: jax.Array, part: jax.Array) -> jax.Array:
            flat = stack.reshape(-1, heads * stack.shape[2], R)
            at = layer * (H // heads) + part
            made = grouped_gemm_contiguous(latents, flat, tiles, tile_m=_TILE, group_offset=at, backend=backend)
            return made.reshape(K, heads, stack.shape[2])

        def of_heads(part: jax.Array, out: jax.Array) -> jax.Array:
            q = lax.dynamic_slice_in_dim(tokens.q, part * heads, heads, axis=1)
            k, v = up(params.k_up, part), up(params.v_up, part)
            found, _ = mla.mla_prefill_spans(q, k, v, starts, ends, **how)
            return lax.dynamic_update_slice_in_dim(out, found, part * heads, axis=1)

        return lax.fori_loop(0, H // heads, of_heads, jnp.zeros((T, H, V), tokens.q.dtype))

    return attend
