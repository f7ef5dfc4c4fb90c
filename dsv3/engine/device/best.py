"""The most likely word of each row where devices share the words: each names its best, in one message."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.engine.device import sampling
from dsv3.model.vocabulary import Vocabulary


class Best(NamedTuple):
    """The most likely word of each row: int32 `[...]`, and its score, float32 `[...]`."""

    words: jax.Array
    scores: jax.Array


def best_words(vocabulary: Vocabulary, scores: jax.Array) -> Best:
    """Returns the best words of this rank's rows, from scores `[Xn, ..., W / Xn]` (`Vocabulary.scores`).

    The first of equals, as `sampling.greedy` has it. In a row with a NaN the word is any, and the score NaN.
    """
    width = scores.shape[-1]
    here = sampling.greedy(scores) + vocabulary.first_word(width)
    top = lax.bitcast_convert_type(jnp.max(scores, axis=-1), jnp.int32)
    words, bits = jnp.moveaxis(vocabulary.exchange(jnp.stack([here, top], axis=-1)), -1, 0)
    tops = lax.bitcast_convert_type(bits, jnp.float32)
    most = jnp.max(tops, axis=0)
    last = width * vocabulary.ranks - 1
    return Best(jnp.min(jnp.where(tops == most, words, last), axis=0), most)
