"""The orders in which a step's MoE layers can run.

`PLAIN` is one batch, layer by layer, in the order that XLA finds. `OVERLAPPED` cuts the batch in two micro-batches,
each of which computes while the other communicates. `HOOKED` is a step too small to cut in two, whose shared expert
hides the combine:

    compute  | attention, router |          | experts | shared  |
    network  |                   | dispatch |         | combine |

It takes any transport; with `RAGGED` nothing is hidden.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.model.decoder import LayerContext, MoeLayers, Residual, Stack, run_layers
from dsv3.model.layers.expert_parallel import with_overflows
from dsv3.model.layers.experts import RouterStats
from dsv3.model.schedules import overlapped
from dsv3.model.schedules.stages import MicroBatch
from sharding.wire.collectives import in_program_order


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An order of a step's MoE layers: into how many micro-batches the batch is cut, and what runs in each phase."""

    name: str
    micro_batches: int
    prefill: MoeLayers
    decode: MoeLayers


def _run_plain(
    stack: Stack, contexts: tuple[LayerContext, ...], x: tuple[Residual, ...], state: Any
) -> tuple[tuple[Residual, ...], Any, RouterStats]:
    """Runs `decoder.MoeLayers` of one batch."""
    (context,), (residual,) = contexts, x
    residual, state, router_stats = run_layers(stack, context, residual, state)
    assert router_stats is not None  # MoE layers count their experts
    return (residual,), state, router_stats


def _run_hooked(
    stack: Stack, contexts: tuple[LayerContext, ...], x: tuple[Residual, ...], pages: jax.Array
) -> tuple[tuple[Residual, ...], jax.Array, RouterStats]:
    """Runs `decoder.MoeLayers` of one batch over `ExpertParallel` experts."""
    (context,), (residual,) = contexts, x
    batch = MicroBatch(stack, context)
    parallel = batch.parallel

    def body(carry, layer):
        x, pages = carry
        experts = stack.experts(layer, context.numerics)
        x, pages = batch.attention(layer, x, pages)
        normed, routing = batch.choose(layer, x)
        handle = parallel.start(normed, routing, experts)
        shared = batch.shared(layer, normed)
        y, router_stats = parallel.finish(handle, routing, experts)
        return (batch.add(layer, x, y, shared), pages), router_stats

    layers = jnp.arange(stack.depth, dtype=jnp.int32)
    ordered = in_program_order(body, parallel.transport.overlap)
    (residual, pages), router_stats = jax.lax.scan(ordered, (residual, pages), layers)
    return (residual,), pages, with_overflows(router_stats, len(layers))


PLAIN = Schedule("plain", 1, _run_plain, _run_plain)
HOOKED = Schedule("hooked", 1, _run_hooked, _run_hooked)
OVERLAPPED = Schedule("overlapped", 2, overlapped.run_prefill, overlapped.run_decode)
