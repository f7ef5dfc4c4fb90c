"""The overlapped schedule: two micro-batches, each of which computes while the other communicates.

The orders are those of DeepSeek's profile data and day-6 overview. A step's batch is cut in two. With program order
enforced (`sharding.wire.collectives`) the compiled schedule is the written one: between the start and the finish of a
collective stands work of the other micro-batch. Below some tokens per device the two small halves cost more than the
overlap gains (SGLang measured -27 % at 32 tokens per device, even at 64 to 128). `worth_overlapping` decides by the
size of the batch, and smaller steps take the hooked schedule.

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
and reduced under shared 1. In decode the second hop is not hidden: the only work that could hide it is already used to
hide the slower transfer between nodes (`benchmarks/overlap_orders.py` plays all orders).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.model.decoder import LayerContext, Residual, Stack
from dsv3.model.layers.experts import RouterStats
from dsv3.model.schedules.stages import MicroBatch, Routed
from sharding.experts.exchange import PeerSums
from sharding.wire.collectives import in_program_order

MIN_DECODE_TOKENS = 128
MIN_PREFILL_TOKENS = 1024

Streams = tuple[Residual, ...]
"""Residuals of the two micro-batches."""


def worth_overlapping(tokens: int, devices: int, is_prefill: bool) -> bool:
    """Returns whether a step in which each of `devices` sends `tokens` token rows runs as two micro-batches."""
    return devices > 1 and tokens >= (MIN_PREFILL_TOKENS if is_prefill else MIN_DECODE_TOKENS)


def run_prefill(
    stack: Stack, contexts: tuple[LayerContext, ...], x: Streams, pages: jax.Array
) -> tuple[Streams, jax.Array, RouterStats]:
    """Runs `decoder.MoeLayers` of a prefill step, in the published order; micro-batch 1 holds the earlier tokens."""
    zero, one = _micro_batches(stack, contexts)
    overlap, L = zero.hops[0].overlap, stack.depth

    def body(carry, layer):
        x0, x1, pages, routed0, computed0 = carry
        previous = jnp.maximum(layer - 1, 0)
        combine0 = zero.start_combine(computed0)
        x1, pages = one.attention(layer, x1, pages)
        routed1 = one.route(layer, x1)
        shared0 = zero.shared(previous, routed0.normed)
        x0, tally0 = zero.finish_combine(previous, x0, routed0, combine0, shared0)
        sent1 = one.dispatch(routed1)
        heads0, pages = zero.core(layer, zero.project(layer, x0), pages)
        sent1 = one.forward(sent1)
        x0, routed0 = zero.output(layer, x0, heads0)
        sent0 = zero.dispatch(routed0)
        halfway1 = one.gate_up(layer, sent1)
        sent0 = zero.forward(sent0)
        back1 = one.start_return(*one.down(layer, halfway1))
        halfway0 = zero.gate_up(layer, sent0)
        combine1 = one.cross_back(back1)
        reduce0 = zero.start_reduce(*zero.down(layer, halfway0))
        shared1 = one.shared(layer, routed1.normed)
        computed0 = zero.finish_reduce(reduce0)
        x1, tally1 = one.finish_combine(layer, x1, routed1, combine1, shared1)
        return (x0, x1, pages, routed0, computed0), (tally0, tally1)

    def last(x0, routed0, computed0):
        handle = zero.start_combine(computed0)
        return zero.finish_combine(L - 1, x0, routed0, handle, zero.shared(L - 1, routed0.normed))

    ordered = in_program_order(body, overlap)
    carry: tuple[Any, ...] = (*x, pages, *_nothing(zero, x[0]))
    carry, (tally0, tally1) = jax.lax.scan(ordered, carry, jnp.arange(L, dtype=jnp.int32))
    x0, x1, pages, routed0, computed0 = carry
    x0, final = in_program_order(last, overlap)(x0, routed0, computed0)
    # Micro-batch 0 finishes layer l in pass l + 1; its first pass finished nothing.
    tally0 = jax.tree.map(lambda passes, last: jnp.concatenate([passes[1:], last[None]]), tally0, final)
    return (x0, x1), pages, _sum(tally0, tally1)


def run_decode(
    stack: Stack, contexts: tuple[LayerContext, ...], x: Streams, pages: jax.Array
) -> tuple[Streams, jax.Array, RouterStats]:
    """Runs `decoder.MoeLayers` of a decode step, as the five-stage pipeline."""
    zero, one = _micro_batches(stack, contexts)
    overlap, L = zero.hops[0].overlap, stack.depth

    def start(x0, pages):
        x0, pages = zero.attention(0, x0, pages)
        return x0, zero.route(0, x0), pages

    def experts_of_zero(layer, routed0, x1, pages):
        sent0 = zero.dispatch(routed0)
        shared0 = zero.shared(layer, routed0.normed)
        tokens1 = one.project(layer, x1)
        combine0 = zero.compute(layer, sent0)
        heads1, pages = one.core(layer, tokens1, pages)
        x1, routed1 = one.output(layer, x1, heads1)
        return combine0, shared0, x1, routed1, pages

    def body(carry, layer):
        x0, routed0, x1, pages = carry
        combine0, shared0, x1, routed1, pages = experts_of_zero(layer, routed0, x1, pages)
        sent1 = one.dispatch(routed1)
        shared1 = one.shared(layer, routed1.normed)
        x0, tally0 = zero.finish_combine(layer, x0, routed0, combine0, shared0)
        tokens0 = zero.project(layer + 1, x0)
        combine1 = one.compute(layer, sent1)
        heads0, pages = zero.core(layer + 1, tokens0, pages)
        x0, routed0 = zero.output(layer + 1, x0, heads0)
        x1, tally1 = one.finish_combine(layer, x1, routed1, combine1, shared1)
        return (x0, routed0, x1, pages), _sum(tally0, tally1)

    def last(x0, routed0, x1, pages):
        combine0, shared0, x1, routed1, pages = experts_of_zero(L - 1, routed0, x1, pages)
        sent1 = one.dispatch(routed1)
        shared1 = one.shared(L - 1, routed1.normed)
        x0, tally0 = zero.finish_combine(L - 1, x0, routed0, combine0, shared0)
        combine1 = one.compute(L - 1, sent1)
        x1, tally1 = one.finish_combine(L - 1, x1, routed1, combine1, shared1)
        return x0, x1, pages, _sum(tally0, tally1)

    x0, routed0, pages = in_program_order(start, overlap)(x[0], pages)
    layers = jnp.arange(L - 1, dtype=jnp.int32)
    (x0, routed0, x1, pages), router_stats = jax.lax.scan(
        in_program_order(body, overlap), (x0, routed0, x[1], pages), layers
    )
    x0, x1, pages, final = in_program_order(last, overlap)(x0, routed0, x1, pages)
    return (
        (x0, x1),
        pages,
        jax.tree.map(lambda layers, last: jnp.concatenate([layers, last[None]]), router_stats, final),
    )


def _micro_batches(stack: Stack, contexts: tuple[LayerContext, ...]) -> tuple[MicroBatch, MicroBatch]:
    """Returns the two micro-batches of a step.

    Raises ValueError for a transport without hops, which cannot be taken apart.
    """
    first, second = contexts
    zero, one = MicroBatch(stack, first, 0), MicroBatch(stack, second, 1)
    if not zero.hops:
        raise ValueError(f"the {zero.parallel.transport.kind.value} transport has no hops that could be overlapped")
    return zero, one


def _nothing(batch: MicroBatch, x: Residual) -> tuple[Routed, PeerSums]:
    """Returns a micro-batch that has chosen no experts: combining it adds zero, and so does its shared expert."""
    context = dataclasses.replace(batch.context, valid=jnp.zeros_like(batch.context.valid))
    routed = dataclasses.replace(batch, context=context).route(0, jax.tree.map(jnp.zeros_like, x))
    hop = batch.hops[0]
    sums = jnp.zeros((hop.peers * hop.capacity, routed.normed.shape[1]), routed.normed.dtype)
    behind = len(batch.hops) - 1 + (batch.parallel.transport.pairs is not None)
    return routed, PeerSums(sums, (jnp.zeros((), jnp.int32),) * behind)


def _sum(a: RouterStats, b: RouterStats) -> RouterStats:
    return jax.tree.map(jnp.add, a, b)
