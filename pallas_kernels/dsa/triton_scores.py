"""Index scores on a Triton kernel, for the GPUs that have no Mosaic kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import traced_gpu
from pallas_kernels.dsa.keys import fp8_chunk
from pallas_kernels.mla.layout import PAGE_SIZE, is_fp8
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import power_of_two

_PAGES = 32
"""Pages of a program: 2,048 tokens."""

_HALF_TYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_WARPS, _STAGES = 4, 3


def index_scores_triton(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    visible: jax.Array,
    *,
    first_page: jax.Array | int,
) -> jax.Array:
    """See `scores.raw_scores`; FP8 pages take what `keys.fp8_queries` gives."""
    (T, heads), columns, fp8 = weights.shape, page_table.shape[1], is_fp8(pool)
    width = q.size // (T * heads)
    (scores,) = call.start(
        "scores.scores",
        (
            lax.bitcast_convert_type(q, jnp.uint8) if fp8 else q,
            weights,
            pool,
            page_table,
            visible,
            jnp.asarray(first_page, jnp.int32).reshape(1),
        ),
        (jax.ShapeDtypeStruct((T, columns * PAGE_SIZE), jnp.float32),),
        grid=(T, -(-columns // _PAGES)),
        warps=_WARPS,
        stages=_STAGES,
        HEADS=heads,
        WIDTH=width,
        CHUNK=fp8_chunk(width) if fp8 else width,
        PAGE=PAGE_SIZE,
        PAGE_ITEMS=PAGE_SIZE * pool.shape[2],
        TABLE_WIDTH=columns,
        FP8=fp8,
        NATIVE=fp8 and traced_gpu().fp8,
        BLOCK_H=power_of_two(heads),
        PAGES=_PAGES,
    )
    return scores


def unsupported(q: Any, pool: Any) -> str | None:
    """Returns why the kernel cannot take these arrays (or their shapes and types), or None where it can."""
    heads, width = q.shape[-2:]
    if width & (width - 1) or not 16 <= width <= 128 or heads > 128:
        return f"{heads} heads of {width} are more than 128, or no power of two from 16 to 128 wide"
    if is_fp8(pool):
        return None if width >= 32 else f"FP8 keys of {width} are narrower than what a tensor core multiplies, 32"
    if q.dtype not in _HALF_TYPES or pool.dtype != q.dtype:
        return f"queries of {q.dtype} and index keys of {pool.dtype} are not of one type of 16 bits"
    return None
