"""Sparse attention (DeepSeek-V3.2) in prefill and decode: each query attends to the top-k tokens of its indexer.

If no query of a step sees more than `index_topk` tokens, the step runs dense attention, with the bits of DeepSeek-V3.
Otherwise prefill and decode do the same for each query row: score all cached tokens, select the top-k, and run absorbed
attention on copies of their rows. Rows are processed in groups that bound the memory of scores and copies. Prefill of
short requests masks attention to all tokens instead of copying (`materialized.py`), with the same top-k tokens.

A GPU program has no condition on device data, because its host would wait for it in every layer. The batch's form says
whether queries need top-k. In a layer without an indexer, rows see no tokens and the selection kernels return at once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.config.model import INDEX_KEYS, LATENTS, ModelConfig
from dsv3.kv_cache.layout import Pool
from dsv3.model.layers.attention import (
    Attend,
    Core,
    LatentStep,
    LayerPlace,
    Projected,
    absorb,
    project_values,
)
from dsv3.model.layers.indexer import IndexTokens, either, index_layers, indexer_of, lookup, shares_topk
from dsv3.model.layers.linear import Index
from dsv3.model.params import AttentionParams
from pallas_kernels import dsa
from pallas_kernels.backend import Backend, blocks_host, resolve_backend

TopkCore = Callable[[Projected, AttentionParams, LayerPlace, jax.Array, jax.Array], jax.Array]
"""Attends to top-k tokens: from those of `Core` and their indices `[T, Kt]` to `[T, H, V]`."""


class TopkForm(NamedTuple):
    """An implementation of attention to top-k tokens."""

    attend: TopkCore
    copies: int  # rows of latents that it copies per query


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedTopk:
    """The attention state of a model whose layers share top-k indices: the pages, and the last indices.

    `topk_indices` has, for each micro-batch of the step, the positions `[T, Kt]` of the top-k tokens of its rows.
    """

    pages: Any
    topk_indices: tuple[jax.Array, ...]


def initial_state(cfg: ModelConfig, pages: Any, rows: tuple[int, ...]) -> Any:
    """Returns the attention state of a step whose micro-batches have `rows` rows each, from its pages."""
    if not shares_topk(cfg):
        return pages
    return SharedTopk(pages, tuple(jnp.zeros((n, cfg.index_topk), jnp.int32) for n in rows))


def state_pages(state: Any) -> Any:
    """Returns the pages of an attention state."""
    return state if isinstance(state, Mapping) else state.pages


def sparse_attend(step: LatentStep, needs_topk: bool | jax.Array, dense: Core, sparse: TopkForm, number: int) -> Attend:
    """Writes latents and index keys, then attends to all tokens or, if queries need it, to the top-k tokens.

    `number` is that of the micro-batch. The state is the page pool, or `SharedTopk`.
    """

    def attend(tokens, params, place, state):
        pages = _written(step, tokens, place, state_pages(state))

        def all_tokens() -> jax.Array:
            return dense(tokens, params, place, pages[LATENTS])

        if needs_topk is False:
            return all_tokens(), _with(state, pages)
        last = state.topk_indices[number] if isinstance(state, SharedTopk) else None
        at_once = dsa.rows_at_once(pages[LATENTS], step.rows.page_table, sparse.copies)
        select = _topk_selector(step, tokens.index, place, pages[INDEX_KEYS], last, at_once)

        def topk_tokens(topk_indices: jax.Array) -> jax.Array:
            return sparse.attend(tokens, params, place, pages[LATENTS], topk_indices)

        if last is None:
            return either(needs_topk, lambda: topk_tokens(select()), all_tokens), _with(state, pages)
        topk_indices = either(needs_topk, select, lambda: last)
        out = either(needs_topk, lambda: topk_tokens(topk_indices), all_tokens)
        return out, _with(state, pages, topk_indices, number)

    return attend


def _with(state: Any, pages: Any, topk_indices: jax.Array | None = None, number: int = 0) -> Any:
    """Returns the state with new pages, and with new top-k indices of a micro-batch."""
    if not isinstance(state, SharedTopk):
        return pages
    if topk_indices is None:
        return dataclasses.replace(state, pages=pages)
    return SharedTopk(pages, (*state.topk_indices[:number], topk_indices, *state.topk_indices[number + 1 :]))


def _written(step: LatentStep, tokens: Any, place: LayerPlace, pages: Pool) -> Pool:
    """Writes the tokens' latents, and their index keys in a layer that has an indexer; returns the pages."""
    table, (ids, offsets) = index_layers(step.cfg), step.positions
    if not table.has.all():
        ids = jnp.where(lookup(table.has, place.cache_layer), ids, -1)
    layer = lookup(table.in_pool, place.cache_layer)
    where: dict[str, Any] = {"layer": layer, "pages_per_layer": step.pages_per_layer}
    return {
        **pages,
        LATENTS: step.write(tokens, place, pages[LATENTS]),
        INDEX_KEYS: dsa.write_keys(pages[INDEX_KEYS], tokens.index.key, ids, offsets, **where),
    }


