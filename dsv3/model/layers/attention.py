"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1) in training, prefill and decode.

Training materializes keys and values of every head from the latents of all tokens. Prefill materializes those of new
tokens, attends to the cached ones in absorbed form, and merges the two; or it materializes all of them
(`materialized.py`). Decode is absorbed (weight absorption): the key up-projection is folded into the query, so that the
cached latents are keys and values of all heads at once. Batch-invariant programs attend in absorbed form only, each row
as a decode step of one token: its bits do not depend on the tokens beside it in its chunk.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dsv3.config.model import LATENTS, ModelConfig
from dsv3.model.batch import AttentionForm, DecodeBatch, PrefillBatch, StepRows
from dsv3.model.context_parallel import ContextShards
from dsv3.model.layers.indexer import IndexTokens, index_tokens
from dsv3.model.layers.linear import Index, Numerics, linear
from dsv3.model.layers.rope import Rotation, scale_queries
from dsv3.model.params import AttentionParams
from pallas_kernels import dense, invariance, mla
from pallas_kernels.backend import Backend, blocks_host, resolve_backend, resolve_operation
from pallas_kernels.rows import latent_rows, rms_norm, rotate_heads


class LayerPlace(NamedTuple):
    """Where a layer is: its number in its stack, and its number among the layers that own pages; they may be traced.

    In compressed attention its entries have a `ratio`, 0 for none, and it is layer number `of_ratio` of these in the
    stack. `hashed` says that a token's id chooses its experts, `is_target` that DSpark reads what the layer gives.
    """

    layer: Index
    cache_layer: Index
    ratio: int = 0
    of_ratio: Index = 0
    hashed: bool = False
    is_target: bool = False


Attend = Callable[[Any, Any, LayerPlace, Any], tuple[jax.Array, Any]]
"""The attention core of one mode: from projected tokens, parameters, the layer's place and a state to `[T, H, V]`, and
the updated state (the pages)."""


class Attention(Protocol):
    """How all layers of a step, or of one of its micro-batches, attend. A schedule interleaves the three stages."""

    @property
    def attend(self) -> Attend:
        """The stage between the two others."""
        ...

    def project(self, x: Any, params: Any, place: LayerPlace, numerics: Numerics) -> Any:
        """Returns what `attend` takes of the block's normed input `x` `[T, D]`, `linear.Rows`."""
        ...

    def output(self, heads: jax.Array, params: Any, place: LayerPlace, numerics: Numerics) -> jax.Array:
        """Returns the block's result `[T, D]` from what the heads of this device see, `[T, H, V]`."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Projected:
    """Attention inputs of T tokens: queries `[T, H, N + P]`, their last part rotated, and latents `[T, R + P]`.

    `index` is the input of the indexer, None in dense attention. In compressed attention `entries` is what is `given`
    to entries, float32, None in layers that see their window alone.
    """

    q: jax.Array
    latent: jax.Array
    index: IndexTokens | None = None
    entries: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """`Attention` to latents, of T tokens."""

    cfg: ModelConfig
    rotation: Rotation
    attend: Attend

    @jax.named_scope("project")
    def project(self, x: jax.Array, params: AttentionParams, place: LayerPlace, numerics: Numerics) -> Projected:
        """Returns queries and latents of `x` `[T, D]`, and the indexer's queries and keys if the model has one."""
        cfg, layer, index, backend = self.cfg, place.layer, None, numerics.backend
        angles = self.rotation.cos, self.rotation.sin
        down = linear(x, params.qkv_a, layer, numerics)
        row = latent_rows(down, params.kv_norm, layer, *angles, cfg.latent_norm_eps, backend=backend)
        if params.q_b is None:
            q = down[:, : down.shape[1] - cfg.latent_dim]
        else:
            latent = rms_norm(down, params.q_norm, layer, cfg.latent_norm_eps, backend=backend)
            index = index_tokens(x, latent, params.indexer, place.cache_layer, cfg, self.rotation, numerics)
            q = linear(latent, params.q_b, layer, numerics)
        q = q.reshape(-1, params.k_up.shape[1], cfg.qk_head_dim)  # the heads of this device
        return Projected(rotate_heads(scale_queries(q, self.rotation), *angles, backend=backend), row, index)

    def output(self, heads: jax.Array, params: AttentionParams, place: LayerPlace, numerics: Numerics) -> jax.Array:
        """Returns the product of the heads side by side with the output projection."""
        return linear(heads.reshape(heads.shape[0], -1), params.o, place.layer, numerics)


