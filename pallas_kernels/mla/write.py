"""Writing the latents of new tokens into the page pool, in place."""

import jax
import jax.numpy as jnp

from pallas_kernels.mla.layout import PAGE_SIZE, is_fp8, pack_fp8


def write_reference(
    pages: jax.Array,
    latents: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    layer: jax.Array | int,
    pages_per_layer: int,
    value_width: int,
) -> jax.Array:
    """See `write_pages`. One scatter, which XLA does in place where `pages` is donated."""
    rows = pack_fp8(latents, value_width) if is_fp8(pages) else latents
    kept = (page_ids >= 0) & (page_ids < pages_per_layer) & (offsets >= 0) & (offsets < PAGE_SIZE)
    target = jnp.where(kept, layer * pages_per_layer + page_ids, pages.shape[0])  # one past the pool: dropped
    return pages.at[target, jnp.where(kept, offsets, 0)].set(rows, mode="drop")
