"""Token rows, the unit of dispatch, and local work on them before and after a transfer.

A token row carries the ids of expert replicas, relative to the range of the current peers: peer j of a hop owns the ids
from `j * replicas_per_peer` on. An id of -1 selects no expert. Shapes: T rows, K replicas per row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.words import from_words, to_words, width_of

_ONES = 0xFFFFFFFF


class TokenRows(NamedTuple):
    """Token rows; `payload` is any tree of `[T, ...]` arrays (activations, FP8 values and their scales), or `Lines`."""

    payload: Any
    ids: jax.Array  # [T, K] int32, replica ids; -1 selects nothing, the others of a row are distinct
    weights: jax.Array  # [T, K] float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lines:
    """The packed payload of received rows: lines of words that begin with it.

    A second hop forwards the words without unpacking: XLA would write out each conversion to another width.
    """

    words: jax.Array  # [T, U] uint32
    leaves: tuple[jax.ShapeDtypeStruct, ...] = dataclasses.field(metadata={"static": True})
    tree: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_words(cls, words: jax.Array, like: Any) -> "Lines":
        """Returns the payload of shapes and dtypes `like` at the beginning of the lines `words`."""
        leaves, tree = jax.tree.flatten(like)
        return cls(words, tuple(leaves), tree)

    @property
    def like(self) -> Any:
        """Shapes and dtypes of the payload."""
        return jax.tree.unflatten(self.tree, self.leaves)

    def array(self, number: int) -> jax.Array:
        """Returns an array of the payload, `[T, ...]`."""
        first = width_of(self.leaves[:number])
        return from_words(self.words[:, first:], self.leaves[number])

    def gather(self, row: jax.Array) -> jax.Array:
        """Returns rows `row` `[A]` of the payload's first array, `[A, ...]`; any for those out of range.

        It gathers words and then converts: in the other order XLA would write out all rows first.
        """
        numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
        sizes = 1, width_of(self.leaves[:1])
        words = lax.gather(self.words, row[:, None], numbers, sizes, mode="clip")
        return from_words(words, self.leaves[0])


def unpacked(rows: TokenRows) -> TokenRows:
    """Returns rows with an unpacked payload instead of `Lines`."""
    if not isinstance(rows.payload, Lines):
        return rows
    return rows._replace(payload=from_words(rows.payload.words, rows.payload.like))


Experts = Callable[[TokenRows], tuple[jax.Array, jax.Array | None]]
"""Computes per row the weighted sum of its selected local experts, `[T, D]`; zeros for a row that selects none.

The payload may be `Lines`. Also returns the overflow, [] int32: 1 if the pairs exceeded the capacity, else 0; None if
they cannot.
"""


@functools.partial(jax.jit, static_argnames=("axes", "replicas_per_peer"))
def localize(rows: TokenRows, axes: tuple[str, ...], replicas_per_peer: int) -> TokenRows:
    """Keeps the replicas of this peer along `axes`, relative to its range: `[T, min(K, replicas_per_peer)]`, then -1.

    A row selects at most `replicas_per_peer` of them, so with few replicas per peer there are few columns: 2 instead of
    8 at EP144.
    """
    ids = rows.ids - lax.axis_index(axes) * replicas_per_peer
    mine = (rows.ids >= 0) & (ids >= 0) & (ids < replicas_per_peer)
    column = jnp.where(mine, jnp.cumsum(mine, axis=1) - 1, -1)
    goes = column[:, :, None] == jnp.arange(min(ids.shape[1], replicas_per_peer))  # [T, K, columns]
    weights = jnp.where(goes, rows.weights[:, :, None], 0).sum(axis=1)
    return TokenRows(rows.payload, jnp.where(goes, ids[:, :, None], -1).max(axis=1), weights)


@jax.jit
def fill_lines(rows: TokenRows, row: jax.Array) -> jax.Array:
    """Returns a buffer of lines `[L, U]`: rows `row` `[L]` as words.

    Lines of row T select no expert: their ids are -1, a word of ones.
    """

    def fill(words: jax.Array, empty: int = 0) -> jax.Array:
        return jnp.take(words, row, axis=0, mode="fill", fill_value=empty)

    payload = rows.payload
    arrived = isinstance(payload, Lines)
    first = fill(payload.words)[:, : width_of(payload.like)] if arrived else fill(to_words(payload))
    return jnp.concatenate([first, fill(to_words(rows.ids), _ONES), fill(to_words(rows.weights))], axis=1)


def sum_at(returned: jax.Array, place: jax.Array) -> jax.Array:
    """Returns `out[t]` = sum over k of `returned[place[t, k]]`, `[T, D]`; a place out of range counts as 0.

    Sums in float32 and returns the dtype of `returned`. It gathers, because a scatter-add on a GPU has no defined
    order.
    """
    total = jnp.zeros((place.shape[0], returned.shape[1]), jnp.float32)
    for k in range(place.shape[1]):
        total += jnp.take(returned, place[:, k], axis=0, mode="fill", fill_value=0).astype(jnp.float32)
    return total.astype(returned.dtype)