def materialize_kv(
    latent: jax.Array, params: AttentionParams, layer: Index, numerics: Numerics
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes keys, `[T, H, N]` per head and `[T, P]` shared, and values `[T, H, V]`, from latents `[T, R + P]`."""
    R = params.k_up.shape[-1]

    def up(stack: jax.Array) -> jax.Array:
        L, H, width, _ = stack.shape
        flat = linear(latent[:, :R], stack.reshape(L, H * width, R), layer, numerics)
        return flat.reshape(-1, H, width)

    return up(params.k_up), latent[:, R:], up(params.v_up)


def absorb(tokens: Projected, params: AttentionParams, layer: Index, backend: Backend | None) -> jax.Array:
    """Absorbs k_up into the queries: returns `[T, H, R + P]`, which score cached latents directly."""
    carried = tokens.q.shape[-1] - params.k_up.shape[2]
    return dense.head_gemm(tokens.q, params.k_up, layer, transposed=True, carried=carried, backend=backend)


def project_values(out: jax.Array, params: AttentionParams, layer: Index, backend: Backend | None) -> jax.Array:
    """Applies v_up to attention outputs on latents `[T, H, R]`: returns `[T, H, V]`."""
    return dense.head_gemm(out, params.v_up, layer, backend=backend)


Core = Callable[[Projected, AttentionParams, LayerPlace, jax.Array], jax.Array]
"""Attends after the pages are written: from tokens, parameters, the layer's place and its pages to `[T, H, V]`."""


@dataclasses.dataclass(frozen=True)
class LatentStep:
    """What all layers with latent attention share in a step: its tokens, and the pool of pages that they address.

    `positions` are the tokens' cache positions, `[T]` int32 each: pages within a layer, and rows of this device's part
    of these. The page is -1 for padding, and for tokens that another device writes.
    """

    cfg: ModelConfig
    rows: StepRows
    pages_per_layer: int
    backend: Backend | None
    positions: tuple[jax.Array, jax.Array]  # pages and offsets of the new rows (vLLM: slot mapping)

    @classmethod
    def of(cls, cfg: ModelConfig, rows: StepRows, pages_per_layer: int, backend: Backend | None) -> "LatentStep":
        """Returns what the layers of a step with these rows share."""
        shards, Mp = ContextShards.of(cfg), rows.page_table.shape[1]
        offsets = shards.own_offsets(rows.positions % cfg.page_size)
        column = jnp.clip(rows.positions // cfg.page_size, 0, Mp - 1)
        page_ids = jnp.where(rows.valid, rows.page_table[rows.requests, column], -1)
        if shards.size > 1:
            page_ids = jnp.where((offsets >= 0) & (offsets < shards.tokens), page_ids, -1)
        return cls(cfg, rows, pages_per_layer, backend, (page_ids, offsets))

    @property
    def shards(self) -> ContextShards:
        """The devices that divide pages."""
        return ContextShards.of(self.cfg)

    def where(self, place: LayerPlace) -> dict[str, Any]:
        """Returns how kernels address the pages of a layer."""
        return {
            "layer": place.cache_layer,
            "pages_per_layer": self.pages_per_layer,
            "value_width": self.cfg.kv_lora_rank,
            "backend": self.backend,
        }

    def write(self, tokens: Projected, place: LayerPlace, pages: jax.Array) -> jax.Array:
        """Returns the page pool with the latents of the step's tokens in it."""
        return mla.write_pages(pages, tokens.latent, *self.positions, **self.where(place))


def attend_after_write(step: LatentStep, core: Core) -> Attend:
    """Returns attention that first writes the new tokens' latents. The state is the page pool."""

    def attend(tokens, params, place, pages):
        latents = step.write(tokens, place, pages[LATENTS])
        return core(tokens, params, place, latents), {**pages, LATENTS: latents}

    return attend


def prefill_core(step: LatentStep, batch: PrefillBatch) -> Core:
    """Attends in prefill: to new tokens in materialized form, to cached ones in absorbed form."""
    cfg, rows, shards, backend = step.cfg, step.rows, step.shards, step.backend
    if invariance.required():
        return _paged_core(step, rows.visible, rows.page_table[rows.requests], 1, None)
    context_lengths = shards.own_lengths(batch.context_lengths)

    def attend(tokens, params, place, pages):
        layer = place.layer
        k, shared, v = materialize_kv(tokens.latent, params, layer, Numerics(backend))
        how: dict[str, Any] = {"scale": cfg.softmax_scale, "backend": backend}
        out, lse = mla.mla_prefill(tokens.q, k, v, batch.cu_lengths, shared_key=shared, **how)

        def with_context() -> jax.Array:
            parts = mla.mla_prefill_context(
                shards.join_heads(absorb(tokens, params, layer, backend)),
                pages,
                batch.page_table,
                context_lengths,
                batch.cu_lengths,
                scale=cfg.softmax_scale,
                **step.where(place),
            )
            latent_out, context_lse = shards.merge(*parts)
            return mla.merge_attention(out, lse, project_values(latent_out, params, layer, backend), context_lse)[0]

        if batch.form is AttentionForm.NEW:
            return out
        if shards.size > 1 or blocks_host(resolve_backend(requested=backend)):  # all devices exchange, or none does
            return with_context()
        return jax.lax.cond(batch.context_lengths.any(), with_context, lambda: out)

    return attend


def decode_core(step: LatentStep, batch: DecodeBatch, heads: int) -> Core:
    """Attends in decode: S new tokens per request to all cached tokens and to each other, in absorbed form.

    `heads` is the number of heads on this device.
    """
    S, lengths, table = batch.tokens.shape[1], batch.lengths, batch.page_table
    if S > 1 and invariance.required():
        lengths, table = step.rows.visible, jnp.repeat(table, S, axis=0)
    elif S > 1 and step.shards.size > 1:
        return _context_core(step, batch, heads)
    return _paged_core(step, lengths, table, batch.tokens.size // len(lengths), heads)


def _paged_core(step: LatentStep, lengths: jax.Array, page_table: jax.Array, queries: int, heads: int | None) -> Core:
    """Attends to the first `lengths` `[B]` tokens of each `page_table` `[B, Mp]`, in absorbed form.

    `queries` tokens share a row of both and are causal among themselves, as in `mla_decode`. Where `heads` is given,
    all layers share one schedule.
    """
    shards, backend = step.shards, step.backend
    lengths = shards.own_lengths(lengths)
    schedule = _schedule(lengths, queries, heads * shards.size, backend) if heads else None

    def attend(tokens, params, place, pages):
        q = shards.join_heads(absorb(tokens, params, place.layer, backend))
        rows = q.reshape(-1, queries, *q.shape[1:])
        how: dict[str, Any] = {"scale": step.cfg.softmax_scale, "schedule": schedule, **step.where(place)}
        out, lse = mla.mla_decode(rows, pages, page_table, lengths, **how)
        out, _ = shards.merge(out.reshape(*q.shape[:2], -1), lse.reshape(q.shape[:2]))
        return project_values(out, params, place.layer, backend)

    return attend


def _context_core(step: LatentStep, batch: DecodeBatch, heads: int) -> Core:
    """Attends in decode where devices divide pages, with S > 1 new tokens per request.

    A device holds none, some, or all of the new tokens, which do not all see each other. But every new token sees all
    earlier ones: so a request's new tokens are as many more heads of one query of the cache. They attend to each other
    on their own device, which has computed them all.
    """
    (B, S), cfg, shards, backend = batch.tokens.shape, step.cfg, step.shards, step.backend
    lengths = shards.own_lengths(jnp.maximum(batch.lengths - S, 0))
    schedule = _schedule(lengths, 1, S * heads * shards.size, backend)
    seen = jnp.tril(jnp.ones((S, S), jnp.bool))[:, None]

    def attend(tokens, params, place, pages):
        q, R = absorb(tokens, params, place.layer, backend), cfg.kv_lora_rank
        every = shards.join_heads(q)
        rows = every.reshape(B, 1, -1, every.shape[-1])
        how: dict[str, Any] = {"scale": cfg.softmax_scale, "schedule": schedule, **step.where(place)}
        out, lse = mla.mla_decode(rows, pages, batch.page_table, lengths, **how)
        context = shards.merge(out.reshape(*every.shape[:2], R), lse.reshape(every.shape[:2]))
        latent = tokens.latent.reshape(B, S, -1)
        products = jnp.einsum(
            "bshd,btd->bsht", q.reshape(B, S, *q.shape[1:]), latent, preferred_element_type=jnp.float32
        )
        scores = jnp.where(seen, products * cfg.softmax_scale, -jnp.inf)
        own = jnp.einsum("bsht,btr->bshr", jax.nn.softmax(scores).astype(q.dtype), latent[..., :R])
        own_lse = jax.nn.logsumexp(scores, axis=-1).reshape(q.shape[:2])
        out, _ = mla.merge_attention(own.reshape(*q.shape[:2], R), own_lse, *context)
        return project_values(out, params, place.layer, backend)

    return attend


def _schedule(lengths: jax.Array, queries: int, heads: int, backend: Backend | None) -> mla.DecodeSchedule | None:
    """Returns the schedule that all layers of a step share; None for a backend without one."""
    if resolve_operation("mla_decode", backend) is not Backend.MOSAIC:
        return None
    return mla.decode_schedule(lengths, queries=queries, heads=heads)