def _topk_selector(
    step: LatentStep, index: IndexTokens, place: LayerPlace, keys: jax.Array, last: jax.Array | None, at_once: int
) -> Callable[[], jax.Array]:
    """Returns a function that computes the top-k indices `[T, Kt]` of all rows, `at_once` rows at a time.

    In a layer without an indexer it returns the `last` indices.
    """
    rows, backend, shards = step.rows, step.backend, step.shards
    table, topk = index_layers(step.cfg), indexer_of(step.cfg).topk
    first_page = lookup(table.in_pool, place.cache_layer) * step.pages_per_layer

    def group(q: jax.Array, weights: jax.Array, requests: jax.Array, visible: jax.Array) -> jax.Array:
        page_table = rows.page_table[requests]
        where: dict[str, Any] = {"first_page": first_page, "topk": topk, "backend": backend}
        return shards.topk_indices(q, weights, keys, page_table, visible, **where)

    def select(visible: jax.Array) -> jax.Array:
        arrays = index.q, index.weights, rows.requests, visible
        return by_groups(group, at_once, arrays, backend, exchanges=shards.size > 1)

    select_all = functools.partial(select, rows.visible)
    if last is None or table.has.all():
        return select_all
    has = lookup(table.has, place.cache_layer)
    if isinstance(has, bool) or not blocks_host(resolve_backend(requested=backend)):
        return lambda: either(has, select_all, lambda: last)
    return lambda: jnp.where(has, select(jnp.where(has, rows.visible, 0)), last)


def copying_form(step: LatentStep) -> TopkForm:
    """Attends in absorbed form to copies of the top-k tokens' latents."""
    cfg, rows, backend, shards = step.cfg, step.rows, step.backend, step.shards
    topk = indexer_of(cfg).topk
    padding = dsa.topk_width(topk) - topk

    def attend(tokens, params, place, latents, topk_indices):
        first_page = place.cache_layer * step.pages_per_layer

        def group(q: jax.Array, positions: jax.Array, requests: jax.Array, visible: jax.Array) -> jax.Array:
            counts = jnp.minimum(visible, topk)
            if shards.size > 1:
                positions, counts = shards.own_tokens(positions, positions < visible[:, None])
            out = dsa.attend_topk(
                shards.join_heads(q),
                latents,
                rows.page_table[requests],
                jnp.pad(positions, ((0, 0), (0, padding))),
                counts,
                scale=cfg.softmax_scale,
                first_page=first_page,
                value_width=cfg.kv_lora_rank,
                backend=backend,
            )
            return shards.merge(*out)[0]

        size = dsa.rows_at_once(latents, rows.page_table, topk)
        arrays = absorb(tokens, params, place.layer, backend), topk_indices, rows.requests, rows.visible
        out = by_groups(group, size, arrays, backend, exchanges=shards.size > 1)
        return project_values(out, params, place.layer, backend)

    return TopkForm(attend, copies=topk)


def by_groups(
    group: Callable[..., jax.Array],
    size: int,
    arrays: tuple[jax.Array, ...],
    backend: Backend | None,
    exchanges: bool = False,
) -> jax.Array:
    """Runs `group` on `size` rows of `arrays` at a time; the result of a group of padding rows is undefined.

    The last array is the number of tokens that a row sees. A group that `exchanges` with other devices always runs.
    """
    count = len(arrays[0])
    if count <= size:
        return group(*arrays)

    def split(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, -count % size), *(((0, 0),) * (array.ndim - 1))))
        return padded.reshape(-1, size, *array.shape[1:])

    parts = tuple(map(split, arrays))
    shape = jax.eval_shape(group, *(part[0] for part in parts))

    def one(part: tuple[jax.Array, ...]) -> jax.Array:
        if exchanges or blocks_host(resolve_backend(requested=backend)):
            return group(*part)
        return lax.cond(part[-1].any(), lambda: group(*part), lambda: jnp.zeros(shape.shape, shape.dtype))

    out = lax.map(one, parts)
    return out.reshape(-1, *out.shape[2:])[:count]


def visible_pairs(cfg: ModelConfig, index: IndexTokens, batch: int, cache_layer: Index, last: Any) -> jax.Array:
    """Returns the attention mask, bool `[batch, S, S]`, of sequences without a cache.

    `last` is the mask of the layer before; a layer without an indexer returns it.
    """
    topk = indexer_of(cfg).topk
    q, key, weights = (a.reshape(batch, -1, *a.shape[1:]) for a in (index.q, index.key, index.weights))
    S = key.shape[1]
    causal = jnp.tril(jnp.ones((S, S), jnp.bool))
    if topk >= S:
        return jnp.broadcast_to(causal, (batch, S, S))

    def topk_mask() -> jax.Array:
        products = jnp.einsum("bqhi,bki->bqhk", q, key, preferred_element_type=jnp.float32)
        sums = jnp.einsum("bqh,bqhk->bqk", weights, jax.nn.relu(products))
        scores = jnp.where(causal, jnp.where(sums == 0, 0.0, sums), -jnp.inf).reshape(batch * S, S)
        topk_indices = dsa.select_topk(lax.stop_gradient(scores), jnp.tile(jnp.arange(1, S + 1), batch), topk)
        pairs = (
            jnp.zeros((batch * S, S), jnp.bool).at[jnp.arange(batch * S)[:, None], topk_indices].set(True, mode="drop")
        )
        return pairs.reshape(batch, S, S)

    has = index_layers(cfg).has
    return topk_mask() if has.all() else lax.cond(lookup(has, cache_layer), topk_mask, lambda: last)
