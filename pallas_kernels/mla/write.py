"""Writing the rows of new tokens into the page pool in plain jax.numpy."""

import jax
import jax.numpy as jnp

DROPPED = -1
"""The page of a row that is not written."""


def write_rows(pages: jax.Array, rows: jax.Array, targets: jax.Array, offsets: jax.Array) -> jax.Array:
    """Writes `rows` [T, W] to `pages[targets, offsets]`; rows with target DROPPED go nowhere.

    One scatter, which XLA does in place where `pages` is donated.
    """
    targets = jnp.where(targets == DROPPED, pages.shape[0], targets)  # a negative index would count from the end
    return pages.at[targets, offsets].set(rows, mode="drop")
