"""Prefill in expanded form: keys and values of every head are made of cached latents, and all are multiplied.

Absorbed attention multiplies 576 + 512 values per head and pair of tokens, expanded attention 192 + 128. Expanding a
cached token costs as much as 171 pairs save, and it costs it once per step. The batch has `room` for K tokens, and
`dsv3.model.forms` says when that pays.

In dense attention, over long contexts, keys and values of all heads would take 64 KiB per token of DeepSeek-V3: 8.6 GB
for 131,072 tokens. Those of a few heads at a time fit, and no softmax is cut in parts: each head sees all its keys at
once. The products leave out the tiles of 128 that hold none, and attention reads no others, so that a short context
costs what it has.

In sparse attention (DeepSeek-V3.2) a mask says which tokens a query takes. Copying 2,048 rows for each query and
multiplying them in absorbed form takes 3.4 times the operations, and is cheaper all the same once requests are long.
Keys come from the pages, new ones too, so both forms attend to the same numbers: rounded ones where pages are FP8.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.config.model import ModelConfig
from dsv3.model.batch import PrefillBatch
from dsv3.model.layers.attention import Core, expand
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.sparse import ChosenForm, Rows
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


class Packed(NamedTuple):
    """The cached tokens of the requests of a batch side by side, those of each from a whole page on."""

    page_ids: jax.Array  # [K / page_size] int32, page within a layer
    counts: jax.Array  # [K / page_size] int32, rows of it that are written
    starts: jax.Array  # [B] int32, where the tokens of a request begin


def pack(page_table: jax.Array, lengths: jax.Array, pages: int, page_size: int) -> Packed:
    """Returns where the first `lengths` `[B]` tokens of each request go in so many `pages`, which suffice."""
    needed = -(-lengths // page_size)
    ends = jnp.cumsum(needed)
    starts, place = ends - needed, jnp.arange(pages, dtype=jnp.int32)
    owner = search(ends, place, side="right")  # B behind the last request
    live, owner = owner < len(lengths), jnp.minimum(owner, len(lengths) - 1)
    column = jnp.clip(place - starts[owner], 0, page_table.shape[1] - 1)
    counts = jnp.clip(lengths[owner] - page_size * column, 0, page_size)
    return Packed(
        jnp.where(live, page_table[owner, column], 0),
        jnp.where(live, counts, 0),
        (page_size * starts).astype(jnp.int32),
    )


def materialized_core(cfg: ModelConfig, batch: PrefillBatch, pages_per_layer: int, backend: Backend | None) -> Core:
    """Attends in prefill: new tokens to each other and to the cached ones."""
    K, R, V = batch.room, cfg.kv_lora_rank, cfg.v_head_dim
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


def masked_form(
    cfg: ModelConfig, batch: PrefillBatch, rows: Rows, pages_per_layer: int, backend: Backend | None
) -> ChosenForm:
    """Attends in prefill to the chosen tokens among all."""
    visible = rows.visible
    new = jnp.diff(batch.cu_lengths)
    lengths = jnp.where(new > 0, batch.context_lengths + new, 0)
    packed = pack(batch.page_table, lengths, batch.room // cfg.page_size, cfg.page_size)
    starts = jnp.where(visible > 0, packed.starts[rows.requests], 0)

    def attend(tokens, params, layer, cache_layer, latents, chosen):
        ids = cache_layer * pages_per_layer + packed.page_ids
        made_of = mla.rows_of_pages(latents, ids, packed.counts, cfg.kv_lora_rank, tokens.latent.dtype)
        k, shared, v = expand(made_of, params, layer, Numerics(backend))
        bits = mla.chosen_bits(starts[:, None] + chosen, chosen < visible[:, None], batch.room)
        how: dict[str, Any] = {"scale": cfg.softmax_scale, "shared_key": shared, "backend": backend}
        return mla.mla_prefill_chosen(tokens.q, k, v, bits, starts, starts + visible, **how)

    return ChosenForm(attend, copies=0)
