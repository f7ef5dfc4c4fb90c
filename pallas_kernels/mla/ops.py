"""The public MLA operations: checks, then the reference, a GPU's kernel (Mosaic or Triton), or a CPU's C++.

Sparse prefill passes the keys of each query as a bitmask, a 32nd of the memory of 32-bit scores, which are never
stored. The kernels multiply whole blocks of keys between the first and the last key that a block of queries may see.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import native
from pallas_kernels.backend import Backend, resolve_backend, resolve_operation, warn_once
from pallas_kernels.mla import checks, mosaic_ops, reference, triton_ops, write
from pallas_kernels.mla.layout import PAGE_SIZE, fp8_rows_of_pages, is_fp8, pack_fp8, unpack_fp8
from pallas_kernels.mla.schedule import DecodeSchedule
from pallas_kernels.mla.write import DROPPED

WORD = 32
"""Keys whose bits share a word."""


def mla_decode(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    layer: jax.Array | int = 0,
    pages_per_layer: int,
    value_width: int = 512,
    schedule: DecodeSchedule | None = None,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes absorbed latent attention of a decode step over paged requests of any length (DeepSeek-V2, 2.1).

    Query `s` of a request of length n sees cached tokens `0 .. n - (S - 1 - s) - 1`: the S newest tokens are in the
    cache already and are causal among themselves.

    Args:
      q: `[B, S, H, R + P]` float32, bfloat16 or float16; the key up-projection is folded into the first R values.
      pages: `[layers * pages_per_layer, 64, R + P]` float32, bfloat16 or float16, or FP8 pages, uint8
        `[layers * pages_per_layer, 64, fp8_row_bytes(R, P)]` (see `layout.py`). The kernel reads pages of the dtype of
        `q`, and FP8 pages with bfloat16 queries. Unwritten rows may hold anything.
      page_table: `[B, MP]` int32, page ids within a layer. Entries past a request's length are never followed.
      lengths: `[B]` int32, cached tokens of each request, the S query tokens included; at most `64 * MP`.
      scale: factor on the scores before the softmax.
      layer: index of the layer, static or a traced int32; page `layer * pages_per_layer + page_table[b, j]` is read.
      pages_per_layer: pages the pool holds for one layer.
      value_width: R; the first R values of a row are also the attention's values.
      schedule: from `decode_schedule` for the same lengths, S and H, once for all layers of a step; computed here if
        absent. The reference ignores it.
      backend: an implementation, or None for the one that suits the default device.

    Returns:
      out `[B, S, H, R]` in the dtype of `q`, and lse `[B, S, H]` float32 (natural log of the sum of exponentials).
      A query that sees no token gets out 0 and lse +inf, FlashMLA's convention.

    Raises:
      ValueError: a shape, dtype or page size does not fit.
    """
    checks.check_decode(q, pages, page_table, lengths, pages_per_layer, value_width)
    first_page = layer * pages_per_layer
    chosen = _resolve_kernel("mla_decode", backend, decode_unsupported, q, pages, value_width)
    if chosen is Backend.MOSAIC:
        return mosaic_ops.decode_mosaic(
            q, pages, page_table, lengths, scale=scale, first_page=first_page, schedule=schedule
        )
    attend = triton_ops.decode if chosen is Backend.TRITON else reference.decode_reference
    if chosen is Backend.NATIVE and native.attends(q, pages):
        attend = native.decode_attention
    return attend(q, pages, page_table, lengths, scale=scale, first_page=first_page, value_width=value_width)


