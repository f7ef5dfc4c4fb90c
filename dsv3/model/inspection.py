"""Records the values of each layer for each token of a prompt, for notebooks; serving does not use it.

The host runs the layers one by one, so that only one layer's values are on the device, and a hook may read them or
replace the residual stream of the next layer. Projections, router and experts are the served ones. Attention is the
uncached implementation of training, which exposes its weights.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import ModelConfig
from dsv3.model.decoder import DecoderLayer, Stack, embed, final_norm, logits
from dsv3.model.forward import uncached_context
from dsv3.model.layers.attention import Attend, LatentAttention
from dsv3.model.layers.hyper_connections import OneStream, Residual
from dsv3.model.layers.linear import Numerics, plain_rows
from dsv3.model.layers.router import router_logits
from dsv3.model.layers.uncached_attention import attention_weights, initial_topk_mask
from dsv3.model.params import Params
from pallas_kernels.backend import Backend

MAX_BYTES = 4 * 2**30
"""Bounds the values that one inspection keeps."""


@dataclasses.dataclass(frozen=True)
class LayerValues:
    """One layer's values for T tokens, numpy arrays; `D`, `R` and the other letters are those of the glossary.

    Attributes:
      layer: its number, from 0.
      hidden: `[T, D]`, the residual stream behind the layer, in the model's dtype.
      latents: `[T, R + P]`, the cached rows: normed latent and rotated key.
      attention: float32 `[H, T, T]`, at `[.., i, j]` the weight of token j for token i; None if not requested.
      attends: bool `[T, T]`, at `[i, j]` whether token i attends to token j; None where attention is dense.
      router_logits: float32 `[T, E]`, before the score function; None in a dense layer, as the next two are.
      expert_ids: int32 `[T, K]`, the selected experts, best first.
      expert_weights: float32 `[T, K]`, their weights in the sum.
    """

    layer: int
    hidden: np.ndarray
    latents: np.ndarray
    attention: np.ndarray | None = None
    attends: np.ndarray | None = None
    router_logits: np.ndarray | None = None
    expert_ids: np.ndarray | None = None
    expert_weights: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The recorded values of a prompt of T tokens.

    Attributes:
      token_ids: int32 `[T]`.
      embeddings: `[T, D]`, the residual stream before the first layer.
      layers: the values of the requested layers, in their order.
      hidden: `[T, D]`, behind the final norm.
      logits: float32 `[T, W]`; row i predicts token i + 1.
      num_experts: E of a MoE layer.
    """

    token_ids: np.ndarray
    embeddings: np.ndarray
    layers: tuple[LayerValues, ...]
    hidden: np.ndarray
    logits: np.ndarray
    num_experts: int

    @property
    def expert_load(self) -> np.ndarray:
        """(token, expert) pairs of the requested MoE layers, int64 `[layers, E]`."""
        ids = [each.expert_ids for each in self.layers if each.expert_ids is not None]
        counts = [np.bincount(layer.ravel(), minlength=self.num_experts) for layer in ids]
        return np.stack(counts) if counts else np.zeros((0, self.num_experts), np.int64)


Hook = Callable[[LayerValues], Any]
"""Called after each requested layer; a result other than None, `[T, D]`, replaces the next layer's input."""


