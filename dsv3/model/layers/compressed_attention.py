"""Attention to a window of tokens and to compressed entries (DeepSeek-V4, arXiv:2606.19348), without its cache.

A latent of d values, whose last P are rotated, is key and value of all heads at once. Since values are rotated too, the
heads' output is turned back by the query's own angle. Functions work on rows with given positions: those of whole
sequences, of prefill, or of decode.

An entry is one vector in place of the tokens of a window. Every token gives values and scores. An entry is the sum of
its window's values, weighted channel by channel with a softmax of the scores over the window. Where entries overlap,
tokens give two series: the first goes to the entry of the next window, the second to that of their own. What a token
gives are C values and as many scores side by side; C is d, or 2 * d where entries overlap.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.config.model import CompressedAttention, ModelConfig
from dsv3.model.layers.attention import Attend, LayerPlace, Projected
from dsv3.model.layers.indexer import IndexTokens
from dsv3.model.layers.linear import Index, Numerics, QuantizedRows, Rows, layer_slice, linear, plain_rows
from dsv3.model.layers.rope import Rotation, rotate, rotation
from dsv3.model.layers.router import router_logits
from dsv3.model.params import CompressedAttentionParams, CompressorParams, Fp8Weight, PooledIndexerParams
from pallas_kernels import dense
from pallas_kernels.backend import Backend
from pallas_kernels.heads import normed_latents, unit_rotated_heads
from pallas_kernels.rows import rms_norm, rotate_heads


@dataclasses.dataclass(frozen=True)
class EntryAttention:
    """`Attention` to a window and entries."""

    cfg: ModelConfig
    rotations: tuple[Rotation, Rotation]  # of layers without entries, and of those with
    attend: Attend

    @classmethod
    def at(cls, cfg: ModelConfig, positions: jax.Array, attend: Attend) -> "EntryAttention":
        """Returns the attention of tokens at `positions` `[T]`."""
        return cls(cfg, (rotation(cfg, positions), entry_rotation(cfg, positions)), attend)

    @jax.named_scope("project")
    def project(self, x: Rows, params: CompressedAttentionParams, place: LayerPlace, numerics: Numerics) -> Projected:
        """Returns queries and latents of `x` `[T, D]`, both rotated, and what the layer's entries are made of."""
        cfg, by, backend = self.cfg, self.rotations[place.ratio > 0], numerics.backend
        q_latent, latent = _latents(x, params, place.layer, cfg, by, numerics)
        x = plain_rows(x)
        q = linear(q_latent, params.q_b, place.layer, numerics)
        q = q.reshape(len(x), -1, cfg.latent_dim)  # the heads of this device
        entries = index = None
        if (compressor := compressor_of(params, cfg, place.ratio)) is not None:
            entries = given(x, compressor, place.of_ratio, backend)
            if compressor is params.sparse:
                index = _index_queries(x, q_latent, params.indexer, place.of_ratio, cfg, by, numerics)
        return Projected(
            unit_rotated_heads(q, by.cos, by.sin, cfg.rms_norm_eps, backend=backend), latent, index, entries
        )

    def output(
        self, heads: jax.Array, params: CompressedAttentionParams, place: LayerPlace, numerics: Numerics
    ) -> jax.Array:
        """Returns two products of what heads see, turned back."""
        return output(heads, params, place.layer, self.rotations[place.ratio > 0], numerics)


def compressed_of(cfg: ModelConfig) -> CompressedAttention:
    """Returns the attention of a model that has it."""
    assert cfg.compressed is not None
    return cfg.compressed


def entry_rotation(cfg: ModelConfig, positions: jax.Array) -> Rotation:
    """Returns how layers with entries rotate: queries and latents as well as entries and index keys."""
    return rotation(_compressed_rotary(cfg), positions)


@functools.cache
def _compressed_rotary(cfg: ModelConfig) -> ModelConfig:
    compressed = compressed_of(cfg)
    return dataclasses.replace(cfg, rope_theta=compressed.rope_theta, yarn=compressed.yarn)


def compressor_of(params: CompressedAttentionParams, cfg: ModelConfig, ratio: int) -> CompressorParams | None:
    """Returns the compressors of the layers of `ratio`; None for 0."""
    if not ratio:
        return None
    return params.sparse if ratio == compressed_of(cfg).sparse_ratio else params.heavy


def project_latents(
    x: Rows,
    params: CompressedAttentionParams,
    layer: Index,
    cfg: ModelConfig,
    by: Rotation,
    numerics: Numerics,
) -> jax.Array:
    """Returns the latents `[T, d]` of `x` `[T, D]` alone, as `EntryAttention.project` does.

    The rows of the query latent are computed too: a product with some rows of a stack would copy them.
    """
    return _latents(x, params, layer, cfg, by, numerics)[1]


def _latents(
    x: Rows,
    params: CompressedAttentionParams,
    layer: Index,
    cfg: ModelConfig,
    by: Rotation,
    numerics: Numerics,
) -> tuple[Rows, jax.Array]:
    """Returns query latents `[T, Q]` and latents `[T, d]` of `x` `[T, D]`."""
    down, eps = linear(x, params.qkv_a, layer, numerics), cfg.rms_norm_eps
    how: dict[str, Any] = {"ue8m0": numerics.ue8m0} if isinstance(params.q_b, Fp8Weight) else {}
    arrays = down, params.q_norm, params.kv_norm, layer, by.cos, by.sin, eps
    query, latent, quantized = normed_latents(*arrays, **how, backend=numerics.backend)
    return query if quantized is None else QuantizedRows(query, *quantized), latent


