"""Sparse attention (DeepSeek-V3.2) in prefill and decode: each query attends to the tokens that its indexer chooses.

Where no query of a step sees more tokens than are chosen, all would be, and the step runs dense attention: the bits are
those of DeepSeek-V3. Otherwise both modes do the same for each query row: scores of all cached tokens, the best of
them, and absorbed attention to copies of their rows. Rows go in groups that bound the memory of scores and copies.
Prefill of short requests masks attention to all tokens in place of copying (`expanded.py`); the choice is the same.

A GPU's program has no condition on device data, for which its host would wait in every layer. The batch's form says
whether a query must choose. Where a layer has nothing to do, its rows see no tokens, and the kernels end at once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.config.model import INDEX_KEYS, LATENTS, ModelConfig
from dsv3.kv_cache.layout import Pool
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.model.layers.attention import (
    Attend,
    Core,
    Places,
    Projected,
    absorb,
    decode_places,
    decode_positions,
    prefill_places,
    values_of,
    write_latents,
)
from dsv3.model.layers.indexer import IndexTokens, either, index_layers, indexer_of, lookup, shares_choice
from dsv3.model.layers.linear import Index
from dsv3.model.params import AttentionParams
from pallas_kernels import dsa
from pallas_kernels.backend import Backend, asks_host, resolve_backend
from pallas_kernels.search import search

ChosenCore = Callable[[Projected, AttentionParams, Index, Index, jax.Array, jax.Array], jax.Array]
"""Attends to chosen tokens: from tokens, parameters, layer, cache layer, pages and choice `[T, Kt]` to `[T, H, V]`."""


class ChosenForm(NamedTuple):
    """A way to attend to chosen tokens."""

    attend: ChosenCore
    copies: int  # rows of latents that it copies for a query


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedChoice:
    """The attention state of a model in which layers share an indexer's choice: the pages, and the last choice.

    `chosen` has, for each micro-batch of the step, the positions `[T, Kt]` of the tokens that its rows attend to.
    """

    pages: Any
    chosen: tuple[jax.Array, ...]


class Rows(NamedTuple):
    """The query rows of a batch: where they are written, whose they are, and how many tokens they see."""

    places: Places
    requests: jax.Array  # [T] int32, row of the page table
    visible: jax.Array  # [T] int32, 0 in padding
    page_table: jax.Array  # [B, Mp]


def prefill_rows(batch: PrefillBatch, page_size: int) -> Rows:
    """Returns the rows of a prefill batch: each token sees those before it, and itself."""
    B, rows = len(batch.page_table), jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
    chunk = search(batch.cu_lengths[1:], rows, side="right")
    visible = jnp.where(chunk < B, batch.positions + 1, 0)
    return Rows(prefill_places(batch, page_size), jnp.minimum(chunk, B - 1), visible, batch.page_table)


def decode_rows(batch: DecodeBatch, page_size: int) -> Rows:
    """Returns the rows `[B * S]` of a decode batch."""
    B, S = batch.tokens.shape
    requests = jnp.repeat(jnp.arange(B, dtype=jnp.int32), S)
    visible = jnp.maximum(decode_positions(batch).reshape(-1) + 1, 0)
    return Rows(decode_places(batch, page_size), requests, visible, batch.page_table)


def begin(cfg: ModelConfig, pages: Any, rows: tuple[int, ...]) -> Any:
    """Returns the attention state of a step whose micro-batches have `rows` rows each, from its pages."""
    if not shares_choice(cfg):
        return pages
    return SharedChoice(pages, tuple(jnp.zeros((n, cfg.index_topk), jnp.int32) for n in rows))


def pages_of(state: Any) -> Any:
    """Returns the pages of an attention state."""
    return state.pages if isinstance(state, SharedChoice) else state


def sparse_attend(
    cfg: ModelConfig,
    rows: Rows,
    must_choose: bool | jax.Array,
    pages_per_layer: int,
    backend: Backend | None,
    dense: Core,
    sparse: ChosenForm,
    number: int = 0,
) -> Attend:
    """Attends to all tokens or, where a query `must_choose`, to chosen ones, once latents and index keys are written.

    `number` is that of the micro-batch. The state is the page pool, or `SharedChoice`.
    """

    def attend(tokens, params, layer, cache_layer, state):
        pages = _written(cfg, tokens, rows.places, cache_layer, pages_of(state), pages_per_layer, backend)

        def all_tokens() -> jax.Array:
            return dense(tokens, params, layer, cache_layer, pages[LATENTS])

        if must_choose is False:
            return all_tokens(), _with(state, pages)
        last = state.chosen[number] if isinstance(state, SharedChoice) else None
        at_once = dsa.rows_at_once(pages[LATENTS], rows.page_table, sparse.copies)
        choose = _chooser(cfg, rows, tokens.index, cache_layer, pages, pages_per_layer, last, at_once, backend)

        def best_tokens(chosen: jax.Array) -> jax.Array:
            return sparse.attend(tokens, params, layer, cache_layer, pages[LATENTS], chosen)

        if last is None:
            return either(must_choose, lambda: best_tokens(choose()), all_tokens), _with(state, pages)
        chosen = either(must_choose, choose, lambda: last)
        return either(must_choose, lambda: best_tokens(chosen), all_tokens), _with(state, pages, chosen, number)

    return attend


def _with(state: Any, pages: Any, chosen: jax.Array | None = None, number: int = 0) -> Any:
    """Returns the state with new pages, and with a new choice of a micro-batch."""
    if not isinstance(state, SharedChoice):
        return pages
    if chosen is None:
        return dataclasses.replace(state, pages=pages)
    return SharedChoice(pages, (*state.chosen[:number], chosen, *state.chosen[number + 1 :]))


def _written(
    cfg: ModelConfig,
    tokens: Any,
    places: Places,
    cache_layer: Index,
    pages: Pool,
    pages_per_layer: int,
    backend: Backend | None,
) -> Pool:
    """Returns the pages with the tokens' latents, and with their index keys in a layer that has an indexer."""
    table = index_layers(cfg)
    ids = places.page_ids if table.has.all() else jnp.where(lookup(table.has, cache_layer), places.page_ids, -1)
    layer = lookup(table.in_pool, cache_layer)
    keys = pages[INDEX_KEYS]
    where: dict[str, Any] = {"layer": layer, "pages_per_layer": pages_per_layer}
    return {
        **pages,
        LATENTS: write_latents(cfg, pages[LATENTS], tokens, places, cache_layer, pages_per_layer, backend),
        INDEX_KEYS: dsa.write_keys(keys, tokens.index.key, ids, places.offsets, **where),
    }


