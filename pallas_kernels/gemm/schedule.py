"""The order of a thread block's tiles, which differs between dense, grouped and per-head products.

Kernels are persistent: each cluster of blocks loops over a virtual list of output tiles. A schedule maps a position in
that list to a `Tile`. Producer and consumers of a block iterate independently; they exchange only full and empty
buffers.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic import plgpu

_PANEL = 8
"""Row tiles of a panel: computed together before the next column tile, to share operands in the L2 cache."""
_SHARED_TILE_ROWS = 128
"""The tile height of groups with many tiles, which use panels."""


class Tile(NamedTuple):
    """One output tile; every field is a traced int32."""

    x_group: jax.Array
    """Index into the leading axis of the activations."""
    row: jax.Array
    """First row of the activations."""
    w_group: jax.Array
    """Index into the stack of weights."""
    column: jax.Array
    """Index of the tile along the weight's rows N."""
    k_begin: jax.Array
    """First step of K."""
    k_steps: jax.Array
    """Number of steps of K."""
    split: jax.Array
    """Index of the part of K; the leading index of a split product's output."""
    shares_weights: jax.Array | bool | None = None
    """Whether the blocks of the cluster share the weight tile, else the activations; None: not yet one block's tile."""


type TileBody = Callable[[Tile, jax.Array], jax.Array]


class TileSchedule(Protocol):
    """Iterates over the tiles of one cluster of thread blocks."""

    def most_tiles(self, columns: int) -> int:
        """Returns the maximal number of tiles, which bounds the clusters."""
        ...

    def walk(self, refs: tuple, columns: int, k_steps: int, body: TileBody) -> jax.Array:
        """Folds `body(tile, carry)` over this cluster's tiles, from a carry of 0.

        Args:
          refs: the schedule's own operands in global memory.
          columns: tiles along N of one block; a cluster covers neighboring ones.
          k_steps: steps along K of the whole product.
          body: called with each tile.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Dense:
    """One product of `rows` rows with one weight of a stack; K may be split. Operands: layer [1]."""

    rows: int
    tile_m: int
    splits: int = 1

    def most_tiles(self, columns: int) -> int:
        return pl.cdiv(self.rows, self.tile_m) * columns * self.splits

    def walk(self, refs: tuple, columns: int, k_steps: int, body: TileBody) -> jax.Array:
        (layer_ref,) = refs
        row_tiles = pl.cdiv(self.rows, self.tile_m)
        layer = layer_ref[0]

        @plgpu.nd_loop((self.most_tiles(columns),), collective_axes="sm", init_carry=jnp.int32(0))
        def total(info, carry):
            (position,) = info.index
            split = lax.rem(position, jnp.int32(self.splits))
            row, column = plgpu.planar_snake(lax.div(position, jnp.int32(self.splits)), (row_tiles, columns), 0, _PANEL)
            begin = lax.div(split * k_steps, jnp.int32(self.splits))
            end = lax.div((split + 1) * k_steps, jnp.int32(self.splits))
            tile = Tile(jnp.int32(0), row * self.tile_m, layer, column, begin, end - begin, split)
            return body(tile, carry)

        return total


@dataclasses.dataclass(frozen=True)
class Heads:
    """`heads` products of `rows` rows, each with its own weight. Operands: layer [1] of a stack of heads' weights."""

    heads: int
    rows: int
    tile_m: int

    def most_tiles(self, columns: int) -> int:
        return self.heads * pl.cdiv(self.rows, self.tile_m) * columns

    def walk(self, refs: tuple, columns: int, k_steps: int, body: TileBody) -> jax.Array:
        (layer_ref,) = refs
        first, row_tiles = layer_ref[0] * self.heads, pl.cdiv(self.rows, self.tile_m)

        @plgpu.nd_loop((self.heads, columns, row_tiles), collective_axes="sm", init_carry=jnp.int32(0))
        def total(info, carry):
            head, column, row = (jnp.asarray(i, jnp.int32) for i in info.index)  # row tiles share a weight in L2
            zero = jnp.int32(0)
            tile = Tile(head, row * self.tile_m, first + head, column, zero, jnp.int32(k_steps), zero)
            return body(tile, carry)

        return total


