"""The public operation of compressed attention: checks, then jax.numpy or a GPU's kernel."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend, resolve_backend, with_fallback
from pallas_kernels.compressed import reference, triton_ops
from pallas_kernels.compressed.row_list import RowList

_log = logging.getLogger(__name__)


def attend_compressed(
    q: jax.Array,
    sink: jax.Array,
    own: jax.Array,
    window: RowList,
    entries: RowList | None,
    *,
    scale: float,
    plain: int,
    layer: jax.Array | int = 0,
    backend: Backend | None = None,
) -> jax.Array:
    """Computes the attention of each query to its own rows, in one softmax with a sink (arXiv:2606.19348).

    A row of d values is key and value of all heads at once. It is FlashMLA's sparse decode with an extra cache and
    `attn_sink`. A query's result depends on its own list alone, not on how many queries there are.

    Args:
      q: `[N, H, d]` float32, bfloat16 or float16.
      sink: `[L, H]` float32, the logit of a key whose value is zero.
      own: `[T, W]` of the arrays' dtype, rows of the step's tokens.
      window: rows of the last tokens. Its array is of a float type, W is then d; or uint8, rows of `encode_rows`.
      entries: rows of compressed entries, of the same dtype and W, or None.
      scale: factor on the products of queries and keys.
      plain: how many values of a row are not rotated: those that FP8 rows have in e4m3.
      layer: that of `sink`, static or traced. XLA would copy a slice for the kernel.
      backend: an implementation, or None for the one that suits the default device.

    Returns:
      `[N, H, d]` in the dtype of `q`; 0 for a query without rows.

    Raises:
      ValueError: a shape or dtype does not fit.
    """
    how: dict[str, Any] = {"scale": scale, "plain": plain, "layer": layer, "backend": backend}
    return _attend(q, sink, own, window, entries, **how)[0]


def attend_part(
    q: jax.Array,
    own: jax.Array,
    window: RowList,
    entries: RowList,
    *,
    scale: float,
    plain: int,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes `attend_compressed` without a sink, for rows that are a part of those that a query sees.

    Returns:
      out `[N, H, d]` in the dtype of `q`, and lse `[N, H]` float32; 0 and +inf for a query without rows.
    """
    none = jnp.full((1, q.shape[1]), -jnp.inf)
    return _attend(q, none, own, window, entries, scale=scale, plain=plain, layer=0, backend=backend)


def _attend(
    q: jax.Array,
    sink: jax.Array,
    own: jax.Array,
    window: RowList,
    entries: RowList | None,
    *,
    scale: float,
    plain: int,
    layer: jax.Array | int,
    backend: Backend | None,
) -> tuple[jax.Array, jax.Array]:
    _check(q, sink, own, window, entries)
    chosen = resolve_backend(requested=with_fallback("attend_compressed", backend))
    if triton_ops.usable(chosen):
        if (reason := triton_ops.unsupported(q, window.array, plain)) is None:
            how: dict[str, Any] = {"scale": scale, "plain": plain, "layer": layer, "backend": chosen}
            return triton_ops.attend(q, sink, own, window, entries, **how)
        _log_reference(reason)
    of_layer = lax.dynamic_index_in_dim(sink, layer, keepdims=False)
    return reference.attend(q, of_layer, own, window, entries, scale=scale, plain=plain)


def bytes_of_query(q: Any, array: Any, listed: int, plain: int, backend: Backend | None) -> int:
    """Returns the most bytes that a query of `q` with a list of so many rows of `array` adds to a step's memory."""
    H, d = q.shape[-2:]
    chosen = resolve_backend(requested=with_fallback("attend_compressed", backend))
    if triton_ops.usable(chosen) and triton_ops.unsupported(q, array, plain) is None:
        return triton_ops.bytes_of_query(H, d, listed)
    return listed * max(4 * H, d * q.dtype.itemsize)  # logits, or copies


def _check(q: jax.Array, sink: jax.Array, own: jax.Array, window: RowList, entries: RowList | None) -> None:
    if q.ndim != 3 or sink.ndim != 2 or sink.shape[1:] != q.shape[1:2]:
        raise ValueError(f"q must be [N, H, d] and sink [L, H], got {q.shape} and {sink.shape}")
    for name, rows in (("window", window), ("entries", entries)):
        if rows is None:
            continue
        if rows.array.ndim != 3 or rows.array.dtype != own.dtype or rows.array.shape[2:] != own.shape[1:]:
            raise ValueError(
                f"the array of {name} must be [pages, R, W] with rows as own's: {rows.array.dtype}{rows.array.shape} "
                f"and {own.dtype}{own.shape}"
            )
        if rows.numbers.shape[:1] != q.shape[:1] or rows.counts.shape != q.shape[:1]:
            raise ValueError(
                f"{name} must have numbers [N, K] and counts [N] of {len(q)} queries, got {rows.numbers.shape} and "
                f"{rows.counts.shape}"
            )
    if own.dtype != jnp.uint8 and own.shape[1] != q.shape[2]:
        raise ValueError(f"rows of {own.shape[1]} values do not fit queries of {q.shape[2]}")


@functools.cache
def _log_reference(reason: str) -> None:
    _log.warning("compressed attention: jax.numpy instead of a kernel, because %s", reason)
