"""Queues of rows for peers, in row order: where a dispatch puts each row, with shapes known at compile time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend, has_jax_triton, resolve_backend, with_fallback
from pallas_kernels.dsa.triton_ops import traced_for
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import power_of_two

_MOST_COUNTED = 2**14
"""Ids that a kernel reads for every peer anew; for more, XLA's cumulative sums are used."""
_ROWS_AT_ONCE = 64


class RowQueues(NamedTuple):
    """T rows in the queues of J peers, each with C lines of a buffer; the first C rows of a queue are in it."""

    line: jax.Array
    """[T, K] int32: the line of a row for an id; J * C where the row is not in the buffer, or an earlier id's is its
    line."""
    row: jax.Array
    """[J * C] int32: the row of a line, or T for none."""
    lost: jax.Array
    """[J] int32: rows that need a peer and are not in the buffer, as the last ones of more than C."""


def queue_rows(
    ids: jax.Array, peers: int, ids_per_peer: int, capacity: int, *, backend: Backend | None = None
) -> RowQueues:
    """Queues each row once for each peer that it needs.

    Args:
      ids: [T, K] int32 below `peers * ids_per_peer`; a negative id needs no peer, id n needs peer n // ids_per_peer.
      peers: J.
      ids_per_peer: at least 1.
      capacity: C.
      backend: GPUs count few rows in Triton; None selects by device.
    """
    resolved = resolve_backend(requested=with_fallback("queue_rows", backend))
    T, K = ids.shape
    if 0 < T * K <= _MOST_COUNTED and resolved in (Backend.MOSAIC, Backend.TRITON) and has_jax_triton():
        shapes = (ids.shape, (peers * capacity,), (peers,))
        with traced_for(resolved):
            found = call.start(
                "align.queue",
                (ids,),
                [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
                grid=(peers + 1,),
                rows=T,
                IDS=K,
                PEERS=peers,
                EACH=ids_per_peer,
                CAPACITY=capacity,
                BLOCK=min(_ROWS_AT_ONCE, power_of_two(T)),
                BLOCK_K=power_of_two(K),
            )
        return RowQueues(*found)
    peer, position, length = positions(ids, peers, ids_per_peer)
    line = jnp.where((peer < peers) & (position < capacity), peer * capacity + position, peers * capacity)
    return RowQueues(line, rows_at(line, peers * capacity), jnp.maximum(length - capacity, 0))


def positions(ids: jax.Array, peers: int, ids_per_peer: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the peer of each id, its row's position in that queue, both [T, K], and the queues' lengths [J], int32.

    The peer is J where nothing is sent: for a negative id, and if an earlier id of the row has the same peer.
    """
    peer = jnp.where(ids >= 0, ids // ids_per_peer, peers)
    earlier = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool), -1)
    repeated = ((peer[:, :, None] == peer[:, None, :]) & earlier).any(axis=2)
    peer = jnp.where(repeated, peers, peer)
    needs = (peer[:, :, None] == jnp.arange(peers)).any(axis=1)  # [T, J]
    length = jnp.cumsum(needs, axis=0, dtype=jnp.int32)
    position = jnp.take_along_axis(length, jnp.minimum(peer, peers - 1), axis=1) - 1
    return peer, position, length[-1]


def rows_at(line: jax.Array, lines: int) -> jax.Array:
    """Returns the row of each line, [lines] int32, T for none, from the lines `[T, K]` of the rows."""
    T, K = line.shape
    return (
        jnp.full(lines, T, jnp.int32).at[line.ravel()].set(jnp.repeat(jnp.arange(T, dtype=jnp.int32), K), mode="drop")
    )
