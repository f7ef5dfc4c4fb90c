"""Attention to a window of tokens and to compressed entries (DeepSeek-V4), whose rows are in paged arrays.

It runs in jax.numpy, where every query copies the rows that it attends to, or in Triton kernels, on Hopper too.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend, resolve_operation, traced_gpu, uses_triton, warn_once
from pallas_kernels.entries import decode_rows
from pallas_kernels.mla import mosaic_listed
from pallas_kernels.mla.layout import HALF_DTYPES
from pallas_kernels.mla.triton_ops import base_two
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import listed_tile

_LEAST = -1e30  # below every logit
SHARE = 1280
"""Slots of a query's list that one program reads: the window and the entries that DeepSeek-V4-Pro chooses fit one."""

_GROUP = 64  # values of an FP8 row that share a scale
_JOIN_WARPS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowList:
    """The rows of one layer of an array that each of N queries attends to.

    Row i of page p of the layer has the number `p * R + i`. In a list of window rows, `-1 - t` is the row of token t of
    the step, which the array does not have yet. Numbers at or past a query's count are never followed.
    """

    array: jax.Array  # [pages, R, W]
    numbers: jax.Array  # [N, K] int32
    counts: jax.Array  # [N] int32, at most K
    layer: jax.Array | int = 0
    layer_rows: int = dataclasses.field(default=0, metadata={"static": True})  # of the array, in each layer


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
    chosen = resolve_operation("attend_compressed", backend)
    if chosen is Backend.MOSAIC and mosaic_listed.supports(q, window.array, plain):
        return attend_mosaic(q, sink, own, window, entries, scale=scale, layer=layer)
    if uses_triton(chosen):
        if (reason := unsupported(q, window.array, plain)) is None:
            how: dict[str, Any] = {"scale": scale, "plain": plain, "layer": layer, "backend": chosen}
            return _kernel(q, sink, own, window, entries, **how)
        warn_once(f"compressed attention: jax.numpy instead of a kernel, because {reason}")
    of_layer = lax.dynamic_index_in_dim(sink, layer, keepdims=False)
    return _reference(q, of_layer, own, window, entries, scale=scale, plain=plain)


def bytes_of_query(q: Any, array: Any, listed: int, plain: int, backend: Backend | None) -> int:
    """Returns the most bytes that a query of `q` with a list of so many rows of `array` adds to a step's memory."""
    H, d = q.shape[-2:]
    chosen = resolve_operation("attend_compressed", backend)
    if uses_triton(chosen) and unsupported(q, array, plain) is None:
        return kernel_bytes_of_query(H, d, listed)
    return listed * max(4 * H, d * q.dtype.itemsize)  # logits, or copies


