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

Over several nodes a dispatch is forwarded inside the node after it has crossed, and a combine is reduced there before
it crosses back. Prefill hides these second hops too, for which its stages are cut: 1 is forwarded under the output
projection of 0 and reduced under the first product of experts 0; 0 is forwarded under the second product of experts 1
and reduced under shared 1. In decode they stand exposed: whatever could hide them hides a crossing, which takes longer
(`benchmarks/overlap_orders.py` plays all orders).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.model.experts import Tally
from dsv3.model.lane import Lane, Routed
from sharding.collectives import in_program_order
from sharding.exchange import Computed
from sharding.transport import pad_rounds

MIN_DECODE_TOKENS = 128
MIN_PREFILL_TOKENS = 1024


def worth_overlapping(tokens: int, ranks: int, is_prefill: bool) -> bool:
    """Whether a step of `tokens` tokens on each rank runs as two micro-batches."""
    return ranks > 1 and tokens >= (MIN_PREFILL_TOKENS if is_prefill else MIN_DECODE_TOKENS)


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
    overlap = zero.hops[0].overlap
    L = zero.layers.input_norm.shape[0]

    def body(carry, layer):
        x0, x1, pages, routed0, computed0 = carry
        previous = jnp.maximum(layer - 1, 0)
        combine0 = zero.start_combine(computed0)
        x1, pages = one.attention(layer, x1, pages)
        routed1 = one.route(layer, x1)
        shared0 = zero.shared(previous, routed0.normed)
        x0, tally0 = zero.finish_combine(previous, x0, routed0, combine0, shared0)
        spread1 = one.dispatch(routed1)
        heads0, pages = zero.core(layer, zero.project(layer, x0), pages)
        spread1 = one.forward(spread1)
        x0, routed0 = zero.output(layer, x0, heads0)
        spread0 = zero.dispatch(routed0)
        halfway1 = one.gate_up(layer, spread1)
        spread0 = zero.forward(spread0)
        back1 = one.start_return(*one.down(layer, halfway1))
        halfway0 = zero.gate_up(layer, spread0)
        combine1 = one.cross_back(layer, back1)
        reduce0 = zero.start_reduce(*zero.down(layer, halfway0))
        shared1 = one.shared(layer, routed1.normed)
        computed0 = zero.finish_reduce(layer, reduce0)
        x1, tally1 = one.finish_combine(layer, x1, routed1, combine1, shared1)
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
    sums = jnp.zeros((lane.hops[0].peers * lane.hops[0].capacity, x.shape[1]), x.dtype)
    return routed, Computed(sums, jnp.zeros(len(lane.hops), jnp.int32), jnp.zeros(1, jnp.int32))


def decode_layers(lanes: tuple[Lane, Lane], x: tuple[jax.Array, jax.Array], pages: jax.Array) -> Layers:
    """Runs the MoE layers of a decode step as the five-stage pipeline."""
    zero, one = lanes
    overlap = zero.hops[0].overlap
    L = zero.layers.input_norm.shape[0]

    def start(x0, pages):
        x0, pages = zero.attention(0, x0, pages)
        return x0, zero.route(0, x0), pages

    def experts_of_zero(layer, routed0, x1, pages):
        spread0 = zero.dispatch(routed0)
        shared0 = zero.shared(layer, routed0.normed)
        tokens1 = one.project(layer, x1)
        combine0 = zero.compute(layer, spread0)
        heads1, pages = one.core(layer, tokens1, pages)
        x1, routed1 = one.output(layer, x1, heads1)
        return combine0, shared0, x1, routed1, pages

    def body(carry, layer):
        x0, routed0, x1, pages = carry
        combine0, shared0, x1, routed1, pages = experts_of_zero(layer, routed0, x1, pages)
        spread1 = one.dispatch(routed1)
        shared1 = one.shared(layer, routed1.normed)
        x0, tally0 = zero.finish_combine(layer, x0, routed0, combine0, shared0)
        tokens0 = zero.project(layer + 1, x0)
        combine1 = one.compute(layer, spread1)
        heads0, pages = zero.core(layer + 1, tokens0, pages)
        x0, routed0 = zero.output(layer + 1, x0, heads0)
        x1, tally1 = one.finish_combine(layer, x1, routed1, combine1, shared1)
        return (x0, routed0, x1, pages), _sum(tally0, tally1)

    def last(x0, routed0, x1, pages):
        combine0, shared0, x1, routed1, pages = experts_of_zero(L - 1, routed0, x1, pages)
        spread1 = one.dispatch(routed1)
        shared1 = one.shared(L - 1, routed1.normed)
        x0, tally0 = zero.finish_combine(L - 1, x0, routed0, combine0, shared0)
        combine1 = one.compute(L - 1, spread1)
        x1, tally1 = one.finish_combine(L - 1, x1, routed1, combine1, shared1)
        return x0, x1, pages, _sum(tally0, tally1)

    x0, routed0, pages = in_program_order(start, overlap)(x[0], pages)
    layers = jnp.arange(L - 1, dtype=jnp.int32)
    (x0, routed0, x1, pages), tally = jax.lax.scan(in_program_order(body, overlap), (x0, routed0, x[1], pages), layers)
    x0, x1, pages, final = in_program_order(last, overlap)(x0, routed0, x1, pages)
    return x0, x1, pages, jax.tree.map(lambda layers, last: jnp.concatenate([layers, last[None]]), tally, final)
