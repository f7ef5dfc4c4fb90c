"""Materialized prefill attention to cached and new keys: to spans of keys, or to top-k keys by a bitmask.

A bitmask takes a 32nd of the memory of 32-bit scores, which are never stored. The kernels multiply whole blocks of keys
between the first and the last key that a block of queries may see.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend, with_fallback
from pallas_kernels.mla import checks, mosaic_ops, reference, triton_ops
from pallas_kernels.mla.layout import PAGE_SIZE, fp8_rows_of_pages, is_fp8, unpack_fp8
from pallas_kernels.mla.ops import prefill_unsupported, resolve_kernel, whole_keys

WORD = 32
"""Keys whose bits share a word."""


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
    backend = with_fallback("mla_prefill_spans", backend)
    chosen = resolve_kernel("mla_prefill_spans", backend, prefill_unsupported(q, v, backend))
    if chosen is Backend.MOSAIC:
        keys, shared = (k, shared_key) if mosaic_ops.takes_parts(k, shared_key) else (whole_keys(k, shared_key), None)
        return mosaic_ops.prefill_spans_mosaic(q, keys, shared, v, starts, ends, scale=scale)
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
    backend = with_fallback("mla_prefill_topk", backend)
    chosen = resolve_kernel("mla_prefill_topk", backend, prefill_unsupported(q, v, backend))
    if chosen is Backend.MOSAIC:
        keys, shared = (k, shared_key) if mosaic_ops.takes_parts(k, shared_key) else (whole_keys(k, shared_key), None)
        return mosaic_ops.prefill_topk_mosaic(q, keys, shared, v, bits, starts, ends, scale=scale)
    attend = triton_ops.prefill_topk if chosen is Backend.TRITON else reference.topk_reference
    return attend(q, whole_keys(k, shared_key), v, bits, starts, ends, scale=scale)
