"""One hop of an exchange: queues of rows per peer, and their way there and back in four quarters.

`send` starts a dispatch and `receive` finishes it; `send_back` starts a combine and `receive_back` finishes it. Between
the two halves of each a caller may put other work, as with DeepEP's hook. Everything runs inside `shard_map`, on one
device.

A row crosses as one line of words, whatever it consists of, so a dispatch is one message per peer. A queue that is
longer than a peer's part of the buffer loses its last rows. `Queued.overflows` says so, and whoever started the step
computes it again.

Shapes: T token rows of this device, K replicas per row, J peers, C rows per pair of peers, U words per row.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sharding.experts.rows import Lines, TokenRows, fill_lines, localize, sum_at
from sharding.wire.collectives import Overlap, Transfer, start_all_to_all
from sharding.wire.sums import pack, unpack
from sharding.wire.words import from_words, shapes_of, width_of


@dataclasses.dataclass(frozen=True)
class Hop:
    """One crossing: `peers` devices along `axes`, each of which owns or leads to `replicas_per_peer` replicas.

    Each pair of peers has `capacity` rows. With `int8_sums` the way back carries int8 and scales
    (`sharding.wire.sums`).
    """

    axes: tuple[str, ...]
    peers: int
    replicas_per_peer: int
    capacity: int
    overlap: Overlap = Overlap.NONE
    int8_sums: bool = False


class Queued(NamedTuple):
    """Rows before a hop: row t has queue position `position[t, k]` in the queue for `peer[t, k]`."""

    rows: TokenRows
    peer: jax.Array  # [T, K] int32, `peers` where nothing is sent (no replica, or an earlier k has the same peer)
    position: jax.Array  # [T, K] int32
    overflows: jax.Array  # [] int32, 1 where a queue is longer than the hop's capacity, else 0


class DispatchHandle(NamedTuple):
    """Rows under way as words, the shapes of what these are, and the queues they come from."""

    transfer: Transfer
    shapes: TokenRows
    queued: Queued


# Each function jitted here is one unit: enforced program order keeps the order of units, and inside XLA is free.
@functools.partial(jax.jit, static_argnames="hop")
def enqueue(rows: TokenRows, hop: Hop) -> Queued:
    """Queues each row once per peer of the hop that it needs, in the order of rows."""
    peer, position, length = queue(rows.ids, hop)
    return Queued(rows, peer, position, (length.max() > hop.capacity).astype(jnp.int32))


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
def send(queued: Queued, hop: Hop) -> DispatchHandle:
    """Starts sending the first C rows of each queue: `[J * C, U]`, those for peer j from `j * C` on."""
    payload, *rest = queued.rows
    shapes = TokenRows(payload.like if isinstance(payload, Lines) else shapes_of(payload), *shapes_of(rest))
    return DispatchHandle(start_all_to_all(_fill(queued, hop), hop.axes, hop.overlap), shapes, queued)


@jax.named_scope("dispatch")
def receive(sent: DispatchHandle, hop: Hop) -> TokenRows:
    """Waits for the rows of `send`, `[J * C, ...]`, with local ids of this peer's replicas; payloads stay `Lines`."""
    payload, *rest = sent.shapes

    def unpack(words: jax.Array) -> TokenRows:
        ids, weights = from_words(words[:, width_of(payload) :], rest)
        rows = TokenRows(Lines.from_words(words, payload), ids, weights)
        return localize(rows, hop.axes, hop.replicas_per_peer)

    return jax.jit(unpack)(sent.transfer.finish())


@jax.named_scope("combine")
def send_back(sums: jax.Array, hop: Hop) -> Transfer:
    """Starts returning the partial sum of each row, `[J * C, D]`, to the peer that the row came from."""
    if not hop.int8_sums:
        return start_all_to_all(sums, hop.axes, hop.overlap)
    started = start_all_to_all(pack(sums), hop.axes, hop.overlap)
    return dataclasses.replace(started, like=shapes_of(sums))


@jax.named_scope("combine")
def receive_back(transfer: Transfer, queued: Queued, hop: Hop) -> jax.Array:
    """Waits for the partial sums and adds those of each row: `[T, D]`.

    Adds in the order of k and in float32; the result has the dtype of the sums.
    """
    return _sum(transfer.finish(), queued, hop, transfer.like)


@functools.partial(jax.jit, static_argnames="hop")
def _fill(queued: Queued, hop: Hop) -> jax.Array:
    """Returns the buffer to send, `[J * C, U]`: rows as words."""
    return fill_lines(queued.rows, _place(queued, hop), hop.peers * hop.capacity)


@functools.partial(jax.jit, static_argnames=("hop", "like"))
def _sum(returned: jax.Array, queued: Queued, hop: Hop, like: jax.ShapeDtypeStruct | None) -> jax.Array:
    """Returns the sum of each row's partial sums; packed ones are `like` that."""
    return sum_at(returned if like is None else unpack(returned, like), _place(queued, hop))


def _place(queued: Queued, hop: Hop) -> jax.Array:
    """Returns the line of each (row, k) in the buffer, [T, K]; out of range where it is not sent."""
    sent = (queued.peer < hop.peers) & (queued.position < hop.capacity)
    return jnp.where(sent, queued.peer * hop.capacity + queued.position, hop.peers * hop.capacity)
