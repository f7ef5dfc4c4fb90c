"""Memory layout of the cache by the model's cache groups: pool arrays, page bytes, and the payloads of pages.

`ModelConfig.cache_groups` declares for a cache dtype (float32, bfloat16, float16, or fp8) what layers cache per token.
A pool is a dict of one array per group, by its name. Page `p` covers the same `page_size` tokens in all groups of the
context, so pages are allocated, moved and offloaded with all these groups together. Groups of the window have pages of
their own, which cover as many tokens.

Shapes and bytes here are those of whole pages. Where devices divide a page (`dsv3.model.context_parallel`), each holds
`1 / context_shards` of its rows; the payload of a page has them all, in order. Pages of the window and slots, whose
bytes do not grow with the context, are whole on every device.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.config.engine import least_window_pages
from dsv3.config.model import DRAFT_ROWS, LATENTS, CacheGroup, Lifetime, ModelConfig
from sharding.mesh import CONTEXT

KEPT_WINDOWS = 0.25
"""Bytes of window pages that are kept so that later requests can continue a cached prefix, per byte of pages."""

Pool = dict[str, Any]
"""Arrays by the group's name: page, or slot, `p` of the group's layer number `l` is row `l * num_pages + p`."""


def groups_of(cfg: ModelConfig, cache_dtype: str, lifetime: Lifetime) -> tuple[CacheGroup, ...]:
    """Returns the model's cache groups of one lifetime."""
    return tuple(group for group in cfg.cache_groups(cache_dtype) if group.lifetime == lifetime)


def entries_per_page(cfg: ModelConfig, group: CacheGroup) -> int:
    """Returns how many rows a page, or a slot, has in one layer of a group.

    Raises ValueError where the number is not whole.
    """
    if group.lifetime != "context":
        return group.ring
    entries, rest = divmod(cfg.page_size, group.tokens_per_entry)
    if rest or not entries:
        raise ValueError(
            f"page_size {cfg.page_size}: an entry of the cache group '{group.name}' covers {group.tokens_per_entry} "
            "tokens; the model's page size must be a multiple of that of every group"
        )
    return entries


def row_bytes(cfg: ModelConfig, cache_dtype: str, name: str = LATENTS) -> int:
    """Returns the bytes of an entry of a group in one layer; 0 where the model has no such group.

    Latents of DeepSeek-V3 take 1,152 in bfloat16 and 656 in fp8, index keys of DeepSeek-V3.2 256 and 132.
    """
    return sum(_row_bytes(group) for group in cfg.cache_groups(cache_dtype) if group.name == name)