def mla_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_lengths: jax.Array,
    *,
    scale: float,
    shared_key: jax.Array | None = None,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes causal attention among new tokens, in materialized form, of several requests in one flat batch.

    Args:
      q, k: `[T, H, N + P]` float32, bfloat16 or float16.
      v: `[T, H, V]` of the same dtype.
      cu_lengths: `[G + 1]` int32, 0 and then the running total of the requests' token counts (not decreasing).
        Tokens at or past `cu_lengths[-1]` are padding and may hold anything.
      scale: factor on the scores before the softmax.
      shared_key: `[T, P]`, the last part of the keys of all heads; `k` is then `[T, H, N]`. The kernels of
        Hopper and CPUs use the parts, the others concatenate them.
      backend: an implementation, or None for the one that suits the default device.

    Returns:
      out `[T, H, V]` in the dtype of `q` and lse `[T, H]` float32; padding gets out 0 and lse +inf. `merge_attention`
      combines the result with the attention to earlier tokens (`mla_prefill_context`).

    Raises:
      ValueError: a shape or dtype does not fit.
    """
    checks.check_prefill(q, k, v, cu_lengths, shared_key)
    chosen = _resolve_kernel("mla_prefill", backend, prefill_unsupported, q, v)
    if shared_key is not None and chosen is Backend.MOSAIC and mosaic_ops.takes_parts(k, shared_key):
        return mosaic_ops.prefill_mosaic(q, k, v, cu_lengths, shared_key, scale=scale)
    if chosen is Backend.NATIVE and native.attends(q, k):
        shared = k[:, 0, :0] if shared_key is None else shared_key
        return native.prefill_attention(q, k, shared, v, cu_lengths, scale=scale)
    k = k if shared_key is None else whole_keys(k, shared_key)
    if chosen is Backend.MOSAIC:
        return mosaic_ops.prefill_mosaic(q, k, v, cu_lengths, scale=scale)
    attend = triton_ops.prefill if chosen is Backend.TRITON else reference.prefill_reference
    return attend(q, k, v, cu_lengths, scale=scale)


def whole_keys(k: jax.Array, shared_key: jax.Array) -> jax.Array:
    """Concatenates keys `[T, H, N + P]` from each head's own part `[T, H, N]` and the shared one `[T, P]`."""
    shared = jnp.broadcast_to(shared_key[:, None], (*k.shape[:2], shared_key.shape[1]))
    return jnp.concatenate([k, shared], axis=-1)


