"""The plain schedule: one batch, layer by layer, in the order that XLA finds."""

from typing import Any

from dsv3.model.decoder import LayerContext, Residual, Stack, run_layers
from dsv3.model.layers.experts import Tally


def run(
    stack: Stack, contexts: tuple[LayerContext, ...], x: tuple[Residual, ...], state: Any
) -> tuple[tuple[Residual, ...], Any, Tally]:
    """Runs `decoder.MoeLayers` of one batch."""
    (context,), (stream,) = contexts, x
    stream, state, tally = run_layers(stack, context, stream, state)
    assert tally is not None  # MoE layers count their experts
    return (stream,), state, tally
