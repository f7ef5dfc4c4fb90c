"""Compressed entries of a cache (DeepSeek-V4): one vector in place of the tokens of a window.

Every token gives values and scores. An entry is the sum of its window's values, weighted channel by channel with a
softmax of the scores over the window. Where entries overlap, tokens give two series: the first goes to the entry of the
next window, the second to that of their own. What a token gives are C values and as many scores side by side; C is d,
or 2 * d where entries overlap.
"""

import jax
import jax.numpy as jnp

from dsv3.model.layers.linear import Index, layer_slice
from dsv3.model.layers.rope import Rotation, rotate
from dsv3.model.layers.router import router_logits
from dsv3.model.params import CompressorParams
from pallas_kernels.backend import Backend
from pallas_kernels.rows import rms_norm


@jax.named_scope("compressor")
def given(x: jax.Array, params: CompressorParams, layer: Index, backend: Backend | None) -> jax.Array:
    """Returns values and scores float32 `[T, 2 * C]` of tokens `x` `[T, D]`, without what their places add to scores.

    `layer` counts the compressors of the stack.
    """
    return router_logits(x, params.value_score, layer, backend)


@jax.named_scope("compressor")
def contributions(given: jax.Array, params: CompressorParams, layer: Index, positions: jax.Array) -> jax.Array:
    """Returns what tokens at `positions` `[T]` give, `[T, 2 * C]`, from the result of `given`.

    A cache keeps it of the tokens of windows that are not complete, and of those that the next entry needs.
    """
    values, scores = jnp.split(given, 2, axis=-1)
    place = layer_slice(params.position, layer)
    return jnp.concatenate([values, scores + place[positions % len(place)]], axis=-1)


def window_rows(ratio: int, entries: jax.Array, *, overlaps: bool) -> jax.Array:
    """Returns the positions `[..., S]` of the tokens that make `entries` `[...]`; negative ones do not exist.

    S is `ratio`, or twice that where entries overlap.
    """
    return entries[..., None] * ratio + jnp.arange(-ratio if overlaps else 0, ratio, dtype=jnp.int32)


@jax.named_scope("compressor")
def pool_window(rows: jax.Array, exists: jax.Array, width: int) -> jax.Array:
    """Returns entries float32 `[..., d]`, before their norm.

    Args:
      rows: what the tokens of each entry's windows give, `[..., S, 2 * C]` in the order of `window_rows`.
      exists: bool `[..., S]`, which of them there are: the first window has none before it.
      width: d. Where C is twice that, the first half of the rows give their first series.
    """
    values, scores = jnp.split(rows, 2, axis=-1)
    if values.shape[-1] > width:
        earlier = jnp.arange(values.shape[-2])[:, None] < values.shape[-2] // 2  # a choice, since XLA fuses no joining
        values, scores = (jnp.where(earlier, a[..., :width], a[..., width:]) for a in (values, scores))
    weights = jax.nn.softmax(jnp.where(exists[..., None], scores, -jnp.inf), axis=-2)
    return (weights * jnp.where(exists[..., None], values, 0)).sum(-2)


@jax.named_scope("compressor")
def norm_and_rotate(
    entries: jax.Array,
    params: CompressorParams,
    layer: Index,
    rotation: Rotation,
    eps: float,
    dtype: jnp.dtype,
    backend: Backend | None = None,
) -> jax.Array:
    """Returns entries `[T, d]` as they are attended to: normed, and rotated as their window's first token is."""
    normed = rms_norm(entries.astype(dtype), params.norm, layer, eps, backend=backend)
    plain = normed.shape[-1] - 2 * rotation.cos.shape[-1]
    return jnp.concatenate([normed[..., :plain], rotate(normed[..., plain:], rotation)], axis=-1)
