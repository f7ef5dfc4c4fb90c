"""Decoder layers, stacks of them, and the loop over a stack that training, prefill and decode share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsv3.config.model import ModelConfig
from dsv3.model.layers.attention import Attention, LayerPlace
from dsv3.model.layers.experts import LOCAL_EXPERTS, ExpertLayer, RoutedExperts, RouterStats
from dsv3.model.layers.hyper_connections import Block, Residual, Streams
from dsv3.model.layers.linear import Index, Numerics, Rows, layer_slice, mlp, plain_rows
from dsv3.model.layers.router import Routing, id_dtype, masked, replay, route, route_by_token, router_logits
from dsv3.model.params import Fp8Weight, LayerParams, MixingParams, MoeParams, Params
from dsv3.model.vocabulary import lookup
from pallas_kernels import dense
from pallas_kernels.backend import Backend
from pallas_kernels.rows import rms_norm
from sharding.experts.placement import Placement


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """What all layers of a step, or of one of its micro-batches, share.

    `valid` `[T]` is False for padding rows. `routed` computes the routed experts, on this device or on others. Only
    layers whose experts are chosen by token read the ids `tokens` `[T]`. With `replayed` the layers use these experts
    (`router.replay`); with `returns_routed_experts` their statistics have the experts of each row.
    """

    cfg: ModelConfig
    attention: Attention
    valid: jax.Array
    numerics: Numerics
    routed: RoutedExperts = LOCAL_EXPERTS
    tokens: jax.Array | None = None
    replayed: jax.Array | None = None  # [L, T, K] int32, by MoE layer
    returns_routed_experts: bool = False

    def with_ids(self, router_stats: RouterStats, ids: jax.Array) -> RouterStats:
        """Returns a layer's statistics with the experts `ids` `[T, K]` of its rows, if the step returns them."""
        if not self.returns_routed_experts:
            return router_stats
        return router_stats._replace(ids=ids.astype(id_dtype(self.cfg.n_routed_experts)))


@dataclasses.dataclass(frozen=True)
class Stack:
    """L layers of the model, stacked on a leading axis, all with an MLP or all with experts.

    Layer i owns cache layer `first_cache_layer + i`. `placement` maps the experts of these layers to replicas; None
    where all experts are local.
    """

    layers: LayerParams
    first_cache_layer: int
    placement: Placement | None = None

    @property
    def depth(self) -> int:
        return self.layers.input_norm.shape[0]

    @property
    def moe(self) -> MoeParams:
        """The parameters of the experts; only for a stack of MoE layers."""
        assert self.layers.moe is not None
        return self.layers.moe

    def place(self, layer: Index) -> LayerPlace:
        """Returns the place of a layer without compressed entries, whose router chooses its experts."""
        return LayerPlace(layer, self.first_cache_layer + layer)


Kind = tuple[int, bool, int | None]
"""The kind of a layer: the ratio of its entries, whether a token's id chooses its experts, and for a target layer of
DSpark its number, so that each of these is a kind of its own."""


class LayerPattern(NamedTuple):
    """Layers whose kinds repeat with a fixed period. `kinds` are those of one period, `turns` how often it repeats,
    `first` the number of the first pass. Pass n computes the layers n + `offsets`; a first pass without such layers
    computes the stack's first layer. `of_ratio` counts the layers before each layer of the first turn that have its
    ratio.
    """

    first: int
    kinds: tuple[tuple[Kind, ...], ...]
    turns: int
    offsets: tuple[int, ...]
    of_ratio: tuple[tuple[int, ...], ...]

    def places(self, stack: Stack, turn: Index) -> list[tuple[LayerPlace, ...]]:
        """Returns the positions of the layers of each pass of a period. One unit computes all positions, which keeps
        the number of kernels low."""
        ratios = [kinds[0][0] for kinds in self.kinds]

        def numbers(turn: Index) -> list[list[tuple[Index, Index, Index]]]:
            found = []
            for i, counts in enumerate(self.of_ratio):
                layers = [_from_first(self.first + i + offset + turn * len(ratios)) for offset in self.offsets]
                of_ratio = [_from_first(count + turn * ratios.count(ratios[i])) for count in counts]
                found.append([(n, stack.first_cache_layer + n, m) for n, m in zip(layers, of_ratio, strict=True)])
            return found

        where = numbers(turn) if isinstance(turn, int) else jax.jit(numbers)(turn)
        return [
            tuple(
                LayerPlace(layer, cache_layer, ratio, of_ratio, hashed, target is not None)
                for (layer, cache_layer, of_ratio), (ratio, hashed, target) in zip(each, kinds, strict=True)
            )
            for each, kinds in zip(where, self.kinds, strict=True)
        ]


