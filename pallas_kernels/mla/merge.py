"""Merging attention outputs over disjoint sets of keys."""

import jax
import jax.numpy as jnp

from pallas_kernels.mla.checks import check_merge


def merge_attention(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the attention over the union of two disjoint sets of keys, from the attention over each.

    Args:
      out_a, out_b: `[..., V]`, normalized outputs of the same queries.
      lse_a, lse_b: `[...]` float32, natural log of the sum of exponentials; +inf marks a query that saw no key.

    Returns:
      out `[..., V]` in the dtype of `out_a` and lse `[...]` float32; 0 and +inf where both sides are empty.

    Raises:
      ValueError: shapes or dtypes disagree.
    """
    check_merge(out_a, lse_a, out_b, lse_b)
    empty_a, empty_b = jnp.isposinf(lse_a), jnp.isposinf(lse_b)
    log_a, log_b = jnp.where(empty_a, -jnp.inf, lse_a), jnp.where(empty_b, -jnp.inf, lse_b)
    top = jnp.maximum(log_a, log_b)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weight_a, weight_b = jnp.exp(log_a - top), jnp.exp(log_b - top)
    total = weight_a + weight_b
    both_empty = empty_a & empty_b
    safe_total = jnp.where(both_empty, 1, total)
    out = _weighted(out_a, weight_a / safe_total, empty_a) + _weighted(out_b, weight_b / safe_total, empty_b)
    return out.astype(out_a.dtype), jnp.where(both_empty, jnp.inf, top + jnp.log(safe_total))


def _weighted(out: jax.Array, weight: jax.Array, empty: jax.Array) -> jax.Array:
    return jnp.where(empty[..., None], 0, out.astype(jnp.float32) * weight[..., None])
