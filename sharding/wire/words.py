"""Packs trees of arrays into rows of 32-bit words, so that values of several types are sent as one message.

Nothing is converted: FP8 values, their float32 scales and int32 ids are stored side by side, bit for bit. Rows stay
words until they are aligned for the experts, because XLA does not fuse a gather with a cast between widths: values that
are unpacked earlier are written once more at each hop. Shapes: T rows, U words per row.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

WORD_BYTES = 4


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