def _chooser(
    cfg: ModelConfig,
    rows: Rows,
    index: IndexTokens,
    cache_layer: Index,
    pages: Pool,
    pages_per_layer: int,
    last: jax.Array | None,
    at_once: int,
    backend: Backend | None,
) -> Callable[[], jax.Array]:
    """Returns what chooses the tokens `[T, Kt]` of each row, for so many rows `at_once`.

    A layer without an indexer keeps the `last` choice.
    """
    table, best = index_layers(cfg), indexer_of(cfg).topk
    first_page = lookup(table.in_pool, cache_layer) * pages_per_layer

    def group(q: jax.Array, weights: jax.Array, requests: jax.Array, visible: jax.Array) -> jax.Array:
        page_table = rows.page_table[requests]
        where: dict[str, Any] = {"first_page": first_page, "best": best, "backend": backend}
        return dsa.choose(q, weights, pages[INDEX_KEYS], page_table, visible, **where)

    def choose(visible: jax.Array) -> jax.Array:
        return by_groups(group, at_once, (index.q, index.weights, rows.requests, visible), backend)

    def anew() -> jax.Array:
        return choose(rows.visible)

    if last is None or table.has.all():
        return anew
    has = lookup(table.has, cache_layer)
    if isinstance(has, bool) or not asks_host(resolve_backend(requested=backend)):
        return lambda: either(has, anew, lambda: last)
    return lambda: jnp.where(has, choose(jnp.where(has, rows.visible, 0)), last)


