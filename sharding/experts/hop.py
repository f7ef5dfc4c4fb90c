"""One hop of an exchange: queues of rows per peer, and their way there and back in four quarters.

`send` starts a dispatch and `receive` finishes it; `send_back` starts a combine and `receive_back` finishes it. Between
the two halves of each a caller may put other work, as with DeepEP's hook. Everything runs inside `shard_map`, on one
device.

A row crosses as one line of words, whatever it consists of, and brings along how long the queues of its sender are. A
dispatch is thus one message per peer, and all know of overflow rounds by the time the first round has arrived.

Shapes: T token rows of this device, K replicas per row, J peers, C rows per pair of peers in a round, U words per row.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sharding.experts.rows import TokenRows, fill_buffers, localize, sum_at
from sharding.wire.collectives import Overlap, Transfer, start_all_to_all
from sharding.wire.words import from_words, shapes_of, to_words


@dataclasses.dataclass(frozen=True)
class Hop:
    """One crossing: `peers` devices along `axes`, each of which owns or leads to `replicas_per_peer` replicas.

    Each pair of peers has `capacity` rows in the first round and `overflow_capacity` in every overflow round.
    """

    axes: tuple[str, ...]
    peers: int
    replicas_per_peer: int
    capacity: int
    overflow_capacity: int
    overlap: Overlap = Overlap.NONE

    @property
    def overflowing(self) -> "Hop":
        """This hop as an overflow round takes it: with smaller buffers, and nothing to overlap."""
        return dataclasses.replace(self, capacity=self.overflow_capacity, overlap=Overlap.NONE)


class Queued(NamedTuple):
    """Rows before a hop: row t has queue position `position[t, k]` in the queue for `peer[t, k]`."""

    rows: TokenRows
    peer: jax.Array  # [T, K] int32, `peers` where nothing is sent (no replica, or an earlier k has the same peer)
    position: jax.Array  # [T, K] int32
    longest: jax.Array
    """[1 + h] int32, lengths of the longest queue: of this device for this hop, then, for each of the h outer hops, the
    maximum over the peers known so far."""


class Sent(NamedTuple):
    """Rows under way as words, their shapes (and that of `longest` beside each row), and the queues they come from."""

    transfer: Transfer
    shapes: tuple[TokenRows, jax.ShapeDtypeStruct]
    queued: Queued


class Arrived(NamedTuple):
    """Rows after a hop, with local ids of this peer's replicas; `longest` is the maximum over all senders."""

    rows: TokenRows
    longest: jax.Array  # [1 + h] int32


# Each function jitted here is one unit: enforced program order keeps the order of units, and inside XLA is free.
@functools.partial(jax.jit, static_argnames="hop")
def enqueue(rows: TokenRows, hop: Hop, outer: jax.Array | None = None) -> Queued:
    """Queues each row once per peer of the hop that it needs, in the order of rows.

    `outer` [h] is `longest` of the hops that brought the rows here, if any.
    """
    peer, position, length = queue(rows.ids, hop)
    own = length.max()[None]
    return Queued(rows, peer, position, own if outer is None else jnp.concatenate([own, outer]))


def queue(ids: jax.Array, hop: Hop) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `peer` and `position` as in `Queued`, and the length of the queue for each peer [J], int32."""
    peer = jnp.where(ids >= 0, ids // hop.replicas_per_peer, hop.peers)  # [T, K]
    earlier = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool), -1)
    repeated = ((peer[:, :, None] == peer[:, None, :]) & earlier).any(axis=2)
    peer = jnp.where(repeated, hop.peers, peer)
    needs = (peer[:, :, None] == jnp.arange(hop.peers)).any(axis=1)  # [T, J]
    length = jnp.cumsum(needs, axis=0, dtype=jnp.int32)
    position = jnp.take_along_axis(length, jnp.minimum(peer, hop.peers - 1), axis=1) - 1
    return peer, position, length[-1]


@jax.named_scope("dispatch")
def send(queued: Queued, begin: jax.Array | int, hop: Hop) -> Sent:
    """Starts sending C rows of each queue from position `begin` on: `[J * C, U]`, those for peer j from `j * C` on."""
    shapes = shapes_of((queued.rows, queued.longest[None]))
    return Sent(start_all_to_all(_fill(queued, begin, hop), hop.axes, hop.overlap), shapes, queued)


@jax.named_scope("dispatch")
def receive(sent: Sent, hop: Hop) -> Arrived:
    """Waits for the rows of `send`, `[J * C, ...]`."""

    def unpack(words: jax.Array) -> Arrived:
        rows, longest = from_words(words, sent.shapes)
        return Arrived(localize(rows, hop.axes, hop.replicas_per_peer), longest.max(axis=0))

    return jax.jit(unpack)(sent.transfer.finish())


@jax.named_scope("combine")
def send_back(sums: jax.Array, hop: Hop) -> Transfer:
    """Starts returning the partial sum of each row, `[J * C, D]`, to the peer that the row came from."""
    return start_all_to_all(sums, hop.axes, hop.overlap)


@jax.named_scope("combine")
def receive_back(transfer: Transfer, queued: Queued, begin: jax.Array | int, hop: Hop) -> jax.Array:
    """Waits for the partial sums of a round and adds those of each row: `[T, D]`.

    Adds in the order of k and in float32; the result has the dtype of the sums.
    """
    return _sum(transfer.finish(), queued, begin, hop)


@functools.partial(jax.jit, static_argnames="hop")
def _fill(queued: Queued, begin: jax.Array | int, hop: Hop) -> jax.Array:
    """Returns the buffer of a round, `[J * C, U]`: rows as words, and `longest` at the end of each."""
    rows = fill_buffers(queued.rows, _place(queued, begin, hop), hop.peers * hop.capacity)
    longest = jnp.broadcast_to(queued.longest, (rows.ids.shape[0], *queued.longest.shape))
    return to_words((rows, longest))


@functools.partial(jax.jit, static_argnames="hop")
def _sum(returned: jax.Array, queued: Queued, begin: jax.Array | int, hop: Hop) -> jax.Array:
    """Returns the sum of each row's partial sums in a round."""
    return sum_at(returned, _place(queued, begin, hop))


def _place(queued: Queued, begin: jax.Array | int, hop: Hop) -> jax.Array:
    """Returns the line of each (row, k) in the buffer of a round, [T, K].

    Out of range where this round does not send it.
    """
    column = queued.position - begin
    sent = (queued.peer < hop.peers) & (column >= 0) & (column < hop.capacity)
    return jnp.where(sent, queued.peer * hop.capacity + column, hop.peers * hop.capacity)