def token_bytes(cfg: ModelConfig, cache_dtype: str) -> int:
    """Returns the bytes of one token over all cache layers: 70,272 for DeepSeek-V3 in bfloat16 (61 layers, no MTP).

    It is a token's share of a page, rounded up where entries cover several tokens. Groups of the window and of requests
    are not counted.
    """
    return -(-page_bytes(cfg, cache_dtype) // cfg.page_size)


def page_bytes(cfg: ModelConfig, cache_dtype: str, lifetime: Lifetime = "context") -> int:
    """Returns the bytes of one page over all cache layers; of a page of the window, or of a slot, by `lifetime`."""
    groups = groups_of(cfg, cache_dtype, lifetime)
    return sum(len(group.layers) * entries_per_page(cfg, group) * _row_bytes(group) for group in groups)


def window_size(cfg: ModelConfig) -> int:
    """Returns how many tokens before a step its queries read from groups of the window; 0 without such groups."""
    return max((g.ring - DRAFT_ROWS - 1 for g in groups_of(cfg, "float32", "window")), default=0)


def pages_within(cfg: ModelConfig, cache_dtype: str, budget: int, slots: int = 0) -> int:
    """Returns how many pages fit `budget` bytes of a device, each counted over all cache layers.

    The window pages and the state of `slots` requests are in the budget, and the window pages kept beside pages.
    """
    return max(0, budget - slots_bytes(cfg, cache_dtype, slots)) // page_cost(cfg, cache_dtype)


def slots_bytes(cfg: ModelConfig, cache_dtype: str, slots: int) -> int:
    """Returns the bytes that `slots` requests need whatever their lengths: their state, and their window pages."""
    least = least_window_pages(slots, cfg.page_size, window_size(cfg))
    return slots * page_bytes(cfg, cache_dtype, "request") + least * page_bytes(cfg, cache_dtype, "window")


def page_cost(cfg: ModelConfig, cache_dtype: str) -> int:
    """Returns the bytes of a device's part of a page, and of its share of the window pages kept for later requests."""
    size = page_bytes(cfg, cache_dtype) // cfg.context_shards
    return size + int(KEPT_WINDOWS * size) if window_size(cfg) else size


def window_pages(cfg: ModelConfig, cache_dtype: str, num_pages: int, slots: int) -> int:
    """Returns how many window pages an engine of `slots` requests has beside `num_pages` pages; 0 without a window."""
    if not window_size(cfg):
        return 0
    kept = num_pages * (page_cost(cfg, cache_dtype) - page_bytes(cfg, cache_dtype) // cfg.context_shards)
    least = least_window_pages(slots, cfg.page_size, window_size(cfg))
    return least + kept // page_bytes(cfg, cache_dtype, "window")


def pool(
    cfg: ModelConfig, cache_dtype: str, num_pages: int, num_window_pages: int = 0, num_slots: int = 0
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes `[layers * num_pages, entries_per_page, width]` and dtypes of one rank's pool (`Pool`).

    Groups of the window have `num_window_pages` instead, those of requests `num_slots`.
    """
    counts: dict[Lifetime, int] = {"context": num_pages, "window": num_window_pages, "request": num_slots}
    return {
        group.name: jax.ShapeDtypeStruct(
            (len(group.layers) * counts[group.lifetime], entries_per_page(cfg, group), group.width),
            jnp.dtype(group.dtype),
        )
        for group in cfg.cache_groups(cache_dtype)
    }


def pages_per_layer(cfg: ModelConfig, pool: Mapping[str, Any], lifetime: Lifetime = "context") -> int:
    """Returns how many pages of a lifetime a pool has; slots for "request".

    Raises ValueError where its arrays do not match the model.
    """
    groups = cfg.cache_groups("float32")  # names and layers are the same for every type
    names = sorted(group.name for group in groups)
    if not isinstance(pool, Mapping) or sorted(pool) != names:
        raise ValueError(f"pages must be a dict of an array per cache group of the model: {', '.join(names)}")
    counts = set()
    for group in groups_of(cfg, "float32", lifetime):
        rows = len(pool[group.name])
        if rows % len(group.layers):
            raise ValueError(f"the {rows} pages of the pool must divide by {len(group.layers)} cache layers")
        counts.add(rows // len(group.layers))
    if len(counts) > 1:
        raise ValueError(f"all cache groups must have as many pages, got {sorted(counts)}")
    return counts.pop()


def payload_shape(cfg: ModelConfig, cache_dtype: str, lifetime: Lifetime = "context") -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of a page's payload: its rows in all layers.

    With one group they have its shape and dtype, `[L, entries_per_page, width]`. With several they are bytes: those of
    the first group in all layers, then those of the next. Pages of the window have payloads too, by `lifetime`.
    """
    arrays = pool(cfg, cache_dtype, 1, 1, 1)
    names = [group.name for group in groups_of(cfg, cache_dtype, lifetime)]
    if len(names) == 1:
        return arrays[names[0]]
    return jax.ShapeDtypeStruct((page_bytes(cfg, cache_dtype, lifetime),), jnp.uint8)


def gather_pages(groups: tuple[CacheGroup, ...], pool: Pool, pages: jax.Array, context_shards: int = 1) -> jax.Array:
    """Returns the payloads `[n, ...]` of `pages` `[n]` of a rank's pool; zeros for -1.

    `groups` are all groups of one lifetime. With `context_shards` the pool is a device's part of it, inside
    `shard_map`.
    """
    parts = [pool[g.name].at[_rows(g, pool, pages)].get(mode="fill", fill_value=0) for g in groups]
    if context_shards > 1:
        parts = [lax.all_gather(part, CONTEXT, axis=2, tiled=True) for part in parts]
    return parts[0] if len(parts) == 1 else jnp.concatenate([_bytes(part) for part in parts], axis=1)


def scatter_pages(
    groups: tuple[CacheGroup, ...], pool: Pool, pages: jax.Array, payloads: jax.Array, context_shards: int = 1
) -> tuple[Pool, jax.Array]:
    """Returns the pool with `payloads` `[n, ...]` written to `pages` `[n]`, -1 for none, and an array to wait for.

    With `context_shards` the pool is a device's part of it, as in `gather_pages`.
    """
    parts = [payloads] if len(groups) == 1 else _split(groups, pool, payloads, context_shards)
    written = dict(pool)
    for group, part in zip(groups, parts, strict=True):
        array = pool[group.name]
        rows, own = _rows(group, pool, pages).reshape(-1), part
        if context_shards > 1:
            own = lax.dynamic_slice_in_dim(part, lax.axis_index(CONTEXT) * array.shape[1], array.shape[1], axis=2)
        written[group.name] = array.at[rows].set(own.reshape(-1, *array.shape[1:]), mode="drop")
    return written, _rows(groups[0], pool, pages)[:, 0]


def window_parts(cfg: ModelConfig, cache_dtype: str) -> int:
    """Returns in how many parts of `page_bytes` a window page leaves the device; 0 without a window.

    So tiers and instances keep and send blocks of one size.
    """
    return -(-page_bytes(cfg, cache_dtype, "window") // page_bytes(cfg, cache_dtype))


def gather_window_parts(
    groups: tuple[CacheGroup, ...], size: int, pool: Pool, pages: jax.Array, parts: jax.Array
) -> jax.Array:
    """Returns part `parts[i]` of window page `pages[i]`, uint8 `[n, size]`; zeros for page -1.

    `groups` are all groups of the window.
    """

    def one(where: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _in_parts(gather_pages(groups, pool, where[0][None]), size)[where[1]]

    return lax.map(one, (pages, parts))


def scatter_window_parts(
    groups: tuple[CacheGroup, ...], pool: Pool, pages: jax.Array, parts: jax.Array, values: jax.Array
) -> tuple[Pool, jax.Array]:
    """Returns the pool with `values` uint8 `[n, size]` as the parts that `gather_window_parts` returns, and an array.

    The array is to wait for.
    """

    def one(i: int | jax.Array, pool: Pool) -> Pool:
        page = lax.dynamic_slice_in_dim(pages, i, 1)
        before = gather_pages(groups, pool, page)
        whole = _in_parts(before, values.shape[1]).at[parts[i]].set(values[i]).reshape(-1)[: before.nbytes]
        typed = lax.bitcast_convert_type(whole.reshape(*before.shape, -1), before.dtype).reshape(before.shape)
        return scatter_pages(groups, pool, page, typed)[0]

    return lax.fori_loop(0, len(pages), one, pool), pages


def _in_parts(payload: jax.Array, size: int) -> jax.Array:
    """Returns the bytes of a payload `[1, ...]` as `[parts, size]`, the last part padded with zeros."""
    raw = _bytes(payload)[0]
    return jnp.pad(raw, (0, -len(raw) % size)).reshape(-1, size)


def _row_bytes(group: CacheGroup) -> int:
    return group.width * jnp.dtype(group.dtype).itemsize


def _rows(group: CacheGroup, pool: Pool, pages: jax.Array) -> jax.Array:
    """Returns the rows `[n, L]` of the pages `[n]` in all layers of a group; out of bounds for -1."""
    total = pool[group.name].shape[0]
    layers = jnp.arange(len(group.layers)) * (total // len(group.layers))
    return jnp.where(pages[:, None] < 0, total, pages[:, None] + layers)


def _bytes(part: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(part, jnp.uint8).reshape(len(part), -1)


def _split(groups: tuple[CacheGroup, ...], pool: Pool, payloads: jax.Array, context_shards: int) -> list[jax.Array]:
    """Returns the part `[n, L, entries_per_page, width]` of each group from bytes `[n, all]`."""
    parts, first = [], 0
    for group in groups:
        array = pool[group.name]
        shape, size = (len(group.layers), array.shape[1] * context_shards, array.shape[2]), array.dtype.itemsize
        last = first + math.prod(shape) * size
        raw = payloads[:, first:last].reshape(-1, *shape, *(() if size == 1 else (size,)))
        parts.append(lax.bitcast_convert_type(raw, array.dtype))
        first = last
    return parts
