"""What a query of compressed attention reads: rows of a paged array, by their numbers."""

from typing import NamedTuple

import jax


class RowList(NamedTuple):
    """The rows of one array that each of N queries attends to.

    Row i of page p has the number `p * R + i`, counted from row `first` of the array on. In a list of window rows,
    `-1 - t` is the row of token t of the step, which the array does not have yet. Numbers at or past a query's count
    are never followed.
    """

    array: jax.Array  # [pages, R, W]
    numbers: jax.Array  # [N, K] int32
    counts: jax.Array  # [N] int32, at most K
    first: jax.Array | int = 0
