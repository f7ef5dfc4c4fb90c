"""The hooked schedule: a step too small to cut in two, whose shared expert hides the combine.

    compute  | attention, router |          | experts | shared  |
    network  |                   | dispatch |         | combine |

Takes any transport; with `RAGGED` nothing is hidden.
"""

import jax
import jax.numpy as jnp

from dsv3.model.decoder import LayerContext, Residual, Stack
from dsv3.model.layers.expert_parallel import with_overflows
from dsv3.model.layers.experts import Tally
from dsv3.model.schedules.stages import MicroBatch
from sharding.wire.collectives import in_program_order


def run(
    stack: Stack, contexts: tuple[LayerContext, ...], x: tuple[Residual, ...], pages: jax.Array
) -> tuple[tuple[Residual, ...], jax.Array, Tally]:
    """Runs `decoder.MoeLayers` of one batch over `ExpertParallel` experts."""
    (context,), (stream,) = contexts, x
    batch = MicroBatch(stack, context)
    parallel = batch.parallel

    def body(carry, layer):
        x, pages = carry
        experts = stack.experts(layer, context.numerics)
        x, pages = batch.attention(layer, x, pages)
        normed, routing = batch.choose(layer, x)
        handle = parallel.start(normed, routing, experts)
        shared = batch.shared(layer, normed)
        y, tally = parallel.finish(handle, routing, experts)
        return (batch.add(layer, x, y, shared), pages), tally

    layers = jnp.arange(stack.depth, dtype=jnp.int32)
    ordered = in_program_order(body, parallel.transport.overlap)
    (stream, pages), tally = jax.lax.scan(ordered, (stream, pages), layers)
    return (stream,), pages, with_overflows(tally, len(layers))
