"""Decoder layers, stacks of them, and the loop over a stack that training, prefill and decode share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.config.model import ModelConfig
from dsv3.model.layers.attention import Attend, Projected, project
from dsv3.model.layers.experts import LOCAL_EXPERTS, ExpertLayer, RoutedExperts, RouterStats
from dsv3.model.layers.linear import Index, Numerics, layer_slice, linear, mlp
from dsv3.model.layers.rope import Rotation
from dsv3.model.layers.router import Routing, route, router_logits
from dsv3.model.params import LayerParams, MoeParams, Params
from dsv3.model.vocabulary import lookup
from pallas_kernels import dense
from pallas_kernels.backend import Backend
from pallas_kernels.rows import rms_norm
from sharding.experts.placement import Placement


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual:
    """What T tokens carry from layer to layer: one stream, to which every block adds what it computes.

    What a block reads and how its result is written back is decided here alone; schedules, steps and training pass
    the object on.
    """

    stream: jax.Array  # [T, D]

    @classmethod
    def start(cls, embedded: jax.Array) -> "Residual":
        """Returns what the first layer gets, from the embeddings `[T, D]`."""
        return cls(embedded)

    def read(self) -> jax.Array:
        """Returns what a block works on, `[T, D]`, before its norm."""
        return self.stream

    def write(self, *parts: jax.Array) -> "Residual":
        """Returns the residual after a block, whose result is the sum of `parts` `[T, D]`."""
        return Residual(sum(parts, self.stream))

    def end(self) -> jax.Array:
        """Returns what the norm behind the last layer takes, `[T, D]`."""
        return self.stream


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """What the layers of one step, or of one micro-batch of it, have in common.

    `valid` `[T]` marks the rows that are no padding. `routed` computes routed experts, here or wherever they live.
    """

    cfg: ModelConfig
    rotation: Rotation
    attend: Attend
    valid: jax.Array
    numerics: Numerics
    routed: RoutedExperts = LOCAL_EXPERTS


@dataclasses.dataclass(frozen=True)
class Stack:
    """L layers of one kind, with all that an index into them selects.

    Layer i owns cache layer `first_cache_layer + i`. `placement` says where the replicas of these layers' experts
    stand, None where they are local.
    """

    layers: LayerParams
    first_cache_layer: int
    placement: Placement | None = None

    @property
    def depth(self) -> int:
        """`L`."""
        return self.layers.input_norm.shape[0]

    @property
    def moe(self) -> MoeParams:
        """The parameters of the experts, in a stack that has some."""
        assert self.layers.moe is not None
        return self.layers.moe

    def experts(self, layer: Index, numerics: Numerics) -> ExpertLayer:
        """Returns the experts of one layer."""
        return ExpertLayer(self.moe, layer, numerics, self.placement)


MoeLayers = Callable[
    [Stack, tuple[LayerContext, ...], tuple[Residual, ...], Any], tuple[tuple[Residual, ...], Any, RouterStats]
]
"""Runs a stack of MoE layers on the micro-batches of a step, in the order that a schedule prescribes.

Takes the stack and, per micro-batch, its context and its residual, then the attention state. Returns the residuals, the
state, and the tally of all micro-batches together by layer.
"""


def run_layers(
    stack: Stack, context: LayerContext, x: Residual, state: Any
) -> tuple[Residual, Any, RouterStats | None]:
    """Runs a stack of layers; also returns the attention state and the experts' tally by layer."""

    def body(carry: tuple[Residual, Any], layer: jax.Array) -> tuple[tuple[Residual, Any], RouterStats | None]:
        x, state, router_stats = run_layer(stack, layer, context, *carry)
        return (x, state), router_stats

    (x, state), router_stats = jax.lax.scan(body, (x, state), jnp.arange(stack.depth, dtype=jnp.int32))
    return x, state, router_stats


def run_layer(
    stack: Stack, layer: Index, context: LayerContext, x: Residual, state: Any
) -> tuple[Residual, Any, RouterStats | None]:
    """Runs one decoder layer: attention, then a dense MLP or experts, each after a norm and around a residual."""
    x, state = attention_block(stack, layer, context, x, state)
    normed = post_normed(stack, layer, context, x)
    if stack.layers.mlp is not None:
        with jax.named_scope("mlp"):
            partial = mlp(normed, stack.layers.mlp, layer, context.numerics)
            return x.write(context.routed.shards.sum(partial)), state, None
    with jax.named_scope("moe"):
        routing = choose_experts(stack, layer, context, normed)
        y, router_stats = context.routed(normed, routing, stack.experts(layer, context.numerics))
        shared = shared_expert(stack, layer, context, normed)
        return add_experts(stack, layer, context, x, y, shared), state, router_stats


