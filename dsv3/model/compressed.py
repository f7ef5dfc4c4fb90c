"""The decoder of DeepSeek-V4: layers of several ratios in one order, around several residual streams."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsv3.config.model import ModelConfig
from dsv3.model.layers.compressed_attention import (
    AttendCompressed,
    LayerPlace,
    compressed_of,
    output,
    project,
)
from dsv3.model.layers.experts import LOCAL_EXPERTS, ExpertLayer, RoutedExperts, RouterStats
from dsv3.model.layers.hyper_connections import Streams
from dsv3.model.layers.linear import Index, Numerics, layer_slice, mlp
from dsv3.model.layers.rope import Rotation
from dsv3.model.layers.router import Routing, route, route_by_token, router_logits
from dsv3.model.params import LayerParams, MoeParams, Params
from pallas_kernels.rows import rms_norm


@dataclasses.dataclass(frozen=True)
class RowContext:
    """What all layers have in common for T rows: tokens and positions `[T]`, and how the rows are computed.

    `rotations` are those of layers without entries and with. `valid` `[T]` marks the rows that are no padding.
    """

    cfg: ModelConfig
    tokens: jax.Array
    positions: jax.Array
    rotations: tuple[Rotation, Rotation]
    valid: jax.Array
    attend: AttendCompressed
    numerics: Numerics
    routed: RoutedExperts = LOCAL_EXPERTS


class LayerPattern(NamedTuple):
    """Layers from `first` on whose kinds repeat: (ratio, hashed) of the layers of one turn, and how many turns."""

    first: int
    kinds: tuple[tuple[int, bool], ...]
    turns: int


@functools.cache
def patterns(cfg: ModelConfig) -> tuple[LayerPattern, ...]:
    """Returns the layers in their order, as few patterns of one or two kinds: those of Flash are 0 | 4 | 128, 4, ..."""
    kinds = [(ratio, layer < cfg.num_hash_layers) for layer, ratio in enumerate(compressed_of(cfg).ratios)]
    found, first = [], 0
    while first < len(kinds):
        single, pair = (_turns(kinds[first:], width) for width in (1, 2))
        width, turns = (2, pair) if pair > 1 and single < 2 * pair else (1, single)
        found.append(LayerPattern(first, tuple(kinds[first : first + width]), turns))
        first += width * turns
    return tuple(found)


def _turns(kinds: list[Any], width: int) -> int:
    """Returns how often the first `width` kinds repeat from the start."""
    turns = 1
    while kinds[turns * width : (turns + 1) * width] == kinds[:width]:
        turns += 1
    return turns


def run_compressed(params: LayerParams, context: RowContext, x: Streams, state: Any) -> tuple[Streams, Any, jax.Array]:
    """Runs all layers; also returns the attention state, and the (token, expert) pairs int32 `[L, E]`."""
    counts = []
    for pattern in patterns(context.cfg):
        turn = functools.partial(_run_turn, params, context, pattern)
        if pattern.turns == 1:
            (x, state), found = turn((x, state), 0)
        else:
            (x, state), found = jax.lax.scan(turn, (x, state), jnp.arange(pattern.turns, dtype=jnp.int32))
        counts.append(found.reshape(-1, found.shape[-1]))
    return x, state, jnp.concatenate(counts)


def _run_turn(
    params: LayerParams, context: RowContext, pattern: LayerPattern, carry: tuple[Streams, Any], number: Index
) -> tuple[tuple[Streams, Any], jax.Array]:
    """Runs the layers of turn `number` of a pattern; also returns their (token, expert) pairs `[layers, E]`."""
    x, state = carry
    ratios, counts = compressed_of(context.cfg).ratios, []
    for first, (ratio, hashed) in enumerate(pattern.kinds, pattern.first):
        place = LayerPlace(
            layer=first + number * len(pattern.kinds),
            ratio=ratio,
            of_ratio=ratios[:first].count(ratio) + number * sum(other == ratio for other, _ in pattern.kinds),
            hashed=hashed,
        )
        x, state, router_stats = run_layer(params, place, context, x, state)
        counts.append(router_stats.counts)
    return (x, state), jnp.stack(counts)


def run_layer(
    params: LayerParams, place: LayerPlace, context: RowContext, x: Streams, state: Any
) -> tuple[Streams, Any, RouterStats]:
    """Runs one layer: attention, then experts, each between what it reads of the streams and writes to them."""
    cfg, layer, moe = context.cfg, place.layer, params.moe
    backend = context.numerics.backend
    assert moe is not None and moe.shared is not None  # all layers have experts, and several streams
    assert params.attention_mixing is not None and params.moe_mixing is not None
    with jax.named_scope("attention"):
        mixed = x.at(params.attention_mixing, layer, cfg, backend)
        by = context.rotations[place.ratio > 0]
        normed = rms_norm(mixed.read(), params.input_norm, layer, cfg.rms_norm_eps, backend=backend)
        tokens = project(normed, params.attention, place, cfg, context.positions, by, context.numerics)
        heads, state = context.attend(tokens, params.attention, place, state)
        out = output(heads, params.attention, layer, by, context.numerics)
        x = mixed.write(context.routed.shards.sum(out))
    with jax.named_scope("moe"):
        mixed = x.at(params.moe_mixing, layer, cfg, backend)
        normed = rms_norm(mixed.read(), params.post_norm, layer, cfg.rms_norm_eps, backend=backend)
        routing = choose_experts(moe, place, context, normed)
        y, router_stats = context.routed(normed, routing, ExpertLayer(moe, layer, context.numerics))
        shared = context.routed.shards.sum(mlp(normed, moe.shared, layer, context.numerics))
        return mixed.write(y, shared), state, router_stats


@jax.named_scope("router")
def choose_experts(moe: MoeParams, place: LayerPlace, context: RowContext, normed: jax.Array) -> Routing:
    """Chooses the experts of each row of `normed` `[T, D]`; ids are -1 in padding rows."""
    cfg, layer, backend = context.cfg, place.layer, context.numerics.backend
    logits = router_logits(normed, moe.router, layer, backend)
    if place.hashed:
        routing = route_by_token(cfg, logits, layer_slice(moe.by_token, layer), context.tokens)
    else:
        routing = route(cfg, logits, layer_slice(moe.router_bias, layer - cfg.num_hash_layers), backend)
    return routing._replace(ids=jnp.where(context.valid[:, None], routing.ids, -1))


def hidden_states(params: Params, cfg: ModelConfig, x: Streams, numerics: Numerics) -> jax.Array:
    """Returns the hidden states `[T, D]` after the final norm, ready for `decoder.logits`."""
    assert params.head_mixing is not None  # there are several streams
    collapsed = x.end(params.head_mixing, cfg, numerics.backend)
    return rms_norm(collapsed, params.norm[None], 0, cfg.rms_norm_eps, backend=numerics.backend)
