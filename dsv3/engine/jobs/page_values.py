"""The value of a page as it leaves a pool and comes back: its rows of all layers, one array after the other.

A pool of one array gives them as they are, `[L, 64, R + P]`. One with index keys gives bytes: those of the latents in
all layers, then those of the keys. Whoever keeps or sends a value has both, or none.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.config.model import ModelConfig
from dsv3.kv_cache.layout import page_bytes, pool


def value_shape(cfg: ModelConfig, cache_dtype: str) -> jax.ShapeDtypeStruct:
    """Returns shape and type of a page's value."""
    leaves = jax.tree.leaves(pool(cfg, cache_dtype, 1))
    return leaves[0] if len(leaves) == 1 else jax.ShapeDtypeStruct((page_bytes(cfg, cache_dtype),), jnp.uint8)


def take_out(pool: Any, pages: jax.Array, num_pages: int) -> jax.Array:
    """Returns the values `[n, ...]` of `pages` `[n]` of a rank's pool of `num_pages`; zeros for -1."""
    parts = [leaf.at[_rows(leaf, pages, num_pages)].get(mode="fill", fill_value=0) for leaf in jax.tree.leaves(pool)]
    return parts[0] if len(parts) == 1 else jnp.concatenate([_bytes(part) for part in parts], axis=1)


def put_in(pool: Any, pages: jax.Array, values: jax.Array, num_pages: int) -> tuple[Any, jax.Array]:
    """Returns the pool with `values` `[n, ...]` in `pages` `[n]`, -1 for nowhere, and something to wait for."""
    leaves, tree = jax.tree.flatten(pool)
    shapes = [(len(leaf) // num_pages, *leaf.shape[1:]) for leaf in leaves]
    parts = [values] if len(leaves) == 1 else _split(values, leaves, shapes)
    written = []
    for leaf, part, shape in zip(leaves, parts, shapes, strict=True):
        rows = _rows(leaf, pages, num_pages).reshape(-1)
        written.append(leaf.at[rows].set(part.reshape(-1, *shape[1:]), mode="drop"))
    return jax.tree.unflatten(tree, written), _rows(leaves[0], pages, num_pages)[:, 0]


def _rows(leaf: jax.Array, pages: jax.Array, num_pages: int) -> jax.Array:
    """Returns the rows `[n, L]` of the pages `[n]` in all layers of an array; beyond it for -1."""
    layers = jnp.arange(leaf.shape[0] // num_pages) * num_pages
    return jnp.where(pages[:, None] < 0, leaf.shape[0], pages[:, None] + layers)


def _bytes(part: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(part, jnp.uint8).reshape(len(part), -1)


def _split(values: jax.Array, leaves: list[jax.Array], shapes: list[tuple[int, ...]]) -> list[jax.Array]:
    """Returns the part `[n, L, 64, W]` of each array from bytes `[n, all]`."""
    parts, first = [], 0
    for leaf, shape in zip(leaves, shapes, strict=True):
        last = first + math.prod(shape) * leaf.dtype.itemsize
        bytes_each = () if leaf.dtype.itemsize == 1 else (leaf.dtype.itemsize,)
        raw = values[:, first:last].reshape(-1, *shape, *bytes_each)
        parts.append(lax.bitcast_convert_type(raw, leaf.dtype))
        first = last
    return parts