def norm(x: jax.Array, weight: jax.Array, layer: Index, context: LayerContext) -> jax.Array:
    """Returns `x` `[T, D]` over its root mean square, times layer `layer` of `weight` `[L, D]`."""
    return rms_norm(x, weight, layer, context.cfg.rms_norm_eps, backend=context.numerics.backend)


def post_normed(stack: Stack, layer: Index, context: LayerContext, x: Residual) -> jax.Array:
    """Returns what the MLP or the experts of a layer work on, `[T, D]`."""
    return norm(x.read(), stack.layers.post_norm, layer, context)


def attention_block(stack: Stack, layer: Index, context: LayerContext, x: Residual, state: Any) -> tuple[Residual, Any]:
    """Runs attention; returns the residual after it and the attention state."""
    heads, state = core(stack, layer, context, queries(stack, layer, context, x), state)
    return output(stack, layer, context, x, heads), state


def queries(stack: Stack, layer: Index, context: LayerContext, x: Residual) -> Projected:
    """Computes the part of attention before its core: norm and projections."""
    layers, cfg = stack.layers, context.cfg
    with jax.named_scope("attention"):
        normed = norm(x.read(), layers.input_norm, layer, context)
        cache_layer = stack.first_cache_layer + layer
        return project(normed, layers.attention, layer, cache_layer, cfg, context.rotation, context.numerics)


@jax.named_scope("attention")
def core(stack: Stack, layer: Index, context: LayerContext, tokens: Projected, state: Any) -> tuple[jax.Array, Any]:
    """Writes the cache and attends: `[T, H, V]` of the heads of this device, and the attention state."""
    return context.attend(tokens, stack.layers.attention, layer, stack.first_cache_layer + layer, state)


@jax.named_scope("attention")
def output(stack: Stack, layer: Index, context: LayerContext, x: Residual, heads: jax.Array) -> Residual:
    """Returns the residual after the output projection of `heads` `[T, H, V]`."""
    out = linear(heads.reshape(heads.shape[0], -1), stack.layers.attention.o, layer, context.numerics)
    return x.write(context.routed.shards.sum(out))


@jax.named_scope("router")
def choose_experts(stack: Stack, layer: Index, context: LayerContext, normed: jax.Array) -> Routing:
    """Chooses the experts of each row of `normed` `[T, D]`; ids are -1 in padding rows."""
    moe = stack.moe
    bias = None if moe.router_bias is None else layer_slice(moe.router_bias, layer)
    backend = context.numerics.backend
    routing = route(context.cfg, router_logits(normed, moe.router, layer, backend), bias, backend)
    return routing._replace(ids=jnp.where(context.valid[:, None], routing.ids, -1))


@jax.named_scope("shared_expert")
def shared_expert(stack: Stack, layer: Index, context: LayerContext, normed: jax.Array) -> jax.Array | None:
    """Returns the shared expert's part `[T, D]`, added unscaled; None in a model without one."""
    shared = stack.moe.shared
    return None if shared is None else context.routed.shards.sum(mlp(normed, shared, layer, context.numerics))


def add_experts(
    stack: Stack, layer: Index, context: LayerContext, x: Residual, y: jax.Array, shared: jax.Array | None
) -> Residual:
    """Returns the residual after the routed experts' sums `y` and the shared expert's part, `[T, D]` each.

    A norm behind the experts takes both parts together.
    """
    weight = stack.layers.post_moe_norm
    if weight is None:
        return x.write(y) if shared is None else x.write(y, shared)
    return x.write(norm(y if shared is None else y + shared, weight, layer, context))


def run_decoder(
    params: Params,
    contexts: tuple[LayerContext, ...],
    x: tuple[Residual, ...],
    state: Any,
    moe_layers: MoeLayers,
    placement: Placement | None = None,
) -> tuple[tuple[Residual, ...], Any, RouterStats | None]:
    """Runs all layers of the main model on the micro-batches of a step; their final norm is left to the caller.

    Returns the residuals, the state, and the experts' tally by MoE layer. Dense layers run one micro-batch after the
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
            # XLA takes a loop over a single layer apart, and then copies the page pool for the one micro-batch that
            # reads it, since the other writes to it. Here the other comes later.
            found[n], state = jax.lax.optimization_barrier((found[n], state))
    return tuple(found), state


def final_norm(params: Params, cfg: ModelConfig, x: Residual, backend: Backend | None) -> jax.Array:
    """Returns the hidden states `[T, D]` after the main model's final norm."""
    return rms_norm(x.end(), params.norm[None], 0, cfg.rms_norm_eps, backend=backend)


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
