"""Packs trees of arrays, and sums as int8, into rows of 32-bit words: one message holds values of several types.

A tree is not converted: FP8 values, their float32 scales and int32 ids are stored side by side, bit for bit. Rows stay
words until they are aligned for the experts, because XLA does not fuse a gather with a cast between widths: values that
are unpacked earlier are written once more at each hop. Shapes: T rows, U words per row.

Partial sums are packed as int8: 128 channels share a float32 scale, 1.03 bytes per channel instead of 2. The largest
magnitude of a group becomes 127, and values round to the nearest step. FP8 (e4m3) takes as many bytes, but with its
three mantissa bits the error of values of similar size, such as the channels of a sum, is four times larger: one
rounding of normal values is off by 0.65 % in int8 and by 0.17 % in bfloat16. A group with a value that is not finite
gets a scale that is not finite, so the error stays visible.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

WORD_BYTES = 4
GROUP = 128
"""Channels of a sum that share a scale."""

_LARGEST = 127.0
_SHIFTS = tuple(range(0, 32, 8))


def to_words(tree: Any) -> jax.Array:
    """Packs a tree of `[T, ...]` arrays row by row, each array padded with zeros to words: `[T, U]` uint32."""
    return jnp.concatenate([_leaf_to_words(leaf) for leaf in jax.tree.leaves(tree)], axis=1)


def from_words(words: jax.Array, like: Any) -> Any:
    """Returns the tree whose `to_words` begins with `words` `[T, U]`.

    `like` has its dtypes, and its shapes but for T.
    """
    leaves, tree = jax.tree.flatten(like)
    result, first = [], 0
    for leaf in leaves:
        count = _num_words(leaf)
        result.append(_leaf_from_words(words[:, first : first + count], leaf))
        first += count
    return jax.tree.unflatten(tree, result)


def shapes_of(tree: Any) -> Any:
    """Returns the shapes and dtypes of a tree, for `from_words`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def width_of(like: Any) -> int:
    """Returns `U` of a tree's words, from its shapes and dtypes."""
    return sum(map(_num_words, jax.tree.leaves(like)))


def _num_words(leaf: Any) -> int:
    return -(-math.prod(leaf.shape[1:]) * leaf.dtype.itemsize // WORD_BYTES)


def _leaf_to_words(leaf: jax.Array) -> jax.Array:
    per_word = WORD_BYTES // leaf.dtype.itemsize
    flat = leaf.reshape(leaf.shape[0], -1)
    flat = jnp.pad(flat, ((0, 0), (0, _num_words(leaf) * per_word - flat.shape[1])))
    grouped = flat if per_word == 1 else flat.reshape(flat.shape[0], -1, per_word)
    return lax.bitcast_convert_type(grouped, jnp.uint32)


def _leaf_from_words(words: jax.Array, leaf: Any) -> jax.Array:
    values = lax.bitcast_convert_type(words, leaf.dtype).reshape(words.shape[0], -1)
    return values[:, : math.prod(leaf.shape[1:])].reshape(words.shape[0], *leaf.shape[1:])


def packed_bytes(width: int) -> int:
    """Returns the bytes of a packed row of `width` channels, in whole words."""
    return WORD_BYTES * (-(-width // WORD_BYTES) + -(-width // GROUP))


@jax.jit
def pack_sums(sums: jax.Array) -> jax.Array:
    """Returns sums `[T, D]` as words `[T, U]` uint32: four channels per word, the first lowest, and then the scales.

    It shifts instead of casting int8 arrays: XLA fuses shifts, but writes out an array before a cast.
    """
    x = sums.astype(jnp.float32)
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)))
    scale = jnp.max(jnp.abs(padded.reshape(len(x), -1, GROUP)), axis=-1) / _LARGEST
    steps = jnp.round(x / _of_channels(jnp.where(scale > 0, scale, 1), x.shape[1]))
    steps = jnp.clip(steps, -_LARGEST, _LARGEST).astype(jnp.int32) & 0xFF
    fours = jnp.pad(steps, ((0, 0), (0, -x.shape[1] % WORD_BYTES))).reshape(len(x), -1, WORD_BYTES)
    words = functools.reduce(jnp.bitwise_or, (fours[..., i] << shift for i, shift in enumerate(_SHIFTS)))
    return jnp.concatenate([lax.bitcast_convert_type(each, jnp.uint32) for each in (words, scale)], axis=1)


@functools.partial(jax.jit, static_argnames="like")
def unpack_sums(words: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Undoes `pack_sums`: returns the sums `[T, D]` of shape and type `like` from `words` `[T, U]`."""
    rows, width = like.shape
    count = -(-width // WORD_BYTES)
    values = lax.bitcast_convert_type(words[:, :count], jnp.int32)
    steps = (values[..., None] << (24 - jnp.array(_SHIFTS, jnp.int32))) >> 24  # the sign bit is shifted in
    scale = lax.bitcast_convert_type(words[:, count:], jnp.float32)
    sums = steps.reshape(rows, -1)[:, :width].astype(jnp.float32) * _of_channels(scale, width)
    return sums.astype(like.dtype)


def _of_channels(scale: jax.Array, width: int) -> jax.Array:
    """Returns the scale of each channel `[T, width]`, from those of groups `[T, groups]`."""
    return jnp.repeat(scale, GROUP, axis=1)[:, :width]
