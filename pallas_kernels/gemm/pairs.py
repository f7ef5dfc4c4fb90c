"""The schedule of clusters of two blocks over aligned rows: they share weights where possible, else activations.

Weights are most of a tile's loads: three fifths for 128 x 192. Two row tiles of one group share them. If a pair of row
tiles has two groups, or only one of them has any, row tiles are computed one by one, and two column tiles share the
activations.

```
               column c      c + 1                       column c      c + 1
   row 2 p   ┌───────────┬───────────┐       row 2 p   ┌───────────────────────┐
             │ cluster c │  cluster  │                 │       cluster c       │
             │           │   c + 1   │                 ├───────────────────────┤
   row 2 p+1 └───────────┴───────────┘       row 2 p+1 └──── cluster c + 1 ────┘
             one group: weights shared               else: activations shared
```
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gemm.schedule import Contiguous, Tile, TileBody
from pallas_kernels.mosaic import plgpu


@dataclasses.dataclass(frozen=True)
class ContiguousPairs(Contiguous):
    """Rows and operands as in `Contiguous`, for clusters of two blocks.

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