def kernel_bytes_of_query(heads: int, d: int, listed: int) -> int:
    """Returns the bytes of the row numbers of a query of the kernel, and of its shares where there are several."""
    shares = -(-listed // SHARE) + 1
    return 4 * (listed + (shares * heads * (d + 1) if listed > SHARE else 0))


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


def _reference(
    q: jax.Array, sink: jax.Array, own: jax.Array, window: RowList, entries: RowList | None, *, scale: float, plain: int
) -> tuple[jax.Array, jax.Array]:
    """See `attend_compressed` and `attend_part`."""
    copies, visible = [], []
    for rows in (window,) if entries is None else (window, entries):
        (_, _, width), (_, listed) = rows.array.shape, rows.numbers.shape
        copied = (
            rows.array.reshape(-1, width)
            .at[rows.layer * rows.layer_rows + jnp.maximum(rows.numbers, 0)]
            .get(mode="clip")
        )
        if rows is window:
            new = own.at[jnp.maximum(-1 - rows.numbers, 0)].get(mode="clip")
            copied = jnp.where((rows.numbers < 0)[..., None], new, copied)
        copies.append(copied)
        visible.append(jnp.arange(listed) < rows.counts[:, None])
    values = decode_rows(jnp.concatenate(copies, axis=1), plain, q.shape[-1], q.dtype)
    seen = jnp.concatenate(visible, axis=1)
    values = jnp.where(seen[..., None], values, 0)  # a weight of 0 does not undo NaN
    out, lse = sink_attention(q[:, None], values, seen[:, None], sink, scale)
    return out[:, 0], lse[:, 0]


@jax.named_scope("attend")
def sink_attention(
    q: jax.Array, keys: jax.Array, visible: jax.Array, sink: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Returns what heads see `[B, T, H, d]`, weighted sums of `keys`, which are the values too, and lse `[B, T, H]`.

    Args:
      q: `[B, T, H, d]`.
      keys: `[B, S, d]`, tokens and entries in any order.
      visible: bool `[B, T, S]`.
      sink: float32 `[H]`, the logit of a key whose value is zero, which every query sees; -inf where there is none.
      scale: factor on the products of queries and keys.
    """
    logits = jnp.einsum("bthd,bsd->bths", q, keys, preferred_element_type=jnp.float32, precision="highest") * scale
    logits = jnp.where(visible[:, :, None], logits, -jnp.inf)
    highest = jnp.maximum(jnp.maximum(logits.max(-1), sink), _LEAST)
    weights = jnp.exp(logits - highest[..., None])
    total = weights.sum(-1) + jnp.exp(sink - highest)
    seen = total > 0
    weights = (weights / jnp.where(seen, total, 1)[..., None]).astype(keys.dtype)
    out = jnp.einsum("bths,bsd->bthd", weights, keys, precision="highest")
    return out, jnp.where(seen, highest + jnp.log(total), jnp.inf)


def _kernel(
    q: jax.Array,
    sink: jax.Array,
    own: jax.Array,
    window: RowList,
    entries: RowList | None,
    *,
    scale: float,
    plain: int,
    layer: jax.Array | int,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """See `attend_compressed` and `attend_part`."""
    (N, H, d), fp8 = q.shape, own.dtype == jnp.uint8
    listed = 0 if entries is None else entries.numbers.shape[1]
    last = RowList(window.array, window.numbers, jnp.zeros_like(window.counts)) if entries is None else entries
    tile = listed_tile(traced_gpu(backend), H, fp8_rows=fp8)
    first_entry = -(-window.numbers.shape[1] // tile.columns) * tile.columns
    shares = -(-(first_entry + listed) // SHARE)
    out, lse = call.start(
        "compressed.attend",
        (q, sink, call.scalar(layer), own, *_operands(window), *_operands(last)),
        (
            jax.ShapeDtypeStruct((N, shares, H, d), q.dtype if shares == 1 else jnp.float32),
            jax.ShapeDtypeStruct((N, shares, H), jnp.float32),
        ),
        grid=(N, shares, -(-H // tile.rows)),
        backend=backend,
        warps=tile.warps,
        stages=tile.stages,
        SCALE=base_two(scale),
        HEADS=H,
        D=d,
        WIDTH=own.shape[1],
        PLAIN=plain,
        WINDOW=window.numbers.shape[1],
        WINDOW_ROWS=window.layer_rows,
        ENTRY_ROWS=last.layer_rows,
        ENTRIES=last.numbers.shape[1],
        SHARE=SHARE,
        SHARES=shares,
        FP8=fp8,
        NATIVE=fp8 and traced_gpu(backend).fp8,
        BLOCK_H=tile.rows,
        BLOCK_N=tile.columns,
    )
    if shares == 1:
        return out[:, 0], _natural(lse[:, 0])
    return _join(q, out, lse, window, last, first_entry, backend)


def attend_mosaic(
    q: jax.Array,
    sink: jax.Array,
    own: jax.Array,
    window: RowList,
    entries: RowList | None,
    *,
    scale: float,
    layer: jax.Array | int,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes `attend_compressed` and its log-sum-exp in Mosaic's kernel, for what `mosaic_listed` supports.

    `interpret` holds the interpreter's settings. Triton's kernel joins the shares of a list; without jax-triton a list
    is one share.
    """
    N, H, d = q.shape
    last = dataclasses.replace(window, counts=jnp.zeros_like(window.counts)) if entries is None else entries
    numbers = [_whole_tiles(rows.numbers) for rows in (window, last)]
    shape = mosaic_listed.ListShape(
        heads=H,
        queries=1,
        rows=H,
        parts=1,
        dtype=q.dtype,
        scale=scale,
        interpreted=interpret is not None,
        fp8=own.dtype == jnp.uint8,
        window=numbers[0].shape[1],
        entries=numbers[1].shape[1],
        share=SHARE if uses_triton(Backend.MOSAIC) else max(SHARE, sum(each.shape[1] for each in numbers)),
        window_rows=window.layer_rows,
        entry_rows=last.layer_rows,
    )
    lists = [
        (rows.array.reshape(-1, own.shape[1]), n, rows.counts) for rows, n in zip((window, last), numbers, strict=True)
    ]
    layers = jnp.stack([jnp.asarray(each, jnp.int32) for each in (layer, window.layer, last.layer)])
    out, lse = mosaic_listed.attend_lists(shape, q, sink, own, lists[0], lists[1], layers, interpret=interpret)
    if shape.shares == 1:
        return out, _natural(lse)
    out, lse = out.reshape(N, shape.shares, H, d), lse.reshape(N, shape.shares, H)
    return _join(q, out, lse, window, last, shape.window, Backend.MOSAIC)


def _whole_tiles(numbers: jax.Array) -> jax.Array:
    """Returns row numbers with slots added to whole tiles."""
    return jnp.pad(numbers, ((0, 0), (0, -numbers.shape[1] % mosaic_listed.TILE)))


def _join(
    q: jax.Array, out: jax.Array, lse: jax.Array, window: RowList, last: RowList, first_entry: int, backend: Backend
) -> tuple[jax.Array, jax.Array]:
    """Joins the shares of lists, `[N, shares, H, d]`."""
    N, shares, H, d = out.shape
    joined, joined_lse = call.start(
        "compressed.join",
        (out, lse, window.counts, last.counts),
        (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((N, H), jnp.float32)),
        grid=(N, H),
        backend=backend,
        warps=_JOIN_WARPS,
        HEADS=H,
        D=d,
        FIRST_ENTRY=first_entry,
        SHARE=SHARE,
        SHARES=shares,
    )
    return joined, _natural(joined_lse)


def _natural(lse: jax.Array) -> jax.Array:
    """Returns the kernels' log-sum-exps, which are to base two, as those of `attend_part`."""
    return jnp.where(lse > -1e29, lse * math.log(2), jnp.inf)


def _operands(rows: RowList) -> tuple[jax.Array, ...]:
    return rows.array, rows.numbers, rows.counts, call.scalar(rows.layer)


def unsupported(q: Any, array: Any, plain: int) -> str | None:
    """Returns why the kernel does not support these arrays (or their shapes and types), or None if it does."""
    d = q.shape[-1]
    if d & (d - 1) or not 32 <= d <= 512:  # halves of 16 values are the least that a product takes
        return f"rows of {d} values are no power of two from 32 to 512"
    if q.dtype not in HALF_DTYPES:
        return f"{q.dtype} is neither bfloat16 nor float16"
    if array.dtype == jnp.uint8:
        whole = plain % _GROUP == d % _GROUP == 0
        return None if whole else f"FP8 rows of {plain} and {d - plain} values are no whole groups of {_GROUP}"
    return None if array.dtype == q.dtype else f"rows of {array.dtype} are not of the queries' type, {q.dtype}"