def _from_first(layer: Index) -> Index:
    return max(layer, 0) if isinstance(layer, int) else jnp.maximum(layer, 0)


@functools.cache
def patterns(cfg: ModelConfig, first: int, depth: int, offsets: tuple[int, ...] = (0,)) -> tuple[LayerPattern, ...]:
    """Returns the passes through the layers `first` to `first + depth - 1`, as few patterns of one or two kinds.

    A pass works on the layers at its number plus `offsets`; the last pass is the last one that has them all. Layers of
    most models are all alike. Those of DeepSeek-V4-Flash have ratios 0 | 4 | 128, 4, ...
    """
    ratios = () if cfg.compressed is None else cfg.compressed.ratios[first : first + depth]
    ratios += (0,) * (depth - len(ratios))  # those of layers that make drafts are not listed
    targets = () if cfg.dspark is None else cfg.dspark.target_layers
    of_layer = [
        (ratio, layer < cfg.num_hash_layers, layer if layer in targets else None)
        for layer, ratio in enumerate(ratios, first)
    ]

    def before(layer: int, ratio: int) -> int:
        return ratios[:layer].count(ratio) if layer >= 0 else layer

    passes = depth - max(0, *offsets)
    kinds = [tuple(of_layer[max(n + offset, 0)] for offset in offsets) for n in range(passes)]
    found, start = [], 0
    while start < passes:
        single, pair = (_turns(kinds[start:], width) for width in (1, 2))
        width, turns = (2, pair) if pair > 1 and single < 2 * pair else (1, single)
        here = tuple(kinds[start : start + width])
        counts = tuple(
            tuple(before(n + offset, ratio) for offset, (ratio, *_) in zip(offsets, each, strict=True))
            for n, each in enumerate(here, start)
        )
        found.append(LayerPattern(start, here, turns, offsets, counts))
        start += width * turns
    return tuple(found)


def ends(stack: Stack, cfg: ModelConfig) -> tuple[LayerPlace, LayerPlace]:
    """Returns the places of the first and the last layer of a stack."""
    found = patterns(cfg, stack.first_cache_layer, stack.depth)
    [first], [last] = found[0].places(stack, 0)[0], found[-1].places(stack, found[-1].turns - 1)[-1]
    return first, last


def _turns(kinds: list[Any], width: int) -> int:
    """Returns how often the first `width` kinds repeat from the start."""
    turns = 1
    while kinds[turns * width : (turns + 1) * width] == kinds[:width]:
        turns += 1
    return turns


Places = tuple[LayerPlace, ...]
"""Those of the layers of one pass."""

MoeLayers = Callable[
    [Stack, tuple[LayerContext, ...], tuple[Residual, ...], Any], tuple[tuple[Residual, ...], Any, RouterStats]
]
"""Runs a stack of MoE layers on the micro-batches of a step, in the order of a schedule.

Arguments: the stack, the context and residual of each micro-batch, and the attention state. Returns the residuals, the
state, and the router statistics by layer, summed over the micro-batches.
"""


def run_layers(
    stack: Stack, context: LayerContext, x: Residual, state: Any
) -> tuple[Residual, Any, RouterStats | None]:
    """Runs a stack of layers; also returns the attention state and the router statistics by layer."""

    def body(carry: tuple[Residual, Any], places: Places) -> tuple[tuple[Residual, Any], RouterStats | None]:
        (place,) = places
        x, state, router_stats = DecoderLayer(stack, place, context).run(*carry)
        return (x, state), router_stats

    (x, state), router_stats = scan_layers(stack, context.cfg, body, (x, state))
    return x, state, router_stats


def scan_layers(
    stack: Stack,
    cfg: ModelConfig,
    body: Callable[[Any, Places], tuple[Any, Any]],
    carry: Any,
    ordered: Callable[[Any], Any] = lambda turn: turn,
    offsets: tuple[int, ...] = (0,),
) -> tuple[Any, Any]:
    """Runs `body(carry, places)` for the passes of `patterns`; returns the last carry, and the results `[passes, ...]`.

    Without `offsets` pass n has layer n of the stack. Passes of one pattern are compiled once. `ordered` wraps the
    function that runs one period, to enforce program order. Without a pass the result is None.
    """
    results = []
    for pattern in patterns(cfg, stack.first_cache_layer, stack.depth, offsets):

        def turn(carry: Any, number: Index, pattern: LayerPattern = pattern) -> tuple[Any, Any]:
            found = []
            for places in pattern.places(stack, number):
                carry, result = body(carry, places)
                found.append(result)
            return carry, jax.tree.map(lambda *each: jnp.stack(each), *found)

        if pattern.turns == 1:
            carry, result = ordered(turn)(carry, 0)
        else:
            carry, result = jax.lax.scan(ordered(turn), carry, jnp.arange(pattern.turns, dtype=jnp.int32))
            result = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), result)
        results.append(result)
    return carry, jax.tree.map(lambda *each: jnp.concatenate(each), *results) if results else None