def _key_parts(k: jax.Array, shared_key: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns the parts of keys where Hopper's kernel supports them, else whole keys and None."""
    return (k, shared_key) if mosaic_ops.takes_parts(k, shared_key) else (whole_keys(k, shared_key), None)


def mla_prefill_context(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    context_lengths: jax.Array,
    cu_lengths: jax.Array,
    *,
    scale: float,
    layer: jax.Array | int = 0,
    pages_per_layer: int,
    value_width: int = 512,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the attention of new tokens to the earlier, cached tokens of their own request, in absorbed form.

    Almost free if no request has context.

    Args:
      q: `[T, H, R + P]`, the flat batch of `mla_prefill` with the key up-projection folded in.
      pages: the page pool, as in `mla_decode`.
      page_table: `[G, MP]` int32, a row for each request. Entries past its context are never followed.
      context_lengths: `[G]` int32, earlier tokens of each request; every one is visible to all its new tokens.
      cu_lengths: `[G + 1]` int32, as in `mla_prefill`.
      scale, layer, pages_per_layer, value_width, backend: as in `mla_decode`.

    Returns:
      out `[T, H, R]` in the dtype of `q` and lse `[T, H]` float32; 0 and +inf for tokens without context and padding.

    Raises:
      ValueError: a shape, dtype or page size does not fit.
    """
    checks.check_context(q, pages, page_table, context_lengths, cu_lengths, pages_per_layer, value_width)
    arrays, first_page = (q, pages, page_table, context_lengths, cu_lengths), layer * pages_per_layer
    chosen = _resolve_kernel("mla_prefill_context", backend, decode_unsupported, q, pages, value_width)
    if chosen is Backend.MOSAIC:
        return mosaic_ops.context_mosaic(*arrays, scale=scale, first_page=first_page)
    attend = triton_ops.context if chosen is Backend.TRITON else reference.context_reference
    if chosen is Backend.NATIVE and native.attends(q, pages):
        attend = native.context_attention
    return attend(*arrays, scale=scale, first_page=first_page, value_width=value_width)


def gather_latents(
    pages: jax.Array, ids: jax.Array, counts: jax.Array, value_width: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Returns the latents `[n * 64, R + P]` of pages `ids` `[n]` of the pool, zeros from row `counts` `[n]` on."""
    rows = pages.at[ids].get(mode="clip")
    if is_fp8(pages):
        rows = unpack_fp8(fp8_rows_of_pages(rows, value_width), value_width, dtype)
    written = jnp.arange(PAGE_SIZE) < counts[:, None]
    return jnp.where(written[..., None], rows.astype(dtype), 0).reshape(-1, rows.shape[-1])


def topk_bitmask(keys: jax.Array, valid: jax.Array | bool, num_keys: int) -> jax.Array:
    """Returns the bitmask `[num_keys / 32, T]` int32 of the top-k `keys` `[T, Kt]` that are `valid` `[T, Kt]`.

    No row repeats a key, so that sums of bits are their union.
    """
    T = len(keys)
    here = valid & (keys >= 0) & (keys < num_keys)
    word, row = jnp.where(here, keys // WORD, num_keys // WORD), jnp.arange(T, dtype=jnp.int32)[:, None]
    bits = jnp.uint32(1) << (keys % WORD).astype(jnp.uint32)
    words = jnp.zeros((num_keys // WORD, T), jnp.uint32).at[word, row].add(bits, mode="drop")
    return lax.bitcast_convert_type(words, jnp.int32)


def mla_prefill_spans(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    *,
    scale: float,
    shared_key: jax.Array,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes attention of queries to the keys from `starts` on and before `ends`.

    Args:
      q: `[T, H, N + P]` float32, bfloat16 or float16.
      k, shared_key: the parts of keys, `[K, H, N]` and for all heads `[K, P]`, of the same dtype, K a multiple of 128.
      v: `[K, H, V]` of the same dtype. Keys and values are finite in every block of 128 that a span touches, and may
        be anything elsewhere.
      starts, ends: `[T]` int32, the span of each query. Both never decrease; both are 0 for queries without keys, which
      follow all
        others.
      scale: factor on the scores before the softmax.
      backend: an implementation, or None for the one that suits the default device.

    Returns:
      out `[T, H, V]` in the dtype of `q` and lse `[T, H]` float32; 0 and +inf for a query without keys.

    Raises:
      ValueError: a shape or dtype does not fit.
    """
    checks.check_spans(q, k, v, starts, ends, shared_key)
    chosen = _resolve_kernel("mla_prefill_spans", backend, prefill_unsupported, q, v)
    if chosen is Backend.MOSAIC:
        return mosaic_ops.prefill_spans_mosaic(q, *_key_parts(k, shared_key), v, starts, ends, scale=scale)
    keys = whole_keys(k, shared_key)
    if chosen is Backend.TRITON:
        return triton_ops.prefill_spans(q, keys, v, starts, ends, len(k), scale=scale)
    return reference.spans_reference(q, keys, v, starts, ends, scale=scale)


def mla_prefill_topk(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bits: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    *,
    scale: float,
    shared_key: jax.Array,
    backend: Backend | None = None,
) -> jax.Array:
    """Computes attention of queries to the keys of their bitmasks.

    Args:
      q: `[T, H, N + P]` float32, bfloat16 or float16.
      k, shared_key: the parts of keys, `[K, H, N]` and for all heads `[K, P]`, of the same dtype, K a multiple of 128.
      v: `[K, H, V]` of the same dtype, finite.
      bits: `[K / 32, T]` int32, from `topk_bitmask`.
      starts, ends: `[T]` int32. A query's bits lie between its start and end. Both never decrease, except that they
        are 0 for queries without keys, anywhere.
      scale: factor on the scores before the softmax.
      backend: an implementation, or None for the one that suits the default device.

    Returns:
      out `[T, H, V]` in the dtype of `q`; 0 for a query without keys.

    Raises:
      ValueError: a shape or dtype does not fit.
    """
    checks.check_topk(q, k, v, bits, starts, ends, shared_key)
    chosen = _resolve_kernel("mla_prefill_topk", backend, prefill_unsupported, q, v)
    if chosen is Backend.MOSAIC:
        return mosaic_ops.prefill_spans_mosaic(q, *_key_parts(k, shared_key), v, starts, ends, bits, scale=scale)[0]
    attend = triton_ops.prefill_topk if chosen is Backend.TRITON else reference.topk_reference
    return attend(q, whole_keys(k, shared_key), v, bits, starts, ends, scale=scale)


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
    checks.check_merge(out_a, lse_a, out_b, lse_b)
    return _merged((out_a, out_b), (lse_a, lse_b))


def merge_parts(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes what `merge_attention` does of any number of disjoint sets: outputs `[N, ..., V]` and lse `[N, ...]`."""
    return _merged(tuple(out), tuple(lse))


def _merged(outs: tuple[jax.Array, ...], lses: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    empty = [jnp.isposinf(lse) for lse in lses]
    logs = [jnp.where(none, -jnp.inf, lse) for none, lse in zip(empty, lses, strict=True)]
    top = functools.reduce(jnp.maximum, logs)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = [jnp.exp(log - top) for log in logs]
    total, nothing = functools.reduce(jnp.add, weights), functools.reduce(jnp.logical_and, empty)
    safe_total = jnp.where(nothing, 1, total)
    parts = [_weighted(*part) for part in zip(outs, (w / safe_total for w in weights), empty, strict=True)]
    out = functools.reduce(jnp.add, parts)
    return out.astype(outs[0].dtype), jnp.where(nothing, jnp.inf, top + jnp.log(safe_total))


def _weighted(out: jax.Array, weight: jax.Array, empty: jax.Array) -> jax.Array:
    return jnp.where(empty[..., None], 0, out.astype(jnp.float32) * weight[..., None])


def write_pages(
    pages: jax.Array,
    latents: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    layer: jax.Array | int = 0,
    pages_per_layer: int,
    value_width: int = 512,
    backend: Backend | None = None,
) -> jax.Array:
    """Writes the latents of new tokens into the page pool; in place where the caller donates `pages`.

    Args:
      pages: the page pool, as in `mla_decode`.
      latents: `[T, R + P]` float32, bfloat16 or float16, normed latent and rotated key (interleaved pairs), which are
        rounded to the dtype of `pages` or quantized to FP8 rows.
      page_ids: `[T]` int32, page within the layer. Rows whose page is negative, or not below `pages_per_layer`, are
        dropped. No two kept rows may name the same place.
      offsets: `[T]` int32, row within the page, 0..63; others are dropped.
      layer, pages_per_layer, value_width, backend: as in `mla_decode`.

    Returns:
      The pool, of the shape and dtype of `pages`.

    Raises:
      ValueError: a shape, dtype or page size does not fit.
    """
    checks.check_write(pages, latents, page_ids, offsets, pages_per_layer, value_width)
    targets = _targets(page_ids, offsets, layer, pages_per_layer)
    if is_fp8(pages):  # a scatter on every platform: a row's scales are too small for TMA
        return write.write_fp8_rows(pages, pack_fp8(latents, value_width), targets, offsets, value_width)
    latents = latents.astype(pages.dtype)
    chosen = _resolve_kernel("write_pages", backend, _write_unsupported, pages)
    if chosen is Backend.MOSAIC:
        return write.write_rows_mosaic(pages, latents, targets, offsets)
    write_rows = triton_ops.write_rows if chosen is Backend.TRITON else write.write_rows
    return write_rows(pages, latents, targets, offsets)


def decode_unsupported(q: Any, pages: Any, value_width: int, backend: Backend | None = None) -> str | None:
    """Returns why `backend` has no decode kernel for these queries and pages (or their shapes and types), or None.

    None also for backends without kernels.
    """
    check = {Backend.MOSAIC: mosaic_ops.decode_unsupported, Backend.TRITON: triton_ops.decode_unsupported}
    unsupported = check.get(resolve_backend(requested=backend))
    return unsupported(q, pages, value_width) if unsupported else None


def prefill_unsupported(q: Any, v: Any, backend: Backend | None = None) -> str | None:
    """Returns why `backend` has no prefill kernel for these arrays (or their shapes and types), or None."""
    check = {Backend.MOSAIC: mosaic_ops.prefill_unsupported, Backend.TRITON: triton_ops.prefill_unsupported}
    unsupported = check.get(resolve_backend(requested=backend))
    return unsupported(q, v) if unsupported else None


def _targets(page_ids: jax.Array, offsets: jax.Array, layer: jax.Array | int, pages_per_layer: int) -> jax.Array:
    """Returns the pages of the pool [T], DROPPED for rows that are not written."""
    kept = (page_ids >= 0) & (page_ids < pages_per_layer) & (offsets >= 0) & (offsets < PAGE_SIZE)
    return jnp.where(kept, layer * pages_per_layer + page_ids, DROPPED)


def _write_unsupported(pages: jax.Array, backend: Backend) -> str | None:
    return write.mosaic_unsupported(pages) if backend is Backend.MOSAIC else None


def _resolve_kernel(
    operation: str, requested: Backend | None, unsupported: Callable[..., str | None], *arrays: Any
) -> Backend:
    """Returns the backend to run: the reference if the kernel is `unsupported` for the arrays, which is logged once."""
    chosen = resolve_operation(operation, requested)
    if (obstacle := unsupported(*arrays, chosen)) is None:
        return chosen
    warn_once(f"{operation}: jax.numpy instead of the {chosen.value.capitalize()} kernel, because {obstacle}")
    return Backend.REFERENCE
