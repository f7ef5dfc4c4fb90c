"""The orders in which a step's MoE layers can run.

`PLAIN` runs one batch layer by layer, in the order that XLA chooses. `OVERLAPPED` splits the batch into two
micro-batches, each of which computes while the other communicates (two-batch overlap). `HOOKED` is for steps too small
to split: the shared expert hides the combine:

    compute  | attention, router |          | experts | shared  |
    network  |                   | dispatch |         | combine |

It takes any transport; with `RAGGED` nothing is hidden.
"""

import dataclasses
from typing import Any

from dsv3.model.decoder import LayerContext, MoeLayers, Stack, run_layers, scan_layers
from dsv3.model.layers.expert_parallel import with_overflows
from dsv3.model.layers.experts import RouterStats
from dsv3.model.layers.hyper_connections import Residual
from dsv3.model.schedules import overlapped
from dsv3.model.schedules.stages import MicroBatch
from sharding.collectives import in_program_order


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An order of a step's MoE layers: the number of micro-batches, and the function for each phase."""

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
    stack: Stack, contexts: tuple[LayerContext, ...], x: tuple[Residual, ...], pages: Any
) -> tuple[tuple[Residual, ...], Any, RouterStats]:
    """Runs `decoder.MoeLayers` of one batch over `ExpertParallel` experts."""
    (context,), (residual,) = contexts, x
    batch = MicroBatch(stack, context)
    parallel = batch.parallel

    def body(carry, places):
        (place,), (x, pages) = places, carry
        experts = batch.layer(place).experts
        block, pages = batch.attention(place, x, pages)
        normed, routing = batch.choose(place, block)
        handle = parallel.start(normed, routing, experts)
        shared = batch.shared(place, normed)
        y, router_stats = parallel.finish(handle, routing, experts)
        router_stats = context.with_ids(router_stats, routing.ids)
        return (batch.add(place, block, y, shared), pages), router_stats

    def ordered(turn):
        return in_program_order(turn, parallel.transport.overlap)

    (residual, pages), router_stats = scan_layers(stack, context.cfg, body, (residual, pages), ordered)
    return (residual,), pages, with_overflows(router_stats, stack.depth)


PLAIN = Schedule("plain", 1, _run_plain, _run_plain)
HOOKED = Schedule("hooked", 1, _run_hooked, _run_hooked)
OVERLAPPED = Schedule("overlapped", 2, overlapped.run_prefill, overlapped.run_decode)