def inspect(
    params: Params,
    cfg: ModelConfig,
    token_ids: Iterable[int],
    *,
    layers: Iterable[int] | None = None,
    attention: bool = True,
    hook: Hook | None = None,
    backend: Backend | None = None,
) -> Inspection:
    """Runs a prompt from position 0, without a cache, and records the values of its layers.

    Args:
      params: a model whose experts are all on one device.
      token_ids: T tokens, at least one.
      layers: numbers of the layers to record, all if not given; the others run too.
      attention: whether to record the attention weights, by far the largest values.
      hook: receives the values of each recorded layer, and may replace the input of the next one.
      backend: implementation of the kernels, or None for the one that suits the device.

    Raises:
      ValueError: no token, a layer that the model does not have, more than `MAX_BYTES` to record, a hook's result of
        another shape, or a model with compressed attention.
    """
    tokens = np.fromiter(token_ids, np.int32)
    kept = _checked(cfg, tokens, layers, attention, params.embed.dtype.itemsize)
    padded = np.zeros(-(-len(tokens) // 64) * 64, np.int32)  # so that few lengths are compiled
    padded[: len(tokens)] = tokens
    x = _embed(params, padded)
    embeddings, found, last = np.asarray(x)[: len(tokens)], [], initial_topk_mask(cfg, 1, len(padded))
    for layer in range(cfg.num_hidden_layers):
        x, values = _run(params, x, layer, last, cfg, backend)
        last = None if last is None else values["attends"][None]
        if not attention:
            del values["attention"]
        if layer in kept:
            found.append(_values(layer, x, values, len(tokens)))
            if hook is not None and (changed := hook(found[-1])) is not None:
                x = _replaced(x, changed, len(tokens))
    hidden, scores = _finish(params, x, cfg, backend)
    short = slice(len(tokens))
    every = np.asarray(hidden)[short], np.asarray(scores)[short]
    return Inspection(tokens, embeddings, tuple(found), *every, cfg.n_routed_experts)


def _checked(
    cfg: ModelConfig, tokens: np.ndarray, layers: Iterable[int] | None, attention: bool, itemsize: int
) -> frozenset[int]:
    """Returns the layers to record; raises ValueError as `inspect` does."""
    if cfg.compressed is not None:
        raise ValueError(f"{cfg.family}: layers with several residual streams are not recorded")
    count, T = cfg.num_hidden_layers, len(tokens)
    kept = frozenset(range(count) if layers is None else layers)
    if not T:
        raise ValueError("token_ids is empty; a prompt has at least one token")
    if wrong := sorted(layer for layer in kept if not 0 <= layer < count):
        raise ValueError(f"layers {wrong} do not exist; the model has layers 0 to {count - 1}")
    each = T * (cfg.hidden_size + cfg.latent_dim) * itemsize
    each += 4 * T * (cfg.n_routed_experts + 2 * cfg.num_experts_per_tok)
    each += (4 * cfg.num_attention_heads * attention + bool(cfg.index_layers)) * T * T
    needed = len(kept) * each + 4 * T * cfg.vocab_size + 2 * T * cfg.hidden_size * itemsize
    if needed > MAX_BYTES:
        hint = "attention=False" if attention else "a shorter prompt"
        text = f"{len(kept)} layers of {T} tokens are {needed:,} bytes, at most {MAX_BYTES:,}"
        raise ValueError(f"{text}; choose fewer layers, or {hint}")
    return kept


_embed = jax.jit(embed)


@functools.partial(jax.jit, static_argnames=("cfg", "backend"))
def _finish(params: Params, x: jax.Array, cfg: ModelConfig, backend: Backend | None) -> tuple[jax.Array, jax.Array]:
    hidden = final_norm(params, cfg, OneStream(x), backend)
    return hidden, logits(params, cfg, hidden, backend)


def _run(
    params: Params,
    x: jax.Array,
    layer: int,
    last: jax.Array | None,
    cfg: ModelConfig,
    backend: Backend | None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs one layer on `x` `[T, D]`, padding rows included."""
    group = next(group for group in cfg.layer_groups if layer < group.first + group.depth)
    return _layer(getattr(params, group.name), x, np.int32(layer - group.first), last, cfg, group.first, backend)


@functools.partial(jax.jit, static_argnames=("cfg", "first", "backend"))
def _layer(
    layers: Any,
    x: jax.Array,
    index: jax.Array,
    last: jax.Array | None,
    cfg: ModelConfig,
    first: int,
    backend: Backend | None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs layer `index` of a stack whose first one is `first`, and returns its values by the names of `LayerValues`.

    Attention weights are always computed, so that each kind of layer has one program. `last` `[1, T, T]` is the top-k
    mask of the layer before, if layers share it.
    """
    stack, context = Stack(layers, first), uncached_context(cfg, 1, x.shape[0], backend)
    assert isinstance(context.attention, LatentAttention)
    shown = dataclasses.replace(context.attention, attend=_shown_attend(cfg, last, backend))
    layer = DecoderLayer(stack, stack.place(index), dataclasses.replace(context, attention=shown))
    if layers.moe is None:
        out, values, _ = layer.run(OneStream(x), {})
    else:
        out, values = _moe_layer(layer, OneStream(x))
    return out.flat(), values


def _moe_layer(layer: DecoderLayer, x: Residual) -> tuple[Residual, dict[str, jax.Array]]:
    """Runs a layer as `DecoderLayer.run` does, and returns its router values too."""
    stack, place, numerics = layer.stack, layer.place, layer.context.numerics
    block, values = layer.attention(x, {})
    normed, routing = layer.choose_experts(block)
    y, _ = layer.context.routed(normed, routing, layer.experts)
    shown = {
        "router_logits": router_logits(plain_rows(normed), stack.moe.router, place.layer, numerics.backend),
        "expert_ids": routing.ids,
        "expert_weights": routing.weights,
    }
    return layer.add_experts(block, y, layer.shared_expert(normed)), values | shown


def _shown_attend(cfg: ModelConfig, last: jax.Array | None, backend: Backend | None) -> Attend:
    """Returns the causal attention of one sequence; its state holds latents and attention weights."""

    def attend(tokens, params, place, state):
        where = place.layer, place.cache_layer, last
        weights, v, pairs = attention_weights(cfg, 1, tokens, params, *where, Numerics(backend))
        out = jnp.einsum("bhqk,bkhv->bqhv", weights.astype(v.dtype), v)[0]
        shown = {"latents": tokens.latent, "attention": weights[0]}
        return out, shown | ({} if tokens.index is None else {"attends": pairs[0]})

    return attend


def _values(layer: int, x: jax.Array, values: dict[str, jax.Array], length: int) -> LayerValues:
    """Returns a layer's values on the host, without padding."""
    found = {name: np.asarray(array) for name, array in values.items()}
    square = {name: found.pop(name)[..., :length, :length] for name in ("attention", "attends") if name in found}
    short = square | {name: array[:length] for name, array in found.items()}
    return LayerValues(layer, np.asarray(x)[:length], **short)


def _replaced(x: jax.Array, changed: Any, length: int) -> jax.Array:
    """Returns the residual stream with the rows that a hook returned."""
    rows = jnp.asarray(changed, x.dtype)
    if rows.shape != (length, x.shape[1]):
        raise ValueError(f"hook returned shape {rows.shape}, expected {(length, x.shape[1])}")
    return x.at[:length].set(rows)
