"""Compressed attention on Triton kernels, on Hopper too."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend, traced_gpu
from pallas_kernels.compressed.row_list import RowList
from pallas_kernels.dsa.triton_ops import traced_for, usable
from pallas_kernels.mla.triton_ops import base_two
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import listed_tile

__all__ = ["attend", "bytes_of_query", "unsupported", "usable"]

SHARE = 1280
"""Slots of a query's list that one program reads: the window and the entries that DeepSeek-V4-Pro chooses fit one."""

_HALF_TYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_GROUP = 64  # values of an FP8 row that share a scale
_JOIN_WARPS = 4


def attend(
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
    with traced_for(backend):
        tile = listed_tile(traced_gpu(), H, fp8_rows=fp8)
        first_entry = -(-window.numbers.shape[1] // tile.columns) * tile.columns
        shares = -(-(first_entry + listed) // SHARE)
        out, lse = call.start(
            "compressed.attend",
            (q, sink, _scalar(layer), own, *_operands(window), *_operands(last)),
            (
                jax.ShapeDtypeStruct((N, shares, H, d), q.dtype if shares == 1 else jnp.float32),
                jax.ShapeDtypeStruct((N, shares, H), jnp.float32),
            ),
            grid=(N, shares, -(-H // tile.rows)),
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
            NATIVE=fp8 and traced_gpu().fp8,
            BLOCK_H=tile.rows,
            BLOCK_N=tile.columns,
        )
        if shares == 1:
            return out[:, 0], _natural(lse[:, 0])
        joined, joined_lse = call.start(
            "compressed.join",
            (out, lse, window.counts, last.counts),
            (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((N, H), jnp.float32)),
            grid=(N, H),
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
    return rows.array, rows.numbers, rows.counts, _scalar(rows.layer)


def _scalar(number: jax.Array | int) -> jax.Array:
    return jnp.asarray(number, jnp.int32).reshape(1)


def bytes_of_query(heads: int, d: int, listed: int) -> int:
    """Returns the bytes of a query's numbers, and of its shares where there are several."""
    shares = -(-listed // SHARE) + 1
    return 4 * (listed + (shares * heads * (d + 1) if listed > SHARE else 0))


def unsupported(q: Any, array: Any, plain: int) -> str | None:
    """Returns why the kernel does not support these arrays (or their shapes and types), or None if it does."""
    d = q.shape[-1]
    if d & (d - 1) or not 32 <= d <= 512:  # halves of 16 values are the least that a product takes
        return f"rows of {d} values are no power of two from 32 to 512"
    if q.dtype not in _HALF_TYPES:
        return f"{q.dtype} is neither bfloat16 nor float16"
    if array.dtype == jnp.uint8:
        whole = plain % _GROUP == d % _GROUP == 0
        return None if whole else f"FP8 rows of {plain} and {d - plain} values are no whole groups of {_GROUP}"
    return None if array.dtype == q.dtype else f"rows of {array.dtype} are not of the queries' type, {q.dtype}"
