"""Trees of arrays as lines of 32-bit words, so that rows of several types cross a network in one piece.

Nothing is converted: FP8 values, their float32 scales and int32 ids lie side by side, bit for bit. Letters: N lines,
W words of a line.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

WORD_BYTES = 4


def to_words(tree: Any) -> jax.Array:
    """The bytes of a tree of `[N, ...]` arrays, line by line, each array filled up with zeros: `[N, W]` uint32."""
    return jnp.concatenate([_leaf_to_words(leaf) for leaf in jax.tree.leaves(tree)], axis=1)


def from_words(words: jax.Array, like: Any) -> Any:
    """The tree whose `to_words` begins with `words`, in the shapes but for N, and the dtypes, of `like`."""
    leaves, tree = jax.tree.flatten(like)
    result, at = [], 0
    for leaf in leaves:
        count = _num_words(leaf)
        result.append(_leaf_from_words(words[:, at : at + count], leaf))
        at += count
    return jax.tree.unflatten(tree, result)


def shapes_of(tree: Any) -> Any:
    """What `from_words` must know of a tree: its shapes and dtypes, without the arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


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
