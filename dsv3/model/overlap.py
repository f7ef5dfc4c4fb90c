"""MoE layers whose communication hides behind compute (DeepSeek's profile data and day-6 overview).

A step's batch is cut in two, and the layers are written in the order of the published timelines. With program
order enforced (`sharding.collectives`) the compiled schedule is the written one: between each collective's start and
its finish stands work of the other micro-batch. Below some tokens a device the two small halves cost more than the
overlap gains (SGLang measured -27 % at 32 tokens a device, even at 64 to 128), so `worth_overlapping` decides by the
batch's size, and smaller steps run as one batch whose shared expert hides the combine (`hooked_layers`).

Prefill, one MoE layer, micro-batches 0 and 1 (1 holds the earlier tokens, so a prompt may be cut in two):

    compute  | attention 1, shared 0 | attention 0 | experts 1  | experts 0, shared 1 |
    network  | combine 0 (layer - 1) | dispatch 1  | dispatch 0 | combine 1           |

Decode, one half of a layer (the other half swaps 0 and 1); attention 0 and 1 of the paper's five stages are `project`
and the attention core:

    compute  | shared 0, project 1 | experts 0 | core and router 1 |
    network  | dispatch 0          |           | combine 0         |
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple

import jax
import jax.numpy as jnp

from dsv3.model.attention import Projected
from dsv3.model.decoder import Step, attend, attention_block, choose_experts, queries, shared_expert
from dsv3.model.expert_parallel import ExpertParallel, count, local_experts
from dsv3.model.experts import Tally
from dsv3.model.linear import Index, at
from dsv3.model.norm import rms_norm
from dsv3.model.params import LayerParams, MoeParams
from sharding.collectives import in_program_order
from sharding.exchange import (
    Hop,
    Plan,
    Rows,
    Sent,
    collect,
    compute,
    further_rounds,
    make_plan,
    receive,
    send,
    send_back,
)
from sharding.transport import pad_rounds

MIN_DECODE_TOKENS = 128
MIN_PREFILL_TOKENS = 1024


def worth_overlapping(tokens: int, ranks: int, is_prefill: bool) -> bool:
    """Whether a step of `tokens` tokens on each rank runs as two micro-batches."""
    return ranks > 1 and tokens >= (MIN_PREFILL_TOKENS if is_prefill else MIN_DECODE_TOKENS)


class Routed(NamedTuple):
    """A micro-batch between its router and its combine."""

    normed: jax.Array  # [T, D], the shared expert's input
    ids: jax.Array  # [T, K], logical
    rows: Rows
    plan: Plan


class Computed(NamedTuple):
    """Partial sums [peers * C, D] where the experts live, not yet back, and the rounds [hops] taken so far."""

    sums: jax.Array
    rounds: jax.Array


class Combining(NamedTuple):
    """`Computed` on its way back."""

    handle: Any
    rounds: jax.Array


def _named[**P, T](stage: Callable[Concatenate["Lane", P], T]) -> Callable[Concatenate["Lane", P], T]:
    """Puts `micro_batch_0` or `_1` into the names of a stage's operations, for profiles and plans."""

    @functools.wraps(stage)
    def named(lane: "Lane", *args: P.args, **kwargs: P.kwargs) -> T:
        with jax.named_scope(f"micro_batch_{lane.number}"):
            return stage(lane, *args, **kwargs)

    return named


