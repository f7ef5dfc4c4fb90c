"""Partial sums on their way back as int8: 128 channels share a float32 scale, 1.03 bytes per channel in place of 2.

The largest of a group's magnitudes becomes 127, and all round to the nearest step. FP8 (e4m3) takes as many bytes, and
its three bits of mantissa make four times the error for values of one size, which the channels of a sum are
(`benchmarks/combine_error.py`). A group that is not finite stays so: its scale is not, so its sums are found out.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sharding.wire.words import WORD_BYTES, from_words, to_words

GROUP = 128
_LARGEST = 127.0


class Packed(NamedTuple):
    """Rows of sums: int8 steps `[T, D]` and the size of a step, float32 `[T, ceil(D / 128)]`."""

    steps: Any
    scale: Any


def packed_bytes(width: int) -> int:
    """Returns the bytes of a packed row of `width` channels, in whole words."""
    return -(-width // WORD_BYTES) * WORD_BYTES + 4 * -(-width // GROUP)


@jax.jit
def pack(sums: jax.Array) -> jax.Array:
    """Returns sums `[T, D]` as words `[T, U]` uint32."""
    groups = _groups(sums.astype(jnp.float32))
    scale = jnp.max(jnp.abs(groups), axis=-1) / _LARGEST
    steps = jnp.round(groups / jnp.where(scale > 0, scale, 1)[..., None])
    steps = jnp.clip(steps, -_LARGEST, _LARGEST).astype(jnp.int8)
    return to_words(Packed(steps.reshape(len(sums), -1)[:, : sums.shape[1]], scale))


@functools.partial(jax.jit, static_argnames="like")
def unpack(words: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the sums `[T, D]` of shape and type `like` that `pack` has made `words` `[T, U]` of."""
    rows, width = like.shape
    shapes = Packed(
        jax.ShapeDtypeStruct((rows, width), jnp.int8), jax.ShapeDtypeStruct((rows, -(-width // GROUP)), jnp.float32)
    )
    packed = from_words(words, shapes)
    sums = _groups(packed.steps.astype(jnp.float32)) * packed.scale[..., None]
    return sums.reshape(rows, -1)[:, :width].astype(like.dtype)


def _groups(x: jax.Array) -> jax.Array:
    """Returns `[T, D]` as `[T, groups, 128]`, padded with zeros."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)))
    return padded.reshape(len(x), -1, GROUP)
