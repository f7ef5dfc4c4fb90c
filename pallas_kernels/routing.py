"""Selects experts on GPUs with one Triton kernel, also on Hopper. XLA compiles the same to four kernels, one of which
sorts."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import power_of_two

SCORES = ("sigmoid", "sqrtsoftplus")
"""The functions from logits to scores that the kernel has."""


def weighted_experts(
    logits: jax.Array,
    bias: jax.Array | None,
    layer: jax.Array | int,
    valid: jax.Array | None = None,
    *,
    first: int = 0,
    topk: int,
    score: str,
    normed: bool,
    factor: float,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """Returns the `topk` experts of each token, best first, int32 `[T, topk]`, and their weights, float32.

    Args:
      logits: [T, E] float32.
      bias: [L, E] float32, added to the scores that rank, not to the weights; None for none.
      layer: static or traced; its bias is row `layer - first`.
      valid: [T] bool, the tokens that get experts; the ids of others are -1. None for all.
      first: the first layer with a bias, so that no kernel subtracts it.
      topk: at most E.
      score: one of `SCORES`.
      normed: whether the weights of a token are divided by their sum.
      factor: on the weights, after that.
      backend: MOSAIC or TRITON.
    """
    (T, E), how = logits.shape, dict[str, Any](TOPK=topk, NORMED=normed, FACTOR=factor, ROOT=score == SCORES[1])
    ids, weights = call.start(
        "routing.choose",
        (
            logits,
            logits if bias is None else bias,
            call.scalar(layer),
            logits if valid is None else valid,
        ),
        [jax.ShapeDtypeStruct((T, topk), jnp.int32), jax.ShapeDtypeStruct((T, topk), jnp.float32)],
        grid=(T,),
        backend=backend,
        warps=2,
        EXPERTS=E,
        BIASED=bias is not None,
        MASKED=valid is not None,
        FIRST=first,
        BLOCK=power_of_two(E),
        BLOCK_K=power_of_two(topk),
        **how,
    )
    return ids, weights
