"""Places of rows, with shapes known at compile time: sorted by group for grouped products, or queued for peers.

Rows in a queue keep their order; groups are padded to whole tiles.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import invariance, native
from pallas_kernels.backend import Backend, resolve_operation, uses_triton
from pallas_kernels.float8 import E4M3
from pallas_kernels.search import search
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import power_of_two

_PRODUCTS = {
    jnp.dtype(E4M3): "fp8_grouped_gemm_contiguous",
    jnp.dtype(jnp.int32): "int4_grouped_gemm_contiguous",
    jnp.dtype(jnp.uint32): "fp4_grouped_gemm_contiguous",
}
"""The product with weights of a type; for all other types, `grouped_gemm_contiguous`."""
_COUNTED_AT_ONCE, _QUEUED_AT_ONCE = 1024, 64
_MOST_COUNTED = 16 * _COUNTED_AT_ONCE
"""Rows, or ids, that a kernel reads for every group, or peer, anew; XLA sorts more rows, and adds up more ids."""


class GroupAlignment(NamedTuple):
    """The positions of M rows among A aligned rows: sorted by group, each group padded to whole tiles.

    `x.at[source_row].get(mode="fill", fill_value=0)` gives the aligned rows of `x` [M, ...], and
    `y.at[aligned_row].get(mode="fill", fill_value=0)` the results of its rows from `y` [A, ...].
    """

    source_row: jax.Array
    """[A] int32: the row that an aligned row holds, or M where it is padding."""
    aligned_row: jax.Array
    """[M] int32: the aligned row of a row; A for a row without a group, A or more for one beyond capacity."""
    tile_group: jax.Array
    """[A/tile_m] int32: the group of a tile, or -1 for tiles without rows, which are at the end."""
    counts: jax.Array
    """[G] int32: rows per group."""
    needed: jax.Array
    """[] int32: aligned rows that the rows of all groups need; those behind them are in no tile with a group."""
    overflow: jax.Array
    """[] int32: 1 if `needed` is more than A, so that the last rows have no place, else 0."""

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return self.source_row.shape[0] // self.tile_group.shape[0]


def aligned_rows(rows: int, num_groups: int, tile_m: int) -> int:
    """Returns A: aligned rows that fit `rows` rows in at most `num_groups` groups, in any distribution."""
    worst = rows + min(rows, num_groups) * (tile_m - 1)
    return max(tile_m, worst // tile_m * tile_m)


def align_groups(
    group_ids: jax.Array,
    num_groups: int,
    tile_m: int,
    *,
    max_rows: int | None = None,
    backend: Backend | None = None,
) -> GroupAlignment:
    """Aligns rows: sorted stably by group, with groups on tile boundaries.

    Args:
      group_ids: [M] int32. Rows whose id is outside 0..num_groups-1 are left out.
      num_groups: G.
      tile_m: rows of a tile.
      max_rows: capacity in rows with a group, in any distribution; None: all. With more rows, they may overflow.
      backend: NATIVE counts in C++, GPUs count few rows in Triton, and all others sort; None selects by device.

    Raises:
      ValueError: `group_ids` is not a vector of integers, or a number is below 1.
    """
    if group_ids.ndim != 1 or not jnp.issubdtype(group_ids.dtype, jnp.integer):
        raise ValueError(f"align_groups: needs integer group_ids [M], got {group_ids.shape} {group_ids.dtype}")
    M = group_ids.shape[0]
    held = M if max_rows is None else min(M, max_rows)
    if min(num_groups, tile_m) < 1 or held < min(M, 1):
        raise ValueError(
            f"align_groups: num_groups, tile_m and max_rows must be positive, got {num_groups}, {tile_m}, {max_rows}"
        )
    A = aligned_rows(held, num_groups, tile_m)
    resolved = resolve_operation("align_groups", backend)
    if M and resolved is Backend.NATIVE:
        return GroupAlignment(*native.align_rows(group_ids.astype(jnp.int32), num_groups, tile_m, A))
    if 0 < M <= _MOST_COUNTED and uses_triton(resolved):
        return _counted(group_ids.astype(jnp.int32), num_groups, tile_m, A, resolved)
    return _sorted(group_ids, num_groups, tile_m, A)


def _counted(ids: jax.Array, num_groups: int, tile_m: int, A: int, backend: Backend) -> GroupAlignment:
    """Aligns with one kernel that reads all ids once per group; XLA compiles the sort to fifteen kernels."""
    shapes = ((A,), ids.shape, (A // tile_m,), (num_groups,), (), ())
    found = call.start(
        "align.align",
        (ids,),
        [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        grid=(num_groups + 1,),
        backend=backend,
        rows=len(ids),
        GROUPS=num_groups,
        TILE=tile_m,
        ALIGNED=A,
        BINS=power_of_two(num_groups + 1),
        BLOCK=_COUNTED_AT_ONCE,
    )
    return GroupAlignment(*found)


def _sorted(group_ids: jax.Array, num_groups: int, tile_m: int, A: int) -> GroupAlignment:
    """Aligns by a stable sort: far cheaper than cumulative one-hot counts, whose work is rows times groups."""
    M = group_ids.shape[0]
    ids = jnp.where((group_ids >= 0) & (group_ids < num_groups), group_ids, num_groups).astype(jnp.int32)
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)  # [M]
    sorted_ids = ids[order]
    # First sorted position of every group; the last entry is the first row without a group.
    first = search(sorted_ids, jnp.arange(num_groups + 1, dtype=jnp.int32))
    counts = jnp.diff(first)
    padded = (counts + tile_m - 1) // tile_m * tile_m
    end = jnp.cumsum(padded)  # of each group's aligned rows
    start = jnp.append(end - padded, A)
    place = start[sorted_ids] + jnp.arange(M, dtype=jnp.int32) - first[sorted_ids]
    place = jnp.where(sorted_ids < num_groups, place, A).astype(jnp.int32)
    return GroupAlignment(
        source_row=jnp.full(A, M, jnp.int32).at[place].set(order, mode="drop"),
        aligned_row=jnp.zeros(M, jnp.int32).at[order].set(place),
        tile_group=_tile_groups(end, A // tile_m, tile_m, num_groups),
        counts=counts,
        needed=end[-1],
        overflow=(end[-1] > A).astype(jnp.int32),
    )


def choose_tile_m(
    rows: int, num_groups: int, *, dtype: jax.typing.DTypeLike = jnp.bfloat16, backend: Backend | None = None
) -> int:
    """Chooses the tile height for `rows` rows spread evenly over `num_groups` groups, whose weights are of `dtype`.

    It depends on the backend of the product with such weights (`with_fallback`).

    REFERENCE: about one and a half times the expected rows per group, as a power of two in 4..64, and 1 for fewer rows
    than groups. NATIVE: 1, without padding, if a kernel supports that many rows per group; else as REFERENCE. MOSAIC
    and TRITON: the kernels' tile heights, 8 or 16 to 128, by the same expectation. Where the bits of a row must not
    depend on the number of rows, kernels have tiles of 64 rows, or 1 in NATIVE.

    Raises ValueError if a number is below 1.
    """
    if rows < 1 or num_groups < 1:
        raise ValueError(f"choose_tile_m: rows and num_groups must be positive, got {rows} and {num_groups}")
    expected = rows / num_groups
    product = _PRODUCTS.get(jnp.dtype(dtype), "grouped_gemm_contiguous")
    chosen = resolve_operation(product, backend)
    if invariance.required() and chosen in (Backend.MOSAIC, Backend.TRITON):
        return invariance.TILE_ROWS
    if chosen is Backend.MOSAIC:
        return min(128, power_of_two(expected, least=8))
    if chosen is Backend.TRITON:
        return min(128, power_of_two(expected))
    if chosen is Backend.NATIVE and native.takes(dtype, math.ceil(expected)):
        return 1
    return 1 if expected < 1 else min(64, power_of_two(1.5 * expected, least=4))


def _tile_groups(end: jax.Array, tiles: int, tile_m: int, num_groups: int) -> jax.Array:
    """Returns the group of each tile, [tiles], from the end of every group's aligned rows; -1 past the last."""
    group = search(end, jnp.arange(tiles, dtype=jnp.int32) * tile_m, side="right")
    return jnp.where(group < num_groups, group, -1)


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
    resolved = resolve_operation("queue_rows", backend)
    T, K = ids.shape
    if 0 < T * K <= _MOST_COUNTED and uses_triton(resolved):
        shapes = (ids.shape, (peers * capacity,), (peers,))
        found = call.start(
            "align.queue",
            (ids,),
            [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
            grid=(peers + 1,),
            backend=resolved,
            rows=T,
            IDS=K,
            PEERS=peers,
            EACH=ids_per_peer,
            CAPACITY=capacity,
            BLOCK=min(_QUEUED_AT_ONCE, power_of_two(T)),
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
