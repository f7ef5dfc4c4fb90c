"""The best tokens of each query, exactly: the highest scores, and of equal ones those of the first tokens."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend, resolve_backend, with_fallback
from pallas_kernels.dsa import triton_ops
from pallas_kernels.dsa.scores import index_scores, raw_scores


def select_best(scores: jax.Array, visible: jax.Array, best: int) -> jax.Array:
    """Returns the positions int32 `[T, best]` of the `best` highest `scores` `[T, N]` of each row, in rising order.

    Only the first `visible` `[T]` scores of a row count, and none of them is NaN; the others are -inf. Of equal scores
    the first win. A row with less than `best` to choose from ends in N.
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
    arrays, backend = (q, weights, pool, page_table, visible), with_fallback("choose", backend)
    chosen_backend = resolve_backend(requested=backend)
    if triton_ops.usable(chosen_backend):
        scores = raw_scores(*arrays, first_page=first_page, backend=backend)
        return triton_ops.select_best(scores, visible, best, chosen_backend)
    return select_best(index_scores(*arrays, first_page=first_page, backend=backend), visible, best)
