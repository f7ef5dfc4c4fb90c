"""Which tile a thread block works on next: the part in which dense, contiguous and masked products differ.

Every kernel is persistent: one cluster of blocks per `sm` of the grid walks a list of output tiles that nobody
writes down. A schedule turns a position in that list into a `Tile`; the producer and the consumers of a block each
walk it on their own, so nothing is handed between them but full and empty buffers.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_PANEL = 8
"""Row tiles walked together before the next column tile, so that their operands meet in the L2 cache."""


class Tile(NamedTuple):
    """One output tile; every field is a traced int32."""

    x_group: jax.Array
    """Index into the leading axis of the activations."""
    row: jax.Array
    """First row of the activations."""
    rows: jax.Array
    """Rows from `row` on that may be written; more than the tile's height means all of it."""
    w_group: jax.Array
    """Index into the stack of weights."""
    column: jax.Array
    """Which tile of the weight's rows N."""
    k_begin: jax.Array
    """First step of K."""
    k_steps: jax.Array
    """Number of steps of K."""
    split: jax.Array
    """Which part of K this is; the leading index of a split product's output."""


type TileBody = Callable[[Tile, jax.Array], jax.Array]


class Schedule(Protocol):
    """Walks the tiles of one cluster. `exact_rows`: rows past `Tile.rows` must not be written."""

    @property
    def exact_rows(self) -> bool: ...

    def most_tiles(self, columns: int) -> int:
        """Tiles there can be: more clusters than that would have nothing to do."""
        ...

    def walk(self, refs: tuple, columns: int, k_steps: int, body: TileBody) -> jax.Array:
        """Folds `body(tile, carry)` over this cluster's tiles, from a carry of 0.

        Args:
          refs: the schedule's own operands in global memory, as the kernel got them.
          columns: tiles along N of one block; a cluster covers neighbouring ones.
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
    exact_rows: ClassVar[bool] = False

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
            tile = Tile(
                jnp.int32(0), row * self.tile_m, jnp.int32(self.tile_m), layer, column, begin, end - begin, split
            )
            return body(tile, carry)

        return total


@dataclasses.dataclass(frozen=True)
class Heads:
    """`heads` products of `rows` rows, each with its own weight. Operands: index of the first head's weight [1]."""

    heads: int
    rows: int
    tile_m: int
    exact_rows: ClassVar[bool] = False

    def most_tiles(self, columns: int) -> int:
        return self.heads * pl.cdiv(self.rows, self.tile_m) * columns

    def walk(self, refs: tuple, columns: int, k_steps: int, body: TileBody) -> jax.Array:
        (first_ref,) = refs
        first, row_tiles = first_ref[0], pl.cdiv(self.rows, self.tile_m)

        @plgpu.nd_loop((self.heads, columns, row_tiles), collective_axes="sm", init_carry=jnp.int32(0))
        def total(info, carry):
            head, column, row = (jnp.asarray(i, jnp.int32) for i in info.index)  # row tiles share a weight in L2
            zero, height = jnp.int32(0), jnp.int32(self.tile_m)
            return body(
                Tile(head, row * self.tile_m, height, first + head, column, zero, jnp.int32(k_steps), zero), carry
            )

        return total


@dataclasses.dataclass(frozen=True)
class Contiguous:
    """Rows sorted by group, each tile of one group. Operands: tile_group [rows/tile_m], offset [1]."""

    rows: int
    tile_m: int
    exact_rows: ClassVar[bool] = False

    def most_tiles(self, columns: int) -> int:
        return self.rows // self.tile_m * columns

    def walk(self, refs: tuple, columns: int, k_steps: int, body: TileBody) -> jax.Array:
        group_ref, offset_ref = refs
        row_tiles = self.rows // self.tile_m
        offset = offset_ref[0]

        @plgpu.nd_loop((self.most_tiles(columns),), collective_axes="sm", init_carry=jnp.int32(0))
        def total(info, carry):
            (position,) = info.index
            row, column = plgpu.planar_snake(position, (row_tiles, columns), 0, _PANEL)
            group = group_ref[row]
            zero = jnp.int32(0)
            tile = Tile(
                zero, row * self.tile_m, jnp.int32(self.tile_m), offset + group, column, zero, jnp.int32(k_steps), zero
            )
            return lax.cond(group >= 0, lambda c: body(tile, c), lambda c: c, carry)

        return total


@dataclasses.dataclass(frozen=True)
class Masked:
    """`groups` buffers of `rows` rows, of which the first counts[g] hold data. Operands: counts [groups], offset [1].

    Tiles of empty groups do not exist, so the tiles that do are spread evenly over the clusters: each cluster walks
    the counts along with its own positions (after the first, these reads hit the L1 cache).
    """

    groups: int
    rows: int
    tile_m: int
    exact_rows: ClassVar[bool] = True

    def most_tiles(self, columns: int) -> int:
        return self.groups * pl.cdiv(self.rows, self.tile_m) * columns

    def walk(self, refs: tuple, columns: int, k_steps: int, body: TileBody) -> jax.Array:
        counts_ref, offset_ref = refs
        offset = offset_ref[0]

        def step(state):
            position, group, first, carry = state
            count = jnp.minimum(counts_ref[group], self.rows)
            row_tiles = lax.div(count + (self.tile_m - 1), jnp.int32(self.tile_m))
            inside = position < first + row_tiles * columns

            def run(carry):
                # Row tiles of one weight tile stand next to each other: they run at once and share it in L2.
                column = lax.div(position - first, row_tiles)
                row = lax.rem(position - first, row_tiles) * self.tile_m
                zero = jnp.int32(0)
                tile = Tile(group, row, count - row, offset + group, column, zero, jnp.int32(k_steps), zero)
                return body(tile, carry)

            carry = lax.cond(inside, run, lambda c: c, carry)
            return (
                jnp.where(inside, position + lax.axis_size("sm"), position),
                jnp.where(inside, group, group + 1),
                jnp.where(inside, first, first + row_tiles * columns),
                carry,
            )

        start = (lax.axis_index("sm").astype(jnp.int32), jnp.int32(0), jnp.int32(0), jnp.int32(0))
        return lax.while_loop(lambda state: state[1] < self.groups, step, start)[3]
