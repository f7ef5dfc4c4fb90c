"""What a query of compressed attention reads: rows of a paged array, by their numbers."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowList:
    """The rows of one layer of an array that each of N queries attends to.

    Row i of page p of the layer has the number `p * R + i`. In a list of window rows, `-1 - t` is the row of token t of
    the step, which the array does not have yet. Numbers at or past a query's count are never followed.
    """

    array: jax.Array  # [pages, R, W]
    numbers: jax.Array  # [N, K] int32
    counts: jax.Array  # [N] int32, at most K
    layer: jax.Array | int = 0
    layer_rows: int = dataclasses.field(default=0, metadata={"static": True})  # of the array, in each layer