@dataclasses.dataclass(frozen=True)
class Lane:
    """One micro-batch's way through the MoE layers: its step, and the stages of a layer.

    A stage is one jitted unit. Program order is kept between units, not inside of them: enforced on single operations
    it would also keep XLA from fusing these.
    """

    layers: LayerParams
    step: Step
    parallel: ExpertParallel
    first_cache_layer: int
    number: int = 0

    @property
    def moe(self) -> MoeParams:
        assert self.layers.moe is not None  # only stacks with experts are overlapped
        return self.layers.moe

    @property
    def hop(self) -> Hop:
        return self.parallel.transport.hops[0]

    def choose(self, layer: Index, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Norm and router: `x` normed [T, D], ids and weights [T, K]."""

        def stage(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            normed = rms_norm(x, at(self.layers.post_norm, layer), self.step.cfg.rms_norm_eps)
            return normed, *choose_experts(self.moe, layer, self.step, normed)

        return jax.jit(stage)(x)

    @_named
    def route(self, layer: Index, x: jax.Array) -> Routed:
        """Norm, router, and the queues of what is to be sent."""

        def stage(x: jax.Array) -> Routed:
            normed, ids, weights = self.choose(layer, x)
            rows = self.parallel.address(normed, ids, weights, self.moe, layer, self.step.numerics)
            return Routed(normed, ids, rows, make_plan(rows.ids, self.parallel.transport.hops))

        return jax.jit(stage)(x)

    @_named
    def start_dispatch(self, routed: Routed) -> Sent:
        return send(routed.rows, routed.plan, 0, self.hop)

    @_named
    def finish_dispatch(self, sent: Sent) -> Rows:
        return receive(sent, self.hop)

    @_named
    def experts(self, layer: Index, arrived: Rows) -> Computed:
        """What this rank (or, over several hops, this node) computes for the rows that arrived."""
        local = local_experts(self.moe, layer, self.step.numerics)
        return Computed(*compute(arrived, self.parallel.transport.hops, local))

    @_named
    def start_combine(self, computed: Computed) -> Combining:
        return Combining(send_back(computed.sums, self.hop), computed.rounds)

    @_named
    def finish_combine(
        self, layer: Index, x: jax.Array, routed: Routed, combining: Combining, shared: jax.Array | float
    ) -> tuple[jax.Array, Tally]:
        """`x` after the MoE layer: what comes back, what did not fit the first round, and the shared expert."""
        hops = self.parallel.transport.hops
        local = local_experts(self.moe, layer, self.step.numerics)

        def stage(x: jax.Array, first: jax.Array, rounds: jax.Array) -> tuple[jax.Array, Tally]:
            y, rounds = further_rounds(routed.rows, routed.plan, hops, local, (first, rounds))
            y = self.parallel.shards.join(y, x.shape[0])
            return x + y + shared, Tally(count(routed.ids, self.moe.router.shape[1]), pad_rounds(rounds))

        return jax.jit(stage)(x, collect(combining.handle, routed.plan, 0, self.hop), combining.rounds)

    @_named
    def shared(self, layer: Index, normed: jax.Array) -> jax.Array | float:
        return jax.jit(lambda normed: shared_expert(self.moe, layer, self.step, normed))(normed)

    @_named
    def attention(self, layer: Index, x: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache_layer = self.first_cache_layer + layer
        return jax.jit(lambda x, pages: attention_block(self.layers, layer, self.step, x, pages, cache_layer))(x, pages)

    @_named
    def project(self, layer: Index, x: jax.Array) -> Projected:
        """The part of attention before its core."""
        return jax.jit(lambda x: queries(self.layers, layer, self.step, x))(x)

    @_named
    def attend(
        self, layer: Index, x: jax.Array, tokens: Projected, pages: jax.Array
    ) -> tuple[jax.Array, Routed, jax.Array]:
        """Attention from its core on, and the router."""

        def stage(x: jax.Array, tokens: Projected, pages: jax.Array):
            x, pages = attend(self.layers, layer, self.step, x, tokens, pages, self.first_cache_layer + layer)
            return x, self.route(layer, x), pages

        return jax.jit(stage)(x, tokens, pages)


Layers = tuple[jax.Array, jax.Array, Any, Tally]
"""Residual streams of the two micro-batches [T, D], pages, the tally of both by layer."""


def _sum(a: Tally, b: Tally) -> Tally:
    return jax.tree.map(jnp.add, a, b)


def hooked_layers(lane: Lane, x: jax.Array, pages: jax.Array) -> tuple[jax.Array, Any, Tally]:
    """Runs the MoE layers of a step that is too small to cut in two: the shared expert hides the combine.

        compute  | attention, router |          | experts | shared  |
        network  |                   | dispatch |         | combine |

    Takes any transport; with `RAGGED` nothing is hidden.
    """
    parallel, numerics = lane.parallel, lane.step.numerics

    def body(carry, layer):
        x, pages = carry
        x, pages = lane.attention(layer, x, pages)
        normed, ids, weights = lane.choose(layer, x)
        flight = parallel.start(normed, ids, weights, lane.moe, layer, numerics)
        shared = lane.shared(layer, normed)
        y, tally = parallel.finish(flight, lane.moe, layer, numerics)
        return (jax.jit(lambda x, y: x + y + shared)(x, y), pages), tally

    layers = jnp.arange(lane.layers.input_norm.shape[0], dtype=jnp.int32)
    (x, pages), tally = jax.lax.scan(in_program_order(body, parallel.transport.overlap), (x, pages), layers)
    return x, pages, tally._replace(rounds=pad_rounds(tally.rounds, len(layers)))


def prefill_layers(lanes: tuple[Lane, Lane], x: tuple[jax.Array, jax.Array], pages: jax.Array) -> Layers:
    """Runs the MoE layers of a prefill step in the published order; micro-batch 1 holds the earlier tokens."""
    zero, one = lanes
    overlap = zero.hop.overlap
    L = zero.layers.input_norm.shape[0]

    def body(carry, layer):
        x0, x1, pages, routed0, computed0 = carry
        previous = jnp.maximum(layer - 1, 0)
        combine0 = zero.start_combine(computed0)
        x1, pages = one.attention(layer, x1, pages)
        routed1 = one.route(layer, x1)
        shared0 = zero.shared(previous, routed0.normed)
        x0, tally0 = zero.finish_combine(previous, x0, routed0, combine0, shared0)
        dispatch1 = one.start_dispatch(routed1)
        x0, pages = zero.attention(layer, x0, pages)
        routed0 = zero.route(layer, x0)
        arrived1 = one.finish_dispatch(dispatch1)
        dispatch0 = zero.start_dispatch(routed0)
        computed1 = one.experts(layer, arrived1)
        arrived0 = zero.finish_dispatch(dispatch0)
        combine1 = one.start_combine(computed1)
        computed0 = zero.experts(layer, arrived0)
        x1, tally1 = one.finish_combine(layer, x1, routed1, combine1, one.shared(layer, routed1.normed))
        return (x0, x1, pages, routed0, computed0), (tally0, tally1)

    def last(x0, routed0, computed0):
        handle = zero.start_combine(computed0)
        return zero.finish_combine(L - 1, x0, routed0, handle, zero.shared(L - 1, routed0.normed))

    ordered = in_program_order(body, overlap)
    carry = (*x, pages, *_nothing(zero, x[0]))
    carry, (tally0, tally1) = jax.lax.scan(ordered, carry, jnp.arange(L, dtype=jnp.int32))
    x0, x1, pages, routed0, computed0 = carry
    x0, final = in_program_order(last, overlap)(x0, routed0, computed0)
    # Micro-batch 0 finishes layer l in pass l + 1; its first pass finished nothing.
    tally0 = jax.tree.map(lambda passes, last: jnp.concatenate([passes[1:], last[None]]), tally0, final)
    return x0, x1, pages, _sum(tally0, tally1)


def _nothing(lane: Lane, x: jax.Array) -> tuple[Routed, Computed]:
    """A micro-batch that has chosen no experts: combining it adds zero, and so does its shared expert."""
    idle = dataclasses.replace(lane, step=dataclasses.replace(lane.step, valid=jnp.zeros_like(lane.step.valid)))
    routed = idle.route(0, jnp.zeros_like(x))
    sums = jnp.zeros((lane.hop.peers * lane.hop.capacity, x.shape[1]), x.dtype)
    return routed, Computed(sums, jnp.zeros(len(lane.parallel.transport.hops), jnp.int32))


def decode_layers(lanes: tuple[Lane, Lane], x: tuple[jax.Array, jax.Array], pages: jax.Array) -> Layers:
    """Runs the MoE layers of a decode step as the five-stage pipeline."""
    zero, one = lanes
    overlap = zero.hop.overlap
    L = zero.layers.input_norm.shape[0]

    def start(x0, pages):
        x0, pages = zero.attention(0, x0, pages)
        return x0, zero.route(0, x0), pages

    def body(carry, layer):
        x0, routed0, x1, pages = carry
        (x0, tally0), (x1, routed1, pages) = _half(zero, layer, x0, routed0, one, layer, x1, pages)
        (x1, tally1), (x0, routed0, pages) = _half(one, layer, x1, routed1, zero, layer + 1, x0, pages)
        return (x0, routed0, x1, pages), _sum(tally0, tally1)

    def last(x0, routed0, x1, pages):
        (x0, tally0), (x1, routed1, pages) = _half(zero, L - 1, x0, routed0, one, L - 1, x1, pages)
        dispatch = one.start_dispatch(routed1)
        shared = one.shared(L - 1, routed1.normed)
        combine = one.start_combine(one.experts(L - 1, one.finish_dispatch(dispatch)))
        x1, tally1 = one.finish_combine(L - 1, x1, routed1, combine, shared)
        return x0, x1, pages, _sum(tally0, tally1)

    x0, routed0, pages = in_program_order(start, overlap)(x[0], pages)
    layers = jnp.arange(L - 1, dtype=jnp.int32)
    (x0, routed0, x1, pages), tally = jax.lax.scan(in_program_order(body, overlap), (x0, routed0, x[1], pages), layers)
    x0, x1, pages, final = in_program_order(last, overlap)(x0, routed0, x1, pages)
    return x0, x1, pages, jax.tree.map(lambda layers, last: jnp.concatenate([layers, last[None]]), tally, final)


def _half(a: Lane, layer_a: Index, x_a, routed_a: Routed, b: Lane, layer_b: Index, x_b, pages):
    """Experts of micro-batch `a` in `layer_a` around attention and router of `b` in `layer_b`."""
    dispatch = a.start_dispatch(routed_a)
    shared = a.shared(layer_a, routed_a.normed)
    tokens = b.project(layer_b, x_b)
    arrived = a.finish_dispatch(dispatch)
    combine = a.start_combine(a.experts(layer_a, arrived))
    after_b = b.attend(layer_b, x_b, tokens, pages)
    return a.finish_combine(layer_a, x_a, routed_a, combine, shared), after_b
