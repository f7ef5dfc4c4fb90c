"""Attention to a window and compressed entries over a paged cache (DeepSeek-V4), in prefill and decode.

A step reads what earlier steps have left of its requests' last tokens, completes entries, attends, and writes its own
last tokens' rows. Decode is prefill of chunks of S tokens. Every query lists the rows that it attends to, in an order
that depends on its position alone: its bits do not depend on where chunks are cut, nor on what else is in a batch. Its
own step's tokens are rounded as those in the cache are. Kernels read listed rows where they are; jax.numpy copies them.
Groups of queries bound the memory of lists, copies and scores.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsv3.config.model import (
    DRAFT_ROWS,
    HEAVY_ENTRIES,
    HEAVY_PARTS,
    INDEX_KEYS,
    INDEX_PARTS,
    INDEX_TAILS,
    SPARSE_ENTRIES,
    SPARSE_PARTS,
    SPARSE_TAILS,
    WINDOW_LATENTS,
    ModelConfig,
)
from dsv3.kv_cache.layout import Pool, pages_per_layer
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.model.layers.attention import Attend, LayerPlace
from dsv3.model.layers.cache_rows import CacheRows, StepRows
from dsv3.model.layers.compressed_attention import (
    CompressedTokens,
    compressed_of,
    compressor_of,
    entry_rotation,
    num_complete,
)
from dsv3.model.layers.compressor import Contribution, norm_and_rotate, pool_window, window_rows
from dsv3.model.layers.linear import layer_slice
from dsv3.model.layers.sparse import by_groups
from dsv3.model.params import CompressedAttentionParams, CompressorParams
from pallas_kernels import dsa
from pallas_kernels.backend import Backend
from pallas_kernels.compressed import attend_compressed, bytes_of_query, encode_rows


def prefill_attend_compressed(cfg: ModelConfig, batch: PrefillBatch, backend: Backend | None = None) -> Attend:
    """Attends in prefill; the state is the page pool."""
    return functools.partial(_attend, cfg, StepRows.from_prefill(batch), backend)


def decode_attend_compressed(cfg: ModelConfig, batch: DecodeBatch, backend: Backend | None = None) -> Attend:
    """Attends in decode; the state is the page pool. Raises ValueError for more drafts than rings have rows for."""
    if (drafts := batch.tokens.shape[1] - 1) > DRAFT_ROWS:
        raise ValueError(f"{drafts} drafts: the cache keeps rows for at most {DRAFT_ROWS} in a step")
    return functools.partial(_attend, cfg, StepRows.from_decode(batch), backend)


class _Names(NamedTuple):
    """The cache groups of one compressor: its entries, and the parts of those that are not complete.

    Where entries overlap, a page's first one also needs what the last tokens of the page before give. They lie in that
    page, so that a request can go on behind it that did not write it.
    """

    entries: str
    parts: str
    tails: str | None


_SPARSE = _Names(SPARSE_ENTRIES, SPARSE_PARTS, SPARSE_TAILS)
_INDEX = _Names(INDEX_KEYS, INDEX_PARTS, INDEX_TAILS)
_HEAVY = _Names(HEAVY_ENTRIES, HEAVY_PARTS, None)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One layer in one step: its rows of all cache groups, with what the step completes already in them."""

    cfg: ModelConfig
    rows: StepRows
    place: LayerPlace
    backend: Backend | None

    def group_rows(self, pool: Pool, name: str) -> CacheRows:
        """Returns the layer's rows of a cache group."""
        layer = self.place.cache_layer if name == WINDOW_LATENTS else self.place.of_ratio
        return CacheRows.of(self.cfg, name, pool, self.rows, layer)

    def complete_entries(
        self, pool: Pool, names: _Names, new: Contribution, params: CompressorParams, dtype: jnp.dtype
    ) -> Pool:
        """Returns the pool with the entries that the step completes, and with what later ones need of its tokens."""
        rows, ratio, width = self.rows, self.place.ratio, params.norm.shape[-1]
        T, B = len(rows.positions), len(rows.ends)
        completes = rows.valid & ((rows.positions + 1) % ratio == 0)
        (at,) = jnp.nonzero(completes, size=min(T, T // ratio + B), fill_value=T)
        exists, at = at < T, jnp.minimum(at, T - 1)
        requests, numbers = rows.requests[at], rows.positions[at] // ratio
        tokens = window_rows(ratio, numbers, overlaps=names.tails is not None)
        parts, given = self.group_rows(pool, names.parts), jnp.concatenate([new.values, new.scores], axis=-1)
        made_of, written = rows.write_last(given, parts, rows.at(requests, tokens, given, parts))
        pool = {**pool, names.parts: written}
        if names.tails is not None:
            tails, first = self.group_rows(pool, names.tails), _first_series(given)
            tail, written = rows.write_last(first, tails, tails.read(requests, tokens))
            page = rows.contexts[requests] // self.cfg.page_size * self.cfg.page_size
            made_of = jnp.where((tokens < page[:, None])[..., None], _with_second_series(tail), made_of)
            pool = {**pool, names.tails: written}
        made = pool_window(Contribution(*jnp.split(made_of, 2, axis=-1)), tokens >= 0, width)
        by = entry_rotation(self.cfg, numbers * ratio)
        done = norm_and_rotate(made, params, self.place.of_ratio, by, self.cfg.rms_norm_eps, dtype, self.backend)
        entries = self.group_rows(pool, names.entries)
        if names.entries != INDEX_KEYS:
            done = encode_rows(done, self.cfg.kv_lora_rank, entries.array.dtype)
            return {**pool, names.entries: entries.write(done, requests, numbers, exists)}
        pages, offsets = entries.locate(requests, numbers)
        where: dict[str, Any] = {"layer": self.place.of_ratio, "pages_per_layer": pages_per_layer(self.cfg, pool)}
        keys = dsa.write_keys(entries.array, done, jnp.where(exists, pages, -1), offsets, **where)
        return {**pool, INDEX_KEYS: keys}

    def attend(
        self,
        tokens: CompressedTokens,
        sink: jax.Array,
        new: jax.Array,
        window: CacheRows,
        entries: CacheRows | None,
        keys: CacheRows | None,
    ) -> jax.Array:
        """Returns `[T, H, d]`: what the heads see of the window and of `entries`, chosen by `keys` if there are any.

        `new` `[T, W]` are the tokens' rows of the window.
        """
        rows, cfg = self.rows, self.cfg

        def group(q: jax.Array, *arrays: jax.Array) -> jax.Array:
            requests, positions, seen = arrays[-3:]
            last_tokens = rows.list_last(requests, positions, seen, compressed_of(cfg).window, window)
            listed = None
            if entries is not None:
                count = num_complete(self.place.ratio, seen - 1)
                numbers = jnp.arange(entries.capacity, dtype=jnp.int32)[None]
                if keys is not None:
                    numbers = self._topk(keys, arrays[0], arrays[1], requests, count)
                listed = entries.list_rows(requests, numbers, jnp.minimum(count, numbers.shape[1]))
            how: dict[str, Any] = {"scale": cfg.softmax_scale, "plain": cfg.kv_lora_rank, "backend": self.backend}
            return attend_compressed(q, sink, new, last_tokens, listed, **how)

        index = () if tokens.index is None else (tokens.index.q, tokens.index.weights)
        seen = jnp.where(rows.valid, rows.positions + 1, 0)
        size = self._queries_at_once(tokens.q, window, entries, keys)
        return by_groups(group, size, (tokens.q, *index, rows.requests, rows.positions, seen), self.backend)

    def _topk(
        self, keys: CacheRows, q: jax.Array, weights: jax.Array, requests: jax.Array, count: jax.Array
    ) -> jax.Array:
        """Returns the numbers `[G, K]` of the entries to attend to, of the first `count` `[G]`."""
        best, table = compressed_of(self.cfg).indexer.topk, keys.table[requests]
        how: dict[str, Any] = {"first_page": keys.first, "topk": best, "backend": self.backend}
        return dsa.topk_indices(q, weights, keys.array, table, count, **how)

    def _queries_at_once(
        self, q: jax.Array, window: CacheRows, entries: CacheRows | None, keys: CacheRows | None
    ) -> int:
        """Returns how many queries are worked on at once: what is made for them stays within 256 MiB."""
        compressed, scores = compressed_of(self.cfg), 0
        listed = compressed.window
        if keys is not None:
            listed, scores = listed + compressed.indexer.topk, 4 * keys.capacity
        elif entries is not None:
            listed += entries.capacity
        attended = bytes_of_query(q, window.array, listed, self.cfg.kv_lora_rank, self.backend)
        return max(1, dsa.BYTES_AT_ONCE // max(scores, attended))


def _attend(
    cfg: ModelConfig,
    rows: StepRows,
    backend: Backend | None,
    tokens: CompressedTokens,
    params: CompressedAttentionParams,
    place: LayerPlace,
    pool: Pool,
) -> tuple[jax.Array, Pool]:
    layer, dtype = _Layer(cfg, rows, place, backend), tokens.latent.dtype
    entries = keys = None
    if (compressor := compressor_of(params, cfg, place.ratio)) is not None:
        assert tokens.entries is not None  # of layers with a compressor
        names = _HEAVY if tokens.index is None else _SPARSE
        pool = layer.complete_entries(pool, names, tokens.entries, compressor, dtype)
        entries = layer.group_rows(pool, names.entries)
    if tokens.index is not None:
        assert params.indexer is not None
        pool = layer.complete_entries(pool, _INDEX, tokens.index.keys, params.indexer.compressor, dtype)
        keys = layer.group_rows(pool, INDEX_KEYS)
    window = layer.group_rows(pool, WINDOW_LATENTS)
    new = encode_rows(tokens.latent, cfg.kv_lora_rank, window.array.dtype)
    out = layer.attend(tokens, layer_slice(params.sink, place.layer), new, window, entries, keys)
    out, latents = rows.write_last(new, window, out)
    return out, {**pool, WINDOW_LATENTS: latents}


def _first_series(rows: jax.Array) -> jax.Array:
    """Returns the first half of the values and of the scores in `rows` `[..., 2 * C]`."""
    values, _, scores, _ = jnp.split(rows, 4, axis=-1)
    return jnp.concatenate([values, scores], axis=-1)


def _with_second_series(rows: jax.Array) -> jax.Array:
    """Returns rows `[..., 2 * C]` with the first halves `[..., C]`; the others, which nothing reads, are zeros."""
    values, scores = jnp.split(rows, 2, axis=-1)
    zeros = jnp.zeros_like(values)
    return jnp.concatenate([values, zeros, scores, zeros], axis=-1)