@jax.named_scope("indexer")
def _index_queries(
    x: jax.Array,
    q_latent: Rows,
    params: PooledIndexerParams | None,
    layer: Index,
    cfg: ModelConfig,
    by: Rotation,
    numerics: Numerics,
) -> IndexTokens:
    assert params is not None  # layers of the sparse ratio have an indexer
    indexer, backend = compressed_of(cfg).indexer, numerics.backend
    q = linear(q_latent, params.q_b, layer, numerics).reshape(len(x), indexer.num_heads, indexer.head_dim)
    return IndexTokens(
        q=rotate_heads(q, by.cos, by.sin, backend=backend),
        key=given(x, params.compressor, layer, backend),
        weights=router_logits(x, params.weights, layer, backend) * (indexer.num_heads * indexer.head_dim) ** -0.5,
    )


def in_window(cfg: ModelConfig, queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns which tokens at positions `keys` `[..., S]` those at `queries` `[..., T]` see, bool `[..., T, S]`."""
    back = queries[..., :, None] - keys[..., None, :]
    return (back >= 0) & (back < compressed_of(cfg).window)


def num_complete(ratio: int, queries: jax.Array) -> jax.Array:
    """Returns how many entries the tokens at positions `queries` `[...]` see: those whose windows have ended."""
    return (queries + 1) // ratio


@jax.named_scope("indexer")
def index_scores(q: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns float32 `[B, T, W]`: how much entries with `keys` `[B, W, Y]` matter to `q` `[B, T, Hi, Y]`."""
    products = jnp.einsum("bthy,bwy->bthw", q, keys, preferred_element_type=jnp.float32, precision="highest")
    sums = jnp.einsum("bth,bthw->btw", weights, jax.nn.relu(products), precision="highest")
    return lax.stop_gradient(jnp.where(sums == 0, 0.0, sums))  # of zeros with two signs the first one must win


@jax.named_scope("output")
def output(
    heads: jax.Array, params: CompressedAttentionParams, layer: Index, by: Rotation, numerics: Numerics
) -> jax.Array:
    """Returns `[T, D]` from what heads see `[T, H, d]`, turned back by the queries' own rotation."""
    turned = rotate_heads(heads, by.cos, -by.sin, backend=numerics.backend)
    groups = params.o_a.shape[1]
    grouped = dense.head_gemm(turned.reshape(len(heads), groups, -1), params.o_a, layer, backend=numerics.backend)
    return linear(grouped.reshape(len(heads), -1), params.o_b, layer, numerics)


@jax.named_scope("compressor")
def given(x: jax.Array, params: CompressorParams, layer: Index, backend: Backend | None) -> jax.Array:
    """Returns values and scores float32 `[T, 2 * C]` of tokens `x` `[T, D]`, without what their places add to scores.

    `layer` counts the compressors of the stack.
    """
    return router_logits(x, params.value_score, layer, backend)


@jax.named_scope("compressor")
def contributions(given: jax.Array, params: CompressorParams, layer: Index, positions: jax.Array) -> jax.Array:
    """Returns what tokens at `positions` `[T]` give, `[T, 2 * C]`, from the result of `given`.

    A cache keeps it of the tokens of windows that are not complete, and of those that the next entry needs.
    """
    values, scores = jnp.split(given, 2, axis=-1)
    place = layer_slice(params.position, layer)
    return jnp.concatenate([values, scores + place[positions % len(place)]], axis=-1)


def window_rows(ratio: int, entries: jax.Array, *, overlaps: bool) -> jax.Array:
    """Returns the positions `[..., S]` of the tokens that make `entries` `[...]`; negative ones do not exist.

    S is `ratio`, or twice that where entries overlap.
    """
    return entries[..., None] * ratio + jnp.arange(-ratio if overlaps else 0, ratio, dtype=jnp.int32)


@jax.named_scope("compressor")
def pool_window(rows: jax.Array, exists: jax.Array, width: int) -> jax.Array:
    """Returns entries float32 `[..., d]`, before their norm.

    Args:
      rows: what the tokens of each entry's windows give, `[..., S, 2 * C]` in the order of `window_rows`.
      exists: bool `[..., S]`, which of them there are: the first window has none before it.
      width: d. Where C is twice that, the first half of the rows give their first series.
    """
    values, scores = jnp.split(rows, 2, axis=-1)
    if values.shape[-1] > width:
        earlier = jnp.arange(values.shape[-2])[:, None] < values.shape[-2] // 2  # a choice, since XLA fuses no joining
        values, scores = (jnp.where(earlier, a[..., :width], a[..., width:]) for a in (values, scores))
    weights = jax.nn.softmax(jnp.where(exists[..., None], scores, -jnp.inf), axis=-2)
    return (weights * jnp.where(exists[..., None], values, 0)).sum(-2)


@jax.named_scope("compressor")
def norm_and_rotate(
    entries: jax.Array,
    params: CompressorParams,
    layer: Index,
    rotation: Rotation,
    eps: float,
    dtype: jnp.dtype,
    backend: Backend | None = None,
) -> jax.Array:
    """Returns entries `[T, d]` as they are attended to: normed, and rotated as their window's first token is."""
    normed = rms_norm(entries.astype(dtype), params.norm, layer, eps, backend=backend)
    plain = normed.shape[-1] - 2 * rotation.cos.shape[-1]
    return jnp.concatenate([normed[..., :plain], rotate(normed[..., plain:], rotation)], axis=-1)
