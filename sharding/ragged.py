"""The exchange with exact sizes: one round, no padding on the wire, and buffers for the worst case.

`lax.ragged_all_to_all` moves slices of any size between ranks. XLA has it for GPUs, not for CPUs, and people who
measured it report 2 % of NVLink's speed on eight B200 (openxla/xla#33386) and crashes above 32 ranks
(openxla/xla#47283): hence an opt-in. It has no form in two halves, so nothing is computed while rows travel.

Shapes: T tokens of this rank, K experts a token, P peers.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.exchange import Experts, Hop, Rows, fill_buffers, localise, queue, sum_at
from sharding.words import from_words, shapes_of, to_words


class Slices(NamedTuple):
    """The slices this rank exchanges with each peer, [P] int32 each; rows of one peer are contiguous on either side.

    `send_at`, `sent`: where in this rank's buffer the rows for peer p begin, and how many. `recv_at`, `received`: the
    same of the rows from peer p. `their_recv_at`, `their_send_at`: where they begin in the buffers of peer p, which is
    what `ragged_all_to_all` wants to know: its `output_offsets` count in the receiver's output.
    """

    send_at: jax.Array
    sent: jax.Array
    recv_at: jax.Array
    received: jax.Array
    their_recv_at: jax.Array
    their_send_at: jax.Array


class Returned(NamedTuple):
    """Partial sums [T * min(K, P), D] back on the rank that sent the rows, and where each row's are, [T, K]."""

    sums: jax.Array
    place: jax.Array


def start_ragged(rows: Rows, hop: Hop, experts: Experts) -> Returned:
    """Dispatch, experts and combine; what is left for `finish_ragged` is adding up. Buffers hold T * P rows."""
    T, K = rows.ids.shape
    words, place, slices = _pack(rows, hop)
    with jax.named_scope("dispatch"):
        arrived = to_peers(words, slices, hop.axes, T * hop.peers)
    shapes = shapes_of(rows)
    unit = jax.jit(lambda words, received: experts(_unpack(words, received, shapes, hop)))
    sums = unit(arrived, slices.received)
    with jax.named_scope("combine"):
        return Returned(from_peers(sums, slices, hop.axes, T * min(K, hop.peers)), place)


def finish_ragged(returned: Returned) -> jax.Array:
    """Weighted sums [T, D] in the dtype of the rows."""
    return jax.jit(sum_at)(*returned)


@functools.partial(jax.jit, static_argnames="hop")
def _pack(rows: Rows, hop: Hop) -> tuple[jax.Array, jax.Array, Slices]:
    """The rows as words, those for one peer together; where each went [T, K]; and the slices."""
    T, K = rows.ids.shape
    size = T * min(K, hop.peers)
    peer, slot, length = queue(rows.ids, hop)
    slices = slices_of(length, hop.axes)
    at = slices.send_at[jnp.minimum(peer, hop.peers - 1)] + slot
    place = jnp.where(peer < hop.peers, at, size)
    return to_words(fill_buffers(rows, place, size)), place, slices


def _unpack(words: jax.Array, received: jax.Array, shapes: Rows, hop: Hop) -> Rows:
    """What arrived, `received` [P] rows from each peer; beyond them there are none."""
    rows = from_words(words, shapes)
    is_there = jnp.arange(words.shape[0]) < received.sum()
    return localise(rows._replace(ids=jnp.where(is_there[:, None], rows.ids, -1)), hop.axes, hop.span)


def slices_of(length: jax.Array, axes: tuple[str, ...]) -> Slices:
    """Agrees with all peers on the slices, from the number of rows for each of them [P]; ranks' rows come in order."""

    def exchanged(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)

    received = exchanged(length)
    send_at, recv_at = jnp.cumsum(length) - length, jnp.cumsum(received) - received
    theirs = exchanged(jnp.stack([recv_at, send_at], axis=1))
    return Slices(send_at, length, recv_at, received, theirs[:, 0], theirs[:, 1])


@functools.partial(jax.jit, static_argnames=("axes", "size"))
def to_peers(x: jax.Array, slices: Slices, axes: tuple[str, ...], size: int) -> jax.Array:
    """Sends the slices of `x`; what arrives, [size, ...], 0 from the sum of `received` on."""
    output = jnp.zeros((size, *x.shape[1:]), x.dtype)
    return lax.ragged_all_to_all(
        x, output, slices.send_at, slices.sent, slices.their_recv_at, slices.received, axis_name=axes
    )


@functools.partial(jax.jit, static_argnames=("axes", "size"))
def from_peers(y: jax.Array, slices: Slices, axes: tuple[str, ...], size: int) -> jax.Array:
    """The way back of `to_peers`: each row of `y` to where it came from, [size, ...]."""
    output = jnp.zeros((size, *y.shape[1:]), y.dtype)
    return lax.ragged_all_to_all(
        y, output, slices.recv_at, slices.received, slices.their_send_at, slices.sent, axis_name=axes
    )