@dataclasses.dataclass(frozen=True)
class Contiguous:
    """Rows sorted by group, each tile of one group. Operands: tile_group [rows/tile_m], offset [1]."""

    rows: int
    tile_m: int

    def most_tiles(self, columns: int) -> int:
        return self.rows // self.tile_m * columns

    @property
    def panel(self) -> int:
        """Row tiles of a panel: 1 where few or low tiles share little in the L2 cache, as in decode.

        Tiles without rows are at the end. With panels of 1 they come last, so that every multiprocessor gets equally
        many non-empty ones.
        """
        shares = self.tile_m == _SHARED_TILE_ROWS and self.rows > 2 * _PANEL * self.tile_m
        return _PANEL if shares else 1

    def walk(self, refs: tuple, columns: int, k_steps: int, body: TileBody) -> jax.Array:
        group_ref, offset_ref = refs
        row_tiles = self.rows // self.tile_m
        offset = offset_ref[0]

        @plgpu.nd_loop((self.most_tiles(columns),), collective_axes="sm", init_carry=jnp.int32(0))
        def total(info, carry):
            (position,) = info.index
            row, column = plgpu.planar_snake(position, (row_tiles, columns), 0, self.panel)
            group = group_ref[row]
            zero = jnp.int32(0)
            tile = Tile(zero, row * self.tile_m, offset + group, column, zero, jnp.int32(k_steps), zero)
            return lax.cond(group >= 0, lambda c: body(tile, c), lambda c: c, carry)

        return total


@dataclasses.dataclass(frozen=True)
class ContiguousPairs(Contiguous):
    """Rows and operands as in `Contiguous`, for clusters of two blocks: they share weights where possible.

    Weights are most of a tile's loads: three fifths for 128 x 192. Two row tiles of one group share them. If a pair of
    row tiles has two groups, or only one of them has any, row tiles are computed one by one, and two column tiles share
    the activations.

    ```
                   column c      c + 1                       column c      c + 1
       row 2 p   ┌───────────┬───────────┐       row 2 p   ┌───────────────────────┐
                 │ cluster c │  cluster  │                 │       cluster c       │
                 │           │   c + 1   │                 ├───────────────────────┤
       row 2 p+1 └───────────┴───────────┘       row 2 p+1 └──── cluster c + 1 ────┘
                 one group: weights shared               else: activations shared
    ```

    A tile is one block's, and names the operand that the cluster shares. Both blocks read the same two groups, so they
    agree. `columns` are pairs of column tiles.
    """

    def most_tiles(self, columns: int) -> int:
        return pl.cdiv(self.rows // self.tile_m, 2) * 2 * columns

    def walk(self, refs: tuple, columns: int, k_steps: int, body: TileBody) -> jax.Array:
        group_ref, offset_ref = refs
        offset, block = offset_ref[0], lax.axis_index("cluster")

        @plgpu.nd_loop((self.most_tiles(columns),), collective_axes="sm", init_carry=jnp.int32(0))
        def total(info, carry):
            (position,) = info.index
            pair, column = self.place(position, columns)
            first, second = self.groups(group_ref, pair)
            row, column, shares_weights = own_place(first == second, pair, column, block)
            group = jnp.where(row == 2 * pair, first, second)
            zero = jnp.int32(0)
            steps = jnp.int32(k_steps)
            tile = Tile(zero, row * self.tile_m, offset + group, column, zero, steps, zero, shares_weights)
            return lax.cond(group >= 0, lambda c: body(tile, c), lambda c: c, carry)

        return total

    def place(self, position: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
        """Returns the pair of row tiles and the column tile of a cluster at a position."""
        pairs = pl.cdiv(self.rows // self.tile_m, 2)
        return plgpu.planar_snake(position, (pairs, 2 * columns), 0, self.panel)

    def groups(self, group_ref, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the groups of a pair's row tiles, -1 for a missing second one in the last pair."""
        second, last = 2 * pair + 1, self.rows // self.tile_m - 1
        return group_ref[2 * pair], jnp.where(second > last, -1, group_ref[jnp.minimum(second, last)])


def own_place(one_group: jax.Array, pair: jax.Array, column: jax.Array, block: jax.Array) -> tuple:
    """Returns a block's row tile and column tile, and whether its cluster shares the weights."""
    odd = lax.rem(column, jnp.int32(2))
    row = 2 * pair + jnp.where(one_group, block, odd)
    return row, jnp.where(one_group, column, column - odd + block), one_group