@dataclasses.dataclass(frozen=True)
class DecoderLayer:
    """One layer in a step: attention, then a dense MLP or experts, each after a norm and around a residual."""

    stack: Stack
    place: LayerPlace
    context: LayerContext

    def run(self, x: Residual, state: Any) -> tuple[Residual, Any, RouterStats | None]:
        """Runs the layer; also returns the attention state and the router statistics."""
        stack, context = self.stack, self.context
        block, state = self.attention(x, state)
        if stack.layers.mlp is not None:
            normed = self._read(block, stack.layers.post_norm)
            with jax.named_scope("mlp"):
                partial = mlp(normed, stack.layers.mlp, self.place.layer, context.numerics)
                return block.write(context.routed.shards.sum(partial)), state, None
        normed, routing = self.choose_experts(block)
        with jax.named_scope("moe"):
            y, router_stats = context.routed(normed, routing, self.experts)
            shared = self.shared_expert(normed)
            return self.add_experts(block, y, shared), state, context.with_ids(router_stats, routing.ids)

    @property
    def experts(self) -> ExpertLayer:
        """The routed experts; only in a stack of MoE layers."""
        return ExpertLayer(self.stack.moe, self.place.layer, self.context.numerics, self.stack.placement)

    def attention(self, x: Residual, state: Any) -> tuple[Block, Any]:
        """Runs attention; returns the residual after it, at the next block's place, and the attention state."""
        block, tokens = self.project(x)
        heads, state = self.core(tokens, state)
        return self.output(block, heads), state

    @jax.named_scope("attention")
    def project(self, x: Residual) -> tuple[Block, Any]:
        """Computes the norm and the projections before the attention core; also returns the residual at their place."""
        layers, context = self.stack.layers, self.context
        weight = getattr(layers.attention, "qkv_a", None)
        block = self._at(x, layers.attention_mixing, layers.input_norm, weight)
        normed = self._read(block, layers.input_norm)
        return block, context.attention.project(normed, layers.attention, self.place, context.numerics)

    @jax.named_scope("attention")
    def core(self, tokens: Any, state: Any) -> tuple[jax.Array, Any]:
        """Writes the cache and attends: `[T, H, V]` of the heads of this device, and the attention state."""
        return self.context.attention.attend(tokens, self.stack.layers.attention, self.place, state)

    @jax.named_scope("attention")
    def output(self, block: Block, heads: jax.Array) -> Block:
        """Returns the residual after the output projection of `heads` `[T, H, V]`, at the next block's place."""
        context = self.context
        out = context.attention.output(heads, self.stack.layers.attention, self.place, context.numerics)
        return self.at_experts(block.write(context.routed.shards.sum(out)))

    def at_experts(self, x: Residual) -> Block:
        """Returns the residual at the place of the MLP or the experts."""
        layers = self.stack.layers
        return self._at(x, layers.moe_mixing, layers.post_norm, None if layers.moe is None else layers.moe.gate_up)

    def choose_experts(self, block: Block) -> tuple[Rows, Routing]:
        """Returns the experts' input `[T, D]`, normed, and the routing of its rows; ids are -1 in padding."""
        normed = self._read(block, self.stack.layers.post_norm)
        return normed, self._route(normed)

    @jax.named_scope("router")
    def _route(self, normed: Rows) -> Routing:
        moe, place, context = self.stack.moe, self.place, self.context
        cfg, backend = context.cfg, context.numerics.backend
        logits = router_logits(plain_rows(normed), moe.router, place.layer, backend)
        given = place.hashed or context.replayed is not None
        if place.hashed:
            assert context.tokens is not None  # of every model with such layers
            routing = route_by_token(cfg, logits, layer_slice(moe.by_token, place.layer), context.tokens)
        else:
            hashed, valid = 0 if moe.by_token is None else len(moe.by_token), None if given else context.valid
            routing = route(cfg, logits, moe.router_bias, backend, place.layer, hashed, valid)
        if context.replayed is not None:
            routing = replay(cfg, logits, routing, layer_slice(context.replayed, place.layer))
        return masked(routing, context.valid) if given else routing

    @jax.named_scope("shared_expert")
    def shared_expert(self, normed: Rows) -> jax.Array | None:
        """Returns the shared expert's part `[T, D]`, added unscaled; None in a model without one."""
        shared, context = self.stack.moe.shared, self.context
        if shared is None:
            return None
        return context.routed.shards.sum(mlp(normed, shared, self.place.layer, context.numerics))

    def add_experts(self, block: Block, y: jax.Array, shared: jax.Array | None) -> Residual:
        """Returns the residual after the routed experts' sums `y` and the shared expert's part, `[T, D]` each.

        A norm behind the experts takes both parts together.
        """
        weight = self.stack.layers.post_moe_norm
        if weight is not None:
            return block.write(norm(y if shared is None else y + shared, weight, self.place.layer, self.context))
        x = block.write(y) if shared is None else block.write(y, shared)
        return x.with_mean() if self.place.is_target and isinstance(x, Streams) else x

    def _at(self, x: Residual, params: MixingParams | None, norm: jax.Array, weight: Any) -> Block:
        """Returns the residual at the place of a block, which multiplies what it reads with `weight`."""
        numerics = self.context.numerics
        ue8m0 = numerics.ue8m0 if isinstance(weight, Fp8Weight) else None
        return x.at(params, norm, self.place.layer, self.context.cfg, numerics.backend, ue8m0)

    def _read(self, block: Block, weight: jax.Array) -> Rows:
        cfg, backend = self.context.cfg, self.context.numerics.backend
        return block.read(weight, self.place.layer, cfg.rms_norm_eps, backend)


