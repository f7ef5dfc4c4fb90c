"""Attention to a window and compressed entries over a paged cache (DeepSeek-V4), in prefill and decode.

A step reads what earlier steps have left of its requests' last tokens, completes entries, attends, and writes its own
last tokens' rows. Decode is prefill of chunks of S tokens. Every query lists the rows that it attends to, in an order
that depends on its position alone: its bits do not depend on where chunks are cut, nor on what else is in a batch. Its
own step's tokens are rounded as those in the cache are. Kernels read listed rows where they are; jax.numpy copies them.
Groups of queries bound the memory of lists, copies and scores. Where devices divide the entries of pages, each attends
to its own and to its share of the window, and the parts are merged (`dsv3.model.context_parallel`).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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
from dsv3.kv_cache import layout
from dsv3.kv_cache.layout import Pool, pages_per_layer
from dsv3.model.batch import DecodeBatch, PrefillBatch, StepRows
from dsv3.model.context_parallel import ContextShards
from dsv3.model.layers.attention import Attend, LayerPlace, Projected
from dsv3.model.layers.cache_rows import CacheRows
from dsv3.model.layers.compressed_attention import (
    compressed_of,
    compressor_of,
    contributions,
    entry_rotation,
    norm_and_rotate,
    num_complete,
    pool_window,
    window_rows,
)
from dsv3.model.layers.rope import Rotation
from dsv3.model.layers.sparse import by_groups, state_pages
from dsv3.model.params import CompressedAttentionParams, CompressorParams
from pallas_kernels import dsa
from pallas_kernels.backend import Backend, resolve_operation, uses_triton
from pallas_kernels.compressed import RowList, attend_compressed, attend_part, bytes_of_query
from pallas_kernels.entries import Given, PoolSizes, StepTokens, complete_entries, completes, encode_rows, write_rings


def paged_attend_compressed(
    cfg: ModelConfig, batch: PrefillBatch | DecodeBatch, rows: StepRows, backend: Backend | None = None
) -> Attend:
    """Attends in a step with these rows; the state is the page pool, or `SplitState`.

    Raises ValueError for more drafts than rings have rows for.
    """
    if isinstance(batch, DecodeBatch) and (drafts := batch.tokens.shape[1] - 1) > DRAFT_ROWS:
        raise ValueError(f"{drafts} drafts: the cache keeps rows for at most {DRAFT_ROWS} in a step")
    return functools.partial(_attend, cfg, _SharedStep.of(cfg, rows), backend)


class SplitState(NamedTuple):
    """The state of a prefill step in two micro-batches: the page pool, and the last window rows of the earlier one.

    They are those of the layer that it has just run. The pool need not have them: a request may have no window page for
    tokens that later steps do not read.
    """

    pages: Pool
    rows_before: jax.Array

    @classmethod
    def of(cls, cfg: ModelConfig, pool: Pool, tokens: int) -> "SplitState":
        """Returns the state before the first layer, with micro-batches of so many tokens."""
        latents = pool[WINDOW_LATENTS]
        rows = min(compressed_of(cfg).window, tokens)
        return cls(pool, jnp.zeros((rows, latents.shape[-1]), latents.dtype))


@dataclasses.dataclass(frozen=True)
class _Queries:
    """What N queries of a step see in each layer of a kind. Lists have shapes in place of arrays, and no first row."""

    requests: jax.Array  # [N]
    table: jax.Array  # [N, Mp], pages of their requests
    complete: jax.Array  # [N], entries of layers that choose among them
    window: RowList
    share: RowList  # of the window: what this device attends to where it has a part of the entries
    heavy: RowList | None  # its entries of the layers that do not choose; None in a model without such layers

    @classmethod
    def of(
        cls, cfg: ModelConfig, rows: StepRows, requests: jax.Array, positions: jax.Array, seen: jax.Array
    ) -> "_Queries":
        """Returns what queries at `positions` see of their `requests`, of which there are `seen` tokens, `[N]` each."""
        compressed, heavy = compressed_of(cfg), None
        shapes = layout.pool(dataclasses.replace(cfg, context_shards=1), "float32", 1, 1, 1)  # a device's part
        complete = num_complete(compressed.sparse_ratio, seen - 1)
        window = CacheRows.of(cfg, WINDOW_LATENTS, shapes, rows, 0)
        for ratio in set(compressed.ratios) - {0, compressed.sparse_ratio}:
            entries = CacheRows.of(cfg, HEAVY_ENTRIES, shapes, rows, 0)
            numbers = jnp.arange(entries.capacity, dtype=jnp.int32)[None]
            own = ContextShards.of(cfg, ratio).own_lengths(num_complete(ratio, seen - 1))
            heavy = entries.list_rows(requests, numbers, jnp.minimum(own, entries.capacity))
        last = window.list_last(requests, positions, seen, compressed.window)
        share = ContextShards.of(cfg).own_share(last)
        return cls(requests, rows.page_table[requests], complete, last, share, heavy)


@dataclasses.dataclass(frozen=True)
class _SharedStep:
    """What all layers share in a step: tokens, queries, and the rotation of each token's own entry by ratio.

    A layer with too many queries to list at once lists groups of them itself.
    """

    rows: StepRows
    tokens: StepTokens
    queries: _Queries
    rotations: Mapping[int, Rotation]

    @classmethod
    def of(cls, cfg: ModelConfig, rows: StepRows) -> "_SharedStep":
        """Returns what the layers of a step with these rows share."""
        parts = ContextShards.of(cfg).own_parts(rows.page_table)
        windows = jnp.pad(rows.window_table, ((0, 0), (0, parts.shape[1] - rows.window_table.shape[1])))
        requests = rows.firsts, rows.contexts, rows.ends, rows.slots, parts, windows
        tokens = StepTokens(rows.requests, jnp.where(rows.valid, rows.positions, -1), *requests)
        ratios = {ratio for ratio in compressed_of(cfg).ratios if ratio}
        by = {ratio: entry_rotation(cfg, rows.positions // ratio * ratio) for ratio in ratios}
        return cls(rows, tokens, _Queries.of(cfg, rows, rows.requests, rows.positions, rows.visible), by)


class _Compressor(NamedTuple):
    """A compressor of a layer: its parameters, what it is `given` of the step's tokens, and names of cache groups.

    They are those of its entries, of the parts of entries that are not complete, and of tails. Where entries overlap, a
    page's first one also needs what the last tokens of the page before give. They lie in that page, so that a request
    can go on behind it that did not write it.
    """

    params: CompressorParams
    given: jax.Array  # [T, 2 * C]
    entries: str
    parts: str
    tails: str | None = None


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One layer in one step: its rows of all cache groups, with what the step completes already in them."""

    cfg: ModelConfig
    step: _SharedStep
    place: LayerPlace
    backend: Backend | None

    def group_rows(self, pool: Pool, name: str) -> CacheRows:
        layer = self.place.cache_layer if name == WINDOW_LATENTS else self.place.of_ratio
        return CacheRows.of(self.cfg, name, pool, self.rows, layer)

    @property
    def rows(self) -> StepRows:
        return self.step.rows

    @property
    def kernels(self) -> Backend:
        """The backend that completes entries and writes rings."""
        return resolve_operation("complete_entries", self.backend)

    def has_kernels(self, pool: Pool, compressors: list[_Compressor], dtype: jnp.dtype) -> bool:
        """Returns whether kernels complete the layer's entries and write its rings."""
        rotated = self.cfg.qk_rope_head_dim
        return uses_triton(self.kernels) and all(
            completes(pool[each.entries], each.params.norm, dtype, rotated, is_key=each.entries == INDEX_KEYS)
            for each in compressors
        )

    def complete_with_kernel(self, pool: Pool, each: _Compressor) -> Pool:
        """Returns the pool with the entries that the step completes."""
        name, by = each.entries, self.step.rotations[self.place.ratio]
        written = complete_entries(
            pool[name], self._given(pool, each), each.params.norm, self.place.of_ratio, self.step.tokens, by.cos,
            by.sin, sizes=self._sizes(pool), eps=self.cfg.rms_norm_eps, is_key=name == INDEX_KEYS,
            backend=self.kernels,
        )  # fmt: skip
        return {**pool, name: written}

    def write_with_kernel(
        self, pool: Pool, compressors: list[_Compressor], new: jax.Array, out: jax.Array
    ) -> tuple[jax.Array, Pool]:
        """Returns `out`, and the pool with the rows that the step's last tokens leave in rings, as `write_after`."""
        named = [name for each in compressors for name in (each.parts, each.tails) if name is not None]
        rings = [WINDOW_LATENTS, *named]
        out, before = lax.optimization_barrier((out, {name: pool[name] for name in rings}))
        pool = {**pool, **before}
        given = tuple(self._given(pool, each) for each in compressors)
        written = write_rings(
            pool[WINDOW_LATENTS], new, self.place.cache_layer, given, self.place.of_ratio, self.step.tokens,
            sizes=self._sizes(pool), backend=self.kernels,
        )  # fmt: skip
        return out, {**pool, **dict(zip(rings, written, strict=True))}

    def _given(self, pool: Pool, each: _Compressor) -> Given:
        tails = None if each.tails is None else pool[each.tails]
        return Given(each.given, each.params.position, pool[each.parts], tails)

    def _sizes(self, pool: Pool) -> PoolSizes:
        cfg = self.cfg
        pages, window_pages = pages_per_layer(cfg, pool), pages_per_layer(cfg, pool, "window")
        return PoolSizes(pages, window_pages, pages_per_layer(cfg, pool, "request"), cfg.page_size)

    def complete_entries(self, pool: Pool, each: _Compressor, dtype: jnp.dtype) -> Pool:
        """Returns the pool with the entries that the step completes, and with what later ones need of its tokens."""
        rows, ratio, params, width = self.rows, self.place.ratio, each.params, each.params.norm.shape[-1]
        given = contributions(each.given, params, self.place.of_ratio, rows.positions)
        T, B = len(rows.positions), len(rows.ends)
        exists, at = rows.valid & ((rows.positions + 1) % ratio == 0), jnp.arange(T, dtype=jnp.int32)
        if (most := T // ratio + B) < T:
            (at,) = jnp.nonzero(exists, size=most, fill_value=T)
            exists, at = at < T, jnp.minimum(at, T - 1)
        requests, numbers = rows.requests[at], rows.positions[at] // ratio
        tokens = window_rows(ratio, numbers, overlaps=each.tails is not None)
        parts = self.group_rows(pool, each.parts)
        made_of, written = parts.write_after(parts.read_tokens(requests, tokens, given), given)
        pool = {**pool, each.parts: written}
        if each.tails is not None:
            tails, first = self.group_rows(pool, each.tails), _first_series(given)
            tail, written = tails.write_after(tails.read(requests, tokens), first)
            page = rows.contexts[requests] // self.cfg.page_size * self.cfg.page_size
            # A page that the earlier of two micro-batches fills may have no window page: `parts` still has its tokens.
            in_tail = (tokens < page[:, None]) & (tails.locate(requests[:, None], tokens)[0] >= 0)
            made_of = jnp.where(in_tail[..., None], _with_second_series(tail), made_of)
            pool = {**pool, each.tails: written}
        made = pool_window(made_of, tokens >= 0, width)
        by = entry_rotation(self.cfg, numbers * ratio)
        done = norm_and_rotate(made, params, self.place.of_ratio, by, self.cfg.rms_norm_eps, dtype, self.backend)
        entries = dataclasses.replace(self.group_rows(pool, each.entries), table=self.step.tokens.page_table)
        if each.entries != INDEX_KEYS:
            done = encode_rows(done, self.cfg.kv_lora_rank, entries.array.dtype, backend=self.backend)
            return {**pool, each.entries: entries.write(done, requests, numbers, exists)}
        pages, offsets = entries.locate(requests, numbers)
        where: dict[str, Any] = {"layer": self.place.of_ratio, "pages_per_layer": pages_per_layer(self.cfg, pool)}
        keys = dsa.write_keys(entries.array, done, jnp.where(exists, pages, -1), offsets, **where)
        return {**pool, INDEX_KEYS: keys}

    def attend(
        self,
        tokens: Projected,
        sink: jax.Array,
        new: jax.Array,
        window: CacheRows,
        entries: CacheRows | None,
        keys: CacheRows | None,
    ) -> jax.Array:
        """Returns `[T, H, d]`: what the heads see of the window and of `entries`, chosen by `keys` if there are any.

        `new` `[T, W]` are the tokens' rows of the window, behind those of the earlier one of two micro-batches.
        """
        rows, cfg, shards = self.rows, self.cfg, ContextShards.of(self.cfg)
        divided = shards.size > 1 and entries is not None

        def group(q: jax.Array, *arrays: jax.Array) -> jax.Array:
            seen_by = self.step.queries if len(q) == len(rows.requests) else _Queries.of(cfg, rows, *arrays[-3:])
            listed = None
            if entries is not None and keys is not None:
                listed = entries.list_rows(seen_by.requests, *self._topk(keys, arrays[0], arrays[1], seen_by))
            elif entries is not None:
                assert seen_by.heavy is not None  # of layers that do not choose
                listed = entries.of_layer(seen_by.heavy)
            how: dict[str, Any] = {"scale": cfg.softmax_scale, "plain": cfg.kv_lora_rank, "backend": self.backend}
            if listed is None or not divided:
                how["layer"] = self.place.layer
                return attend_compressed(q, sink, new, window.of_layer(seen_by.window), listed, **how)
            part = attend_part(shards.join_heads(q), new, window.of_layer(seen_by.share), listed, **how)
            out, lse = shards.merge(*part)
            seen = jax.nn.sigmoid(lse - lax.dynamic_index_in_dim(sink, self.place.layer, keepdims=False))
            return (out * seen[..., None]).astype(q.dtype)

        index = () if tokens.index is None else (tokens.index.q, tokens.index.weights)
        size = self._queries_at_once(tokens.q, window, entries, keys)
        arrays = (tokens.q, *index, rows.requests, rows.positions, rows.visible)
        return by_groups(group, size, arrays, self.backend, exchanges=divided)

    def _topk(
        self, keys: CacheRows, q: jax.Array, weights: jax.Array, seen_by: _Queries
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the numbers `[G, K]` of the entries to attend to, and how many there are `[G]`.

        They are the best of those that are complete; of divided pages those that this device holds.
        """
        compressed, complete = compressed_of(self.cfg), seen_by.complete
        shards, best = ContextShards.of(self.cfg, compressed.sparse_ratio), compressed.indexer.topk
        how: dict[str, Any] = {"first_page": keys.first, "topk": best, "backend": self.backend}
        numbers = shards.topk_indices(q, weights, keys.array, seen_by.table, complete, **how)
        if shards.size == 1:
            return numbers, jnp.minimum(complete, best)
        return shards.own_tokens(numbers, numbers < complete[:, None])

    def _queries_at_once(self, q: Any, window: CacheRows, entries: CacheRows | None, keys: CacheRows | None) -> int:
        """Returns how many queries are worked on at once: what is made for them stays within 256 MiB."""
        compressed, scores, (T, heads, d) = compressed_of(self.cfg), 0, q.shape
        listed = compressed.window
        if entries is not None:  # those of all devices that divide pages
            q = jax.ShapeDtypeStruct((T, heads * self.cfg.context_shards, d), q.dtype)
        if keys is not None:
            listed, scores = listed + compressed.indexer.topk, 4 * keys.capacity
        elif entries is not None:
            listed += entries.capacity
        attended = bytes_of_query(q, window.array, listed, self.cfg.kv_lora_rank, self.backend)
        return max(1, dsa.BYTES_AT_ONCE // max(scores, attended))


def _attend(
    cfg: ModelConfig,
    step: _SharedStep,
    backend: Backend | None,
    tokens: Projected,
    params: CompressedAttentionParams,
    place: LayerPlace,
    state: "Pool | SplitState",
) -> tuple[jax.Array, "Pool | SplitState"]:
    layer, dtype, compressors = _Layer(cfg, step, place, backend), tokens.latent.dtype, list[_Compressor]()
    pool = state_pages(state)
    if (compressor := compressor_of(params, cfg, place.ratio)) is not None:
        assert tokens.entries is not None  # of layers with a compressor
        heavy, sparse = (HEAVY_ENTRIES, HEAVY_PARTS), (SPARSE_ENTRIES, SPARSE_PARTS, SPARSE_TAILS)
        names = heavy if tokens.index is None else sparse
        compressors.append(_Compressor(compressor, tokens.entries, *names))
    if tokens.index is not None:
        assert params.indexer is not None
        names = INDEX_KEYS, INDEX_PARTS, INDEX_TAILS
        compressors.append(_Compressor(params.indexer.compressor, tokens.index.key, *names))
    in_kernels = layer.has_kernels(pool, compressors, dtype)
    for each in compressors:
        pool = layer.complete_with_kernel(pool, each) if in_kernels else layer.complete_entries(pool, each, dtype)
    groups = [layer.group_rows(pool, each.entries) for each in compressors]
    entries, keys = (*groups, None, None)[:2]
    window = layer.group_rows(pool, WINDOW_LATENTS)
    new = encode_rows(tokens.latent, cfg.kv_lora_rank, window.array.dtype, backend=backend)
    at_hand = new
    if isinstance(state, SplitState):
        if step.rows.rows_before is None:
            state = state._replace(rows_before=new[-len(state.rows_before) :])
        else:
            at_hand = jnp.concatenate([state.rows_before, new])
    out = layer.attend(tokens, params.sink, at_hand, window, entries, keys)
    if in_kernels:
        out, pool = layer.write_with_kernel(pool, compressors, new, out)
    else:
        out, latents = window.write_after(out, new)
        pool = {**pool, WINDOW_LATENTS: latents}
    return out, state._replace(pages=pool) if isinstance(state, SplitState) else pool


def _first_series(rows: jax.Array) -> jax.Array:
    """Returns the first half of the values and of the scores in `rows` `[..., 2 * C]`."""
    values, _, scores, _ = jnp.split(rows, 4, axis=-1)
    return jnp.concatenate([values, scores], axis=-1)


def _with_second_series(rows: jax.Array) -> jax.Array:
    """Returns rows `[..., 2 * C]` with the first halves `[..., C]`; the others, which nothing reads, are zeros."""
    values, scores = jnp.split(rows, 2, axis=-1)
    zeros = jnp.zeros_like(values)
    return jnp.concatenate([values, zeros, scores, zeros], axis=-1)
