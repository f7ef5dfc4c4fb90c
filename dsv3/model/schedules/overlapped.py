"""The overlapped schedule: two micro-batches, each of which computes while the other communicates.

The orders are those of DeepSeek's profile data and day-6 overview. With program order enforced
(`sharding.collectives`) the compiled schedule is the written one: work of the other micro-batch runs between the
start and the finish of a collective. Below some tokens per device the two halves cost more than the overlap saves
(SGLang measured -27 % at 32 tokens per device, break-even at 64 to 128), and where few devices hold many experts each,
a second micro-batch reads more weights again than its transfers take. `worth_overlapping` decides; other steps use the
hooked schedule.

Prefill, one MoE layer, micro-batches 0 and 1 (1 holds the earlier tokens, so a prompt may be split):

    compute  | attention 1, shared 0 | attention 0 | experts 1  | experts 0, shared 1 |
    network  | combine 0 (layer - 1) | dispatch 1  | dispatch 0 | combine 1           |

Decode, one half of a layer (the other half swaps 0 and 1); stages "attention 0" and "attention 1" of the paper are
`project` and the attention core:

    compute  | shared 0, project 1 | experts 0 | core and router 1 |
    network  | dispatch 0          |           | combine 0         |

Over several nodes a dispatch is forwarded inside the node after it has crossed, and a combine is reduced there before
it crosses back. Prefill hides these second hops too: 1 is forwarded under the output projection of 0 and reduced under
the first product of experts 0; 0 is forwarded under the second product of experts 1 and reduced under shared 1. Decode
does not hide the second hop: the only work that could is already used to hide the slower transfer between nodes. Of all
24,576 orders of a decode layer's stages the best gained an estimated 1.1 % over this one.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.config.device_rates import LAUNCH_S
from dsv3.model.decoder import LayerContext, Stack, ends, scan_layers
from dsv3.model.layers.experts import RouterStats
from dsv3.model.layers.hyper_connections import Block, Residual
from dsv3.model.schedules.stages import MicroBatch, Routed
from sharding.collectives import in_program_order
from sharding.experts.exchange import PeerSums

PREVIOUS, NEXT = (-1, 0), (0, 1)
"""The layers of a pass: prefill finishes the previous one, decode begins the next one."""

MIN_DECODE_TOKENS = 128
MIN_PREFILL_TOKENS = 1024
_LAUNCHES = 60
"""Kernels of a micro-batch in a layer, as in the compiled decode step of DeepSeek-V4 (`benchmarks.launches`)."""

Residuals = tuple[Residual, ...]
"""Those of the two micro-batches."""


def worth_overlapping(
    tokens: int, devices: int, is_prefill: bool, weights_s: float, products_s: float, transfers_s: float
) -> bool:
    """Returns whether a step with `tokens` token rows per device is split into two micro-batches.

    In a layer the second one reads the device's weights again, in `weights_s`, unless its half of the `products_s`
    takes longer than that, and launches its own kernels. That has to take less time than the `transfers_s` of both,
    which then hide.
    """
    if devices == 1 or tokens < (MIN_PREFILL_TOKENS if is_prefill else MIN_DECODE_TOKENS):
        return False
    longer_s = 2 * max(weights_s, products_s / 2) - max(weights_s, products_s)
    return longer_s + _LAUNCHES * LAUNCH_S < transfers_s


def run_prefill(
    stack: Stack, contexts: tuple[LayerContext, ...], x: Residuals, pages: jax.Array
) -> tuple[Residuals, jax.Array, RouterStats]:
    """Runs `decoder.MoeLayers` of a prefill step, in the published order; micro-batch 1 holds the earlier tokens."""
    zero, one = _micro_batches(stack, contexts)
    ordered = functools.partial(in_program_order, overlap=zero.hops[0].overlap)
    first, end = ends(stack, zero.context.cfg)

    def body(carry, places):
        x0, x1, pages, routed0, computed0 = carry
        previous, here = places
        combine0 = zero.start_combine(computed0, routed0)
        x1, pages = one.attention(here, x1, pages)
        routed1 = one.route(here, x1)
        shared0 = zero.shared(previous, routed0.normed)
        x0, stats0 = zero.finish_combine(previous, x0, routed0, combine0, shared0)
        sent1 = one.dispatch(routed1)
        x0, tokens0 = zero.project(here, x0)
        heads0, pages = zero.core(here, tokens0, pages)
        sent1 = one.forward(sent1)
        x0, routed0 = zero.output(here, x0, heads0)
        sent0 = zero.dispatch(routed0)
        halfway1 = one.gate_up(here, sent1)
        sent0 = zero.forward(sent0)
        back1 = one.start_return(*one.down(here, *halfway1))
        halfway0 = zero.gate_up(here, sent0)
        combine1 = one.cross_back(back1, routed1)
        reduce0 = zero.start_reduce(*zero.down(here, *halfway0))
        shared1 = one.shared(here, routed1.normed)
        computed0 = zero.finish_reduce(reduce0)
        x1, stats1 = one.finish_combine(here, x1, routed1, combine1, shared1)
        return (x0, x1, pages, routed0, computed0), (stats0, stats1)

    def last(x0, routed0, computed0):
        handle = zero.start_combine(computed0, routed0)
        return zero.finish_combine(end, x0, routed0, handle, zero.shared(end, routed0.normed))

    idle = zero.layer(first).at_experts(x[0]).idle()
    carry: Any = idle, x[1], pages, *_nothing(zero, idle)
    carry, (stats0, stats1) = scan_layers(stack, zero.context.cfg, body, carry, ordered, PREVIOUS)
    x0, x1, pages, routed0, computed0 = carry
    x0, final = ordered(last)(x0, routed0, computed0)
    # Micro-batch 0 finishes layer l in pass l + 1; its first pass finishes an empty layer.
    stats0 = jax.tree.map(lambda passes, last: jnp.concatenate([passes[1:], last[None]]), stats0, final)
    return (x0, x1), pages, _sum(stats1, stats0)


def run_decode(
    stack: Stack, contexts: tuple[LayerContext, ...], x: Residuals, pages: jax.Array
) -> tuple[Residuals, jax.Array, RouterStats]:
    """Runs `decoder.MoeLayers` of a decode step, as the five-stage pipeline."""
    zero, one = _micro_batches(stack, contexts)
    ordered = functools.partial(in_program_order, overlap=zero.hops[0].overlap)
    first, end = ends(stack, zero.context.cfg)

    def start(x0, pages):
        x0, pages = zero.attention(first, x0, pages)
        return x0, zero.route(first, x0), pages

    def experts_of_zero(place, routed0, x1, pages):
        sent0 = zero.dispatch(routed0)
        shared0 = zero.shared(place, routed0.normed)
        x1, tokens1 = one.project(place, x1)
        combine0 = zero.compute(place, sent0, routed0)
        heads1, pages = one.core(place, tokens1, pages)
        x1, routed1 = one.output(place, x1, heads1)
        return combine0, shared0, x1, routed1, pages

    def body(carry, places):
        x0, routed0, x1, pages = carry
        here, following = places
        combine0, shared0, x1, routed1, pages = experts_of_zero(here, routed0, x1, pages)
        sent1 = one.dispatch(routed1)
        shared1 = one.shared(here, routed1.normed)
        x0, stats0 = zero.finish_combine(here, x0, routed0, combine0, shared0)
        x0, tokens0 = zero.project(following, x0)
        combine1 = one.compute(here, sent1, routed1)
        heads0, pages = zero.core(following, tokens0, pages)
        x0, routed0 = zero.output(following, x0, heads0)
        x1, stats1 = one.finish_combine(here, x1, routed1, combine1, shared1)
        return (x0, routed0, x1, pages), _sum(stats0, stats1)

    def last(x0, routed0, x1, pages):
        combine0, shared0, x1, routed1, pages = experts_of_zero(end, routed0, x1, pages)
        sent1 = one.dispatch(routed1)
        shared1 = one.shared(end, routed1.normed)
        x0, stats0 = zero.finish_combine(end, x0, routed0, combine0, shared0)
        combine1 = one.compute(end, sent1, routed1)
        x1, stats1 = one.finish_combine(end, x1, routed1, combine1, shared1)
        return x0, x1, pages, _sum(stats0, stats1)

    x0, routed0, pages = ordered(start)(x[0], pages)
    carry, router_stats = scan_layers(stack, zero.context.cfg, body, (x0, routed0, x[1], pages), ordered, NEXT)
    x0, x1, pages, final = ordered(last)(*carry)
    final = jax.tree.map(lambda last: last[None], final)
    if router_stats is not None:
        final = jax.tree.map(lambda layers, last: jnp.concatenate([layers, last]), router_stats, final)
    return (x0, x1), pages, final


def _micro_batches(stack: Stack, contexts: tuple[LayerContext, ...]) -> tuple[MicroBatch, MicroBatch]:
    """Returns the two micro-batches of a step.

    Raises ValueError for a transport without hops, which cannot be overlapped.
    """
    first, second = contexts
    zero, one = MicroBatch(stack, first, 0), MicroBatch(stack, second, 1)
    if not zero.hops:
        raise ValueError(
            f"the {zero.parallel.transport.kind.value} transport cannot be overlapped; use all_to_all or hierarchical"
        )
    return zero, one


def _nothing(batch: MicroBatch, x: Block) -> tuple[Routed, PeerSums]:
    """Returns a micro-batch of padding rows, whose combine and shared expert add zero."""
    context = dataclasses.replace(batch.context, valid=jnp.zeros_like(batch.context.valid))
    first, _ = ends(batch.stack, context.cfg)
    routed = dataclasses.replace(batch, context=context).route(first, jax.tree.map(jnp.zeros_like, x))
    hop = batch.hops[0]
    sums = jnp.zeros((hop.lines, routed.normed.shape[1]), routed.normed.dtype)
    reports = (batch.parallel.transport.pairs is not None) + batch.hops[-1].reports_on_arrival
    shapes = [*((later.peers,) for later in batch.hops[1:]), *((),) * reports]
    none = tuple(jnp.zeros(shape, jnp.int32) for shape in shapes)
    return routed, PeerSums(sums, none, hop.no_origins(routed.queued))


def _sum(first: RouterStats, second: RouterStats) -> RouterStats:
    """Returns the statistics of both micro-batches; `first` has the earlier rows."""
    ids = None if first.ids is None or second.ids is None else jnp.concatenate([first.ids, second.ids], axis=-2)
    counted = jax.tree.map(jnp.add, first._replace(ids=None), second._replace(ids=None))
    return counted._replace(ids=ids)
