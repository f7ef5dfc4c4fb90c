"""The best tokens of each query, exactly: the highest scores, and of equal ones those of the first tokens."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend
from pallas_kernels.dsa.scores import index_scores


def select_best(scores: jax.Array, visible: jax.Array, best: int) -> jax.Array:
    """Returns the positions int32 `[T, best]` of the `best` highest `scores` `[T, N]` of each row, in rising order.

    Only the first `visible` `[T]` scores of a row count, and none of them is NaN. Of equal scores the first win. A row
    with less than `best` to choose from ends in N.
    """
    N = scores.shape[1]
    _, positions = lax.top_k(scores, min(best, N))
    positions = jnp.sort(jnp.where(positions < visible[:, None], positions, N), axis=1)
    return jnp.pad(positions, ((0, 0), (0, best - positions.shape[1])), constant_values=N)


def choose(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    visible: jax.Array,
    *,
    first_page: jax.Array | int,
    best: int,
    backend: Backend | None = None,
) -> jax.Array:
    """Returns the positions int32 `[T, best]` of the tokens that each query attends to, in rising order.

    The arguments are those of `index_scores`. A query that sees less than `best` tokens has positions that it does not
    see in the last places.
    """
    scores = index_scores(q, weights, pool, page_table, visible, first_page=first_page, backend=backend)
    return select_best(scores, visible, best)
