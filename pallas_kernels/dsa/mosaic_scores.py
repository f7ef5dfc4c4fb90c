"""Index scores for Hopper: the kernel behind `index_scores` for keys of 16 bits.

A thread block of one warpgroup takes one query and up to `PAGES` pages of its request. The tensor core multiplies a
page's 64 keys with the query's heads, so that a head is a column: its weight is a factor on the column, and the sum
over heads stays within a row. Pages come by TMA through a ring of `STAGES`. Blocks beyond what a query sees end at
once.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla.layout import PAGE_SIZE
from pallas_kernels.mosaic import swizzle_transforms

PAGES = 32
"""Pages of a thread block."""

STAGES = 4
_HALF_TYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_LAYOUT = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class _Work:
    """One thread block's query and its pages, `count` from number `begin` on."""

    pool: Any
    table: Any
    first_page: Any
    smem: Any
    row: Any
    begin: Any
    count: Any


def index_scores_mosaic(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    visible: jax.Array,
    *,
    first_page: jax.Array | int,
    interpret: Any = None,
) -> jax.Array:
    """See `index_scores`; scores beyond the pages that a query sees are not written."""
    (T, heads, width), columns = q.shape, page_table.shape[1]
    tiled = swizzle_transforms(q.dtype, width)
    kernel = plgpu.kernel(
        _body,
        out_type=jax.ShapeDtypeStruct((T, columns * PAGE_SIZE), jnp.float32),
        grid=(T, -(-columns // PAGES)),
        grid_names=("row", "part"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types={
            "query": plgpu.SMEM((heads, width), q.dtype, transforms=tiled),
            "keys": plgpu.SMEM((STAGES, PAGE_SIZE, width), q.dtype, transforms=tiled),
            "sums": plgpu.SMEM((2, PAGE_SIZE), jnp.float32),
            "query_full": plgpu.Barrier(),
            "keys_full": plgpu.Barrier(num_barriers=STAGES),
        },
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="dsa_scores",
        interpret=interpret,
    )
    return kernel(q, weights, pool, page_table, visible, jnp.asarray(first_page, jnp.int32).reshape(1))


def _body(q, weights, pool, table, visible, first_page, out, **smem):
    row, part = lax.axis_index("row"), lax.axis_index("part")
    pages = lax.div(jnp.maximum(visible[row], 0) + (PAGE_SIZE - 1), jnp.int32(PAGE_SIZE))
    begin = part * PAGES
    count = jnp.clip(pages - begin, 0, PAGES)
    work = _Work(pool, table, first_page, types.SimpleNamespace(**smem), row, begin, count)

    @pl.when(count > 0)
    def _():
        plgpu.copy_gmem_to_smem(q.at[row], work.smem.query, work.smem.query_full)
        for stage in range(STAGES):
            pl.when(count > stage)(functools.partial(_load, work, jnp.int32(stage)))
        plgpu.barrier_wait(work.smem.query_full)
        factors = plgpu.load(weights.at[row], layout=_LAYOUT.reduce(0), optimized=False)
        lax.fori_loop(0, count, lambda i, _: _score(work, out, factors, i), None)
        plgpu.wait_smem_to_gmem(0)


def _load(work: _Work, index) -> None:
    """Fetches page `index` of the block's into its stage, which nobody reads any more."""
    stage = lax.rem(index, jnp.int32(STAGES))
    page = work.first_page[0] + work.table[work.row, work.begin + index]
    plgpu.copy_gmem_to_smem(work.pool.at[page], work.smem.keys.at[stage], work.smem.keys_full.at[stage])


def _score(work: _Work, out, factors, index) -> None:
    smem, stage, buffer = work.smem, lax.rem(index, jnp.int32(STAGES)), lax.rem(index, jnp.int32(2))
    plgpu.barrier_wait(smem.keys_full.at[stage])

    def products(accumulator):
        plgpu.wgmma(accumulator, smem.keys.at[stage], smem.query.T)
        return accumulator[...]

    scores = pl.run_scoped(products, plgpu.ACC((PAGE_SIZE, smem.query.shape[0]), jnp.float32))
    pl.when(index + STAGES < work.count)(functools.partial(_load, work, index + STAGES))
    sums = (jnp.maximum(scores, 0.0) * lax.broadcast_in_dim(factors, scores.shape, [1])).sum(axis=1)
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    smem.sums.at[buffer][...] = sums
    plgpu.commit_smem()
    place = pl.ds((work.begin + index) * PAGE_SIZE, PAGE_SIZE)
    plgpu.copy_smem_to_gmem(smem.sums.at[buffer], out.at[work.row, place])


def unsupported(q: Any, pool: Any) -> str | None:
    """Returns why the kernel cannot take these arrays (or their shapes and types), or None where it can."""
    heads, width = q.shape[-2:]
    if q.dtype not in _HALF_TYPES or pool.dtype != q.dtype:
        return f"queries of {q.dtype} and index keys of {pool.dtype} are not of one type of 16 bits"
    if heads % 8 or width % 64:
        return f"{heads} heads of {width} are no multiples of 8 and 64"
    return None
