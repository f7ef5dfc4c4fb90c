"""The plain schedule: one batch, layer by layer, in the order that XLA finds."""

from typing import Any

import jax

from dsv3.model.decoder import LayerContext, Stack, run_layers
from dsv3.model.layers.experts import Tally


def run(
    stack: Stack, contexts: tuple[LayerContext, ...], x: tuple[jax.Array, ...], state: Any
) -> tuple[tuple[jax.Array, ...], Any, Tally]:
    """Runs `decoder.MoeLayers` of one batch."""
    (context,), (stream,) = contexts, x
    stream, state, tally = run_layers(stack, context, stream, state)
    assert tally is not None  # MoE layers count their experts
    return (stream,), state, tally
