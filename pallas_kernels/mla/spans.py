"""Prefill attention in expanded form to spans of keys: each query to those of its own request, cached ones and new."""

import jax

from pallas_kernels.backend import Backend, with_fallback
from pallas_kernels.mla import checks, mosaic_ops, reference, triton_ops
from pallas_kernels.mla.ops import dispatched, prefill_unsupported, whole_keys


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
      v: `[K, H, V]` of the same dtype. Keys and values are finite in each 128 of which one is in a span, and may be
        anything elsewhere.
      starts, ends: `[T]` int32, the span of each query. Both do not fall from one query to the next; both are 0 for a
        query that sees nothing, and such queries stand behind all others.
      scale: factor on the scores before the softmax.
      backend: an implementation, or None for the one that suits the default device.

    Returns:
      out `[T, H, V]` in the dtype of `q` and lse `[T, H]` float32; 0 and +inf for a query without keys.

    Raises:
      ValueError: a shape or dtype does not fit.
    """
    checks.check_spans(q, k, v, starts, ends, shared_key)
    backend = with_fallback("mla_prefill_spans", backend)
    chosen = dispatched("mla_prefill_spans", backend, prefill_unsupported(q, v, backend))
    if chosen is Backend.MOSAIC:
        keys, shared = (k, shared_key) if mosaic_ops.takes_parts(k, shared_key) else (whole_keys(k, shared_key), None)
        return mosaic_ops.prefill_spans_mosaic(q, keys, shared, v, starts, ends, scale=scale)
    keys = whole_keys(k, shared_key)
    if chosen is Backend.TRITON:
        return triton_ops.prefill_spans(q, keys, v, starts, ends, len(k), scale=scale)
    return reference.spans_reference(q, keys, v, starts, ends, scale=scale)
