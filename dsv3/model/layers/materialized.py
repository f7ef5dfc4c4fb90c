"""Prefill in materialized form (MHA): keys and values of every head are computed from cached latents.

Absorbed attention multiplies 576 + 512 values per head and pair of tokens, materialized attention 192 + 128.
Materializing a cached token costs as much as 171 pairs save, once per step. The batch has a capacity of K tokens
(`PrefillBatch.kv_capacity`); `dsv3.model.forms` estimates when the form is faster.

In dense attention over long contexts, keys and values of all heads would take 64 KiB per token of DeepSeek-V3: 8.6 GB
for 131,072 tokens. So they are materialized for a few heads at a time; each head sees all its keys at once, and no
softmax is split. Products skip empty tiles of 128 tokens and attention does not read them, so the time follows the
tokens that a step has, not its capacity.

In sparse attention (DeepSeek-V3.2) a mask selects the top-k tokens of a query. Copying 2,048 rows per query and
multiplying them in absorbed form takes 3.4 times the operations, but is cheaper for long requests. Keys are read from
the pages, those of new tokens too, so that both forms attend to the same numbers: rounded ones if pages are FP8.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.config.model import PAGE_SIZE
from dsv3.model.batch import PrefillBatch
from dsv3.model.layers.attention import Core, LatentStep, LayerPlace, materialize_kv
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.sparse import TopkForm
from pallas_kernels import mla
from pallas_kernels.grouped import grouped_gemm_contiguous
from pallas_kernels.search import search

BYTES_AT_ONCE = 2**30
"""Bound on materialized keys and values; absorbed queries and outputs of 4,096 tokens of DeepSeek-V3 take more."""

_TILE = 128  # rows of a product's tile, and of the attention's blocks


def heads_at_once(heads: int, key_bytes: int) -> int:
    """Returns how many heads to materialize at once, a divisor of `heads`; `key_bytes` are those of one head."""
    return max((n for n in range(1, heads + 1) if heads % n == 0 and n * key_bytes <= BYTES_AT_ONCE), default=1)


class Packed(NamedTuple):
    """The cached tokens of all requests of a batch side by side; each request begins at a page boundary."""

    page_ids: jax.Array  # [K / page_size] int32, page within a layer
    counts: jax.Array  # [K / page_size] int32, written rows of the page
    starts: jax.Array  # [B] int32, first token of each request


def pack(page_table: jax.Array, lengths: jax.Array, pages: int, page_size: int) -> Packed:
    """Packs the first `lengths` `[B]` tokens of each request into `pages` pages; the caller ensures that they fit."""
    needed = -(-lengths // page_size)
    ends = jnp.cumsum(needed)
    starts, page = ends - needed, jnp.arange(pages, dtype=jnp.int32)
    owner = search(ends, page, side="right")  # B behind the last request
    live, owner = owner < len(lengths), jnp.minimum(owner, len(lengths) - 1)
    column = jnp.clip(page - starts[owner], 0, page_table.shape[1] - 1)
    counts = jnp.clip(lengths[owner] - page_size * column, 0, page_size)
    return Packed(
        jnp.where(live, page_table[owner, column], 0),
        jnp.where(live, counts, 0),
        (page_size * starts).astype(jnp.int32),
    )


def _pack_batch(step: LatentStep, batch: PrefillBatch) -> tuple[Packed, jax.Array]:
    """Packs the tokens of a batch's requests; also returns where the request of each token begins, 0 in padding."""
    cfg, rows = step.cfg, step.rows
    lengths = jnp.where(jnp.diff(batch.cu_lengths) > 0, rows.ends, 0)
    packed = pack(batch.page_table, lengths, batch.kv_capacity // cfg.page_size, cfg.page_size)
    return packed, jnp.where(rows.valid, packed.starts[rows.requests], 0)


def materialized_core(step: LatentStep, batch: PrefillBatch) -> Core:
    """Attends in prefill: to new and cached tokens, both in materialized form."""
    cfg, rows, backend = step.cfg, step.rows, step.backend
    K, R, V, T = batch.kv_capacity, cfg.kv_lora_rank, cfg.v_head_dim, len(batch.tokens)
    packed, starts = _pack_batch(step, batch)
    ends, numbers = starts + rows.visible, jnp.arange(T, dtype=jnp.int32)
    own = jnp.where(rows.valid, starts + rows.positions, K + numbers)
    token = jnp.full(K, T, jnp.int32).at[own].set(numbers, mode="drop", unique_indices=True)
    live_blocks = packed.counts[:, None] > jnp.arange(0, cfg.page_size, PAGE_SIZE)
    tiles = jnp.where(live_blocks.reshape(-1, _TILE // PAGE_SIZE).any(axis=1), 0, -1)

    def attend(tokens, params, place, pages):
        latents = _gather(step, packed, place, pages, tokens.latent.dtype)
        mine = tokens.latent.at[token].get(mode="clip")  # not rounded by FP8 pages, as in the absorbed form
        latents = jnp.where((token < T)[:, None], mine, latents)
        latents, shared = latents[:, :R], latents[:, R:]
        H = tokens.q.shape[1]
        heads = heads_at_once(H, K * (cfg.qk_nope_head_dim + V) * tokens.q.dtype.itemsize)
        how: dict[str, Any] = {"scale": cfg.softmax_scale, "shared_key": shared, "backend": backend}

        def up(stack: jax.Array, part: jax.Array) -> jax.Array:
            flat = stack.reshape(-1, heads * stack.shape[2], R)
            at = place.layer * (H // heads) + part
            made = grouped_gemm_contiguous(latents, flat, tiles, tile_m=_TILE, group_offset=at, backend=backend)
            return made.reshape(K, heads, stack.shape[2])

        def of_heads(part: jax.Array, out: jax.Array) -> jax.Array:
            q = lax.dynamic_slice_in_dim(tokens.q, part * heads, heads, axis=1)
            k, v = up(params.k_up, part), up(params.v_up, part)
            found, _ = mla.mla_prefill_spans(q, k, v, starts, ends, **how)
            return lax.dynamic_update_slice_in_dim(out, found, part * heads, axis=1)

        return lax.fori_loop(0, H // heads, of_heads, jnp.zeros((T, H, V), tokens.q.dtype))

    return attend


def _gather(
    step: LatentStep, packed: Packed, place: LayerPlace, pages: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Returns the packed latents of a layer `[K, W]`, zeros behind those of each page that are written."""
    ids, counts = place.cache_layer * step.pages_per_layer + packed.page_ids, step.shards.own_lengths(packed.counts)
    return step.shards.join_tokens(mla.gather_latents(pages, ids, counts, step.cfg.kv_lora_rank, dtype))


def masked_form(step: LatentStep, batch: PrefillBatch) -> TopkForm:
    """Attends in prefill to the top-k tokens, by a mask on all tokens."""
    visible, (packed, starts), backend = step.rows.visible, _pack_batch(step, batch), step.backend

    def attend(tokens, params, place, latents, topk_indices):
        rows_of_tokens = _gather(step, packed, place, latents, tokens.latent.dtype)
        k, shared, v = materialize_kv(rows_of_tokens, params, place.layer, Numerics(backend))
        bits = mla.topk_bitmask(starts[:, None] + topk_indices, topk_indices < visible[:, None], batch.kv_capacity)
        how: dict[str, Any] = {"scale": step.cfg.softmax_scale, "shared_key": shared, "backend": backend}
        return mla.mla_prefill_topk(tokens.q, k, v, bits, starts, starts + visible, **how)

    return TopkForm(attend, copies=0)