def norm(x: jax.Array, weight: jax.Array, layer: Index, context: LayerContext) -> jax.Array:
    """Returns `x` `[T, D]` over its root mean square, times layer `layer` of `weight` `[L, D]`."""
    return rms_norm(x, weight, layer, context.cfg.rms_norm_eps, backend=context.numerics.backend)


def run_decoder(
    params: Params,
    contexts: tuple[LayerContext, ...],
    x: tuple[Residual, ...],
    state: Any,
    moe_layers: MoeLayers,
    placement: Placement | None = None,
) -> tuple[tuple[Residual, ...], Any, RouterStats | None]:
    """Runs all layers of the main model on the micro-batches of a step; their final norm is left to the caller.

    Returns the residuals, the state, and the router statistics by MoE layer. Dense layers run one micro-batch after the
    other, the last one first: in prefill it holds the earlier tokens.
    """
    router_stats = None
    for group in contexts[0].cfg.layer_groups:
        layers = getattr(params, group.name)
        if layers.moe is None:
            x, state = _run_dense(Stack(layers, group.first), contexts, x, state)
        else:
            x, state, router_stats = moe_layers(Stack(layers, group.first, placement), contexts, x, state)
    return x, state, router_stats


def _run_dense(
    stack: Stack, contexts: tuple[LayerContext, ...], x: tuple[Residual, ...], state: Any
) -> tuple[tuple[Residual, ...], Any]:
    found = list(x)
    for n in reversed(range(len(found))):
        found[n], state, _ = run_layers(stack, contexts[n], found[n], state)
        if len(found) > 1:
            # XLA unrolls a loop over a single layer. Without this barrier it would then copy the page pool for the
            # micro-batch that reads it, because the other one writes to it.
            found[n], state = jax.lax.optimization_barrier((found[n], state))
    return tuple(found), state


def final_norm(params: Params, cfg: ModelConfig, x: Residual, backend: Backend | None) -> jax.Array:
    """Returns the hidden states `[T, D]` after the main model's final norm."""
    last = x.end(params.head_mixing, cfg, backend)
    return rms_norm(last, params.norm[None], 0, cfg.rms_norm_eps, backend=backend)


@jax.named_scope("embed")
def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """Returns the embeddings `[..., D]` of `tokens` `[...]`.

    Ids out of range give the last row, never undefined memory.
    """
    return lookup(params.embed, tokens)


@jax.named_scope("head")
def logits(params: Params, cfg: ModelConfig, hidden: jax.Array, backend: Backend | None = None) -> jax.Array:
    """Returns the logits float32 `[..., W]` of hidden states `[..., D]` taken after the final norm."""
    head = params.embed if cfg.tie_word_embeddings else params.head
    return dense.plain_gemm(hidden, head, out_dtype=jnp.float32, backend=backend)
