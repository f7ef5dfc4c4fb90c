"""Masked attention (DeepSeek-V3.2) in prefill: keys of every head are made once, and a mask says which a query takes.

Sparse attention copies 2,048 rows for each query and multiplies them in absorbed form, with 3.4 times the operations
of the expanded one. While the requests of a step are short it is cheaper to expand all their cached latents and to
multiply more of them (`dsv3.engine.crossover` says up to where). The batch has room for that many keys: K = `expands`.

Keys come from the pages, new ones too, so both forms attend to the same numbers: rounded ones where pages are FP8.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsv3.config.model import ModelConfig
from dsv3.model.batch import PrefillBatch
from dsv3.model.layers.attention import Projected, expand
from dsv3.model.layers.linear import Index, Numerics
from dsv3.model.params import AttentionParams
from pallas_kernels import mla
from pallas_kernels.backend import Backend
from pallas_kernels.search import search

ChosenCore = Callable[[Projected, AttentionParams, Index, Index, jax.Array, jax.Array], jax.Array]
"""Attends to chosen tokens: from tokens, parameters, layer, cache layer, pages and choice `[T, Kt]` to `[T, H, V]`."""


class ChosenForm(NamedTuple):
    """A way to attend to chosen tokens."""

    attend: ChosenCore
    copies: int  # rows of latents that it copies for a query


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


def masked_form(
    cfg: ModelConfig,
    batch: PrefillBatch,
    requests: jax.Array,
    visible: jax.Array,
    pages_per_layer: int,
    backend: Backend | None,
) -> ChosenForm:
    """Attends to the chosen tokens among all; `requests` and `visible` `[T]` are those of `sparse.Rows`."""
    new = jnp.diff(batch.cu_lengths)
    lengths = jnp.where(new > 0, batch.context_lengths + new, 0)
    packed = pack(batch.page_table, lengths, batch.expands // cfg.page_size, cfg.page_size)
    starts = jnp.where(visible > 0, packed.starts[requests], 0)

    def attend(tokens, params, layer, cache_layer, latents, chosen):
        ids = cache_layer * pages_per_layer + packed.page_ids
        rows = mla.rows_of_pages(latents, ids, packed.counts, cfg.kv_lora_rank, tokens.latent.dtype)
        k, shared, v = expand(rows, params, layer, Numerics(backend))
        bits = mla.chosen_bits(starts[:, None] + chosen, chosen < visible[:, None], batch.expands)
        how: dict[str, Any] = {"scale": cfg.softmax_scale, "shared_key": shared, "backend": backend}
        return mla.mla_prefill_chosen(tokens.q, k, v, bits, starts, starts + visible, **how)

    return ChosenForm(attend, copies=0)