def copying_form(cfg: ModelConfig, rows: Rows, pages_per_layer: int, backend: Backend | None) -> ChosenForm:
    """Attends in absorbed form to copies of the chosen tokens' latents."""

    def attend(tokens, params, layer, cache_layer, latents, chosen):
        first_page = cache_layer * pages_per_layer
        out = _attend_chosen(cfg, rows, absorb(tokens, params, layer, backend), chosen, latents, first_page, backend)
        return values_of(out, params, layer, backend)

    return ChosenForm(attend, copies=indexer_of(cfg).topk)


def _attend_chosen(
    cfg: ModelConfig,
    rows: Rows,
    queries: jax.Array,
    chosen: jax.Array,
    latents: jax.Array,
    first_page: jax.Array,
    backend: Backend | None,
) -> jax.Array:
    """Returns the attention `[T, H, R]` of absorbed queries `[T, H, R + P]` to the chosen tokens `[T, Kt]`."""
    best = indexer_of(cfg).topk
    padding = dsa.chosen_width(best) - best

    def group(q: jax.Array, positions: jax.Array, requests: jax.Array, visible: jax.Array) -> jax.Array:
        return dsa.attend_chosen(
            q,
            latents,
            rows.page_table[requests],
            jnp.pad(positions, ((0, 0), (0, padding))),
            jnp.minimum(visible, best),
            scale=cfg.softmax_scale,
            first_page=first_page,
            value_width=cfg.kv_lora_rank,
            backend=backend,
        )

    size = dsa.rows_at_once(latents, rows.page_table, best)
    return by_groups(group, size, (queries, chosen, rows.requests, rows.visible), backend)


def by_groups(
    group: Callable[..., jax.Array],
    size: int,
    arrays: tuple[jax.Array, ...],
    backend: Backend | None,
) -> jax.Array:
    """Runs `group` on `size` rows of `arrays` at a time; a group of padding alone means nothing.

    The last array is how many tokens a row sees.
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
        if asks_host(resolve_backend(requested=backend)):
            return group(*part)
        return lax.cond(part[-1].any(), lambda: group(*part), lambda: jnp.zeros(shape.shape, shape.dtype))

    out = lax.map(one, parts)
    return out.reshape(-1, *out.shape[2:])[:count]


def visible_pairs(cfg: ModelConfig, index: IndexTokens, batch: int, cache_layer: Index, last: Any) -> jax.Array:
    """Returns which tokens see which, bool `[batch, S, S]`, of whole sequences without a cache.

    `last` is what the layer before gave; a layer without an indexer gives the same.
    """
    best = indexer_of(cfg).topk
    q, key, weights = (a.reshape(batch, -1, *a.shape[1:]) for a in (index.q, index.key, index.weights))
    S = key.shape[1]
    causal = jnp.tril(jnp.ones((S, S), jnp.bool))
    if best >= S:
        return jnp.broadcast_to(causal, (batch, S, S))

    def made() -> jax.Array:
        products = jnp.einsum("bqhi,bki->bqhk", q, key, preferred_element_type=jnp.float32)
        sums = jnp.einsum("bqh,bqhk->bqk", weights, jax.nn.relu(products))
        scores = jnp.where(causal, jnp.where(sums == 0, 0.0, sums), -jnp.inf).reshape(batch * S, S)
        chosen = dsa.select_best(lax.stop_gradient(scores), jnp.tile(jnp.arange(1, S + 1), batch), best)
        pairs = jnp.zeros((batch * S, S), jnp.bool).at[jnp.arange(batch * S)[:, None], chosen].set(True, mode="drop")
        return pairs.reshape(batch, S, S)

    has = index_layers(cfg).has
    return made() if has.all() else lax.cond(lookup(has, cache_layer), made, lambda: last)
