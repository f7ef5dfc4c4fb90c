"""Index scores for Hopper: the kernel behind `index_scores`, for keys of 16 bits and for FP8 keys.

A thread block of one warpgroup scores one query against up to `PAGES` pages of its request. The tensor core multiplies
a page's 64 keys with the query's heads, so that a head is a column: its weight scales the column, and the sum over
heads is along a row. Pages come by TMA through a ring of `STAGES`. Blocks past a query's visible tokens end at once.

FP8 keys are multiplied with e4m3 queries, unconverted: a key's scale multiplies its sum, a query's scale its weight. A
page is 8,448 bytes in place of 16,384.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dsa.keys import fp8_views
from pallas_kernels.mla.layout import HALF_DTYPES, PAGE_SIZE, is_fp8
from pallas_kernels.mosaic import plgpu, row_layout, swizzle_transforms

PAGES = 32
"""Pages of a thread block."""

STAGES = 4


@dataclasses.dataclass(frozen=True)
class _ScoreWork:
    """One thread block's query and its pages, `count` from number `begin` on."""

    pool: Any
    table: Any
    first_page: Any
    smem: Any
    scales: Any
    """FP8 pages as float32, with the keys' scales at the end of each; None for keys of 16 bits."""
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
    """See `raw_scores`; FP8 pages need `fp8_queries`. Scores past a query's last page are not written."""
    T, heads, columns, fp8 = len(q), weights.shape[1], page_table.shape[1], is_fp8(pool)
    chunks, width = q.shape[1] // heads, q.shape[2]  # keys of 16 bits are one chunk
    tiled = swizzle_transforms(q.dtype, width)
    scales = {"scales": plgpu.SMEM((STAGES, PAGE_SIZE), jnp.float32)} if fp8 else {}
    kernel = plgpu.kernel(
        _body,
        out_type=jax.ShapeDtypeStruct((T, columns * PAGE_SIZE), jnp.float32),
        grid=(T, -(-columns // PAGES)),
        grid_names=("row", "part"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types={
            "query": plgpu.SMEM((chunks * heads, width), q.dtype, transforms=tiled),
            "keys": plgpu.SMEM((STAGES, chunks * PAGE_SIZE, width), q.dtype, transforms=tiled),
            "sums": plgpu.SMEM((2, PAGE_SIZE), jnp.float32),
            "query_full": plgpu.Barrier(),
            "keys_full": plgpu.Barrier(num_arrivals=1 + fp8, num_barriers=STAGES),
            **scales,
        },
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="dsa_scores",
        interpret=interpret,
    )
    first = jnp.asarray(first_page, jnp.int32).reshape(1)
    return kernel(q, weights, fp8_views(pool, chunks * width) if fp8 else (pool,), page_table, visible, first)


def _body(q, weights, pool, table, visible, first_page, out, **smem):
    row, part = lax.axis_index("row"), lax.axis_index("part")
    pages = lax.div(jnp.maximum(visible[row], 0) + (PAGE_SIZE - 1), jnp.int32(PAGE_SIZE))
    begin = part * PAGES
    count = jnp.clip(pages - begin, 0, PAGES)
    values, *scales = pool
    memory = types.SimpleNamespace(**smem)
    work = _ScoreWork(values, table, first_page, memory, scales[0] if scales else None, row, begin, count)

    @pl.when(count > 0)
    def _():
        plgpu.copy_gmem_to_smem(q.at[row], work.smem.query, work.smem.query_full)
        for stage in range(STAGES):
            pl.when(count > stage)(functools.partial(_load, work, jnp.int32(stage)))
        plgpu.barrier_wait(work.smem.query_full)
        factors = plgpu.load(weights.at[row], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        lax.fori_loop(0, count, lambda i, _: _score(work, out, factors, i), None)
        plgpu.wait_smem_to_gmem(0)


def _load(work: _ScoreWork, index) -> None:
    """Fetches the block's page `index` into its stage, which is free."""
    stage = lax.rem(index, jnp.int32(STAGES))
    page = work.first_page[0] + work.table[work.row, work.begin + index]
    full = work.smem.keys_full.at[stage]
    keys = work.smem.keys.at[stage]
    plgpu.copy_gmem_to_smem(work.pool.at[page, pl.ds(0, keys.shape[0])], keys, full)
    if work.scales is not None:
        last = pl.ds(work.scales.shape[1] - PAGE_SIZE, PAGE_SIZE)
        plgpu.copy_gmem_to_smem(work.scales.at[page, last], work.smem.scales.at[stage], full)


def _score(work: _ScoreWork, out, factors, index) -> None:
    smem, stage, buffer = work.smem, lax.rem(index, jnp.int32(STAGES)), lax.rem(index, jnp.int32(2))
    plgpu.barrier_wait(smem.keys_full.at[stage])

    def products(accumulator):
        for chunk in range(smem.keys.shape[1] // PAGE_SIZE):
            keys, heads = pl.ds(chunk * PAGE_SIZE, PAGE_SIZE), pl.ds(chunk * len(factors), len(factors))
            plgpu.wgmma(accumulator, smem.keys.at[stage, keys], smem.query.at[heads].T)
        return accumulator[...]

    scores = pl.run_scoped(products, plgpu.ACC((PAGE_SIZE, len(factors)), jnp.float32))
    sums = (jnp.maximum(scores, 0.0) * lax.broadcast_in_dim(factors, scores.shape, [1])).sum(axis=1)
    if work.scales is not None:
        sums = sums * plgpu.load(smem.scales.at[stage], layout=row_layout())
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    smem.sums.at[buffer][...] = sums
    plgpu.commit_smem()  # of the scales' readers too, before their stage is filled again
    pl.when(index + STAGES < work.count)(functools.partial(_load, work, index + STAGES))
    place = pl.ds((work.begin + index) * PAGE_SIZE, PAGE_SIZE)
    plgpu.copy_smem_to_gmem(smem.sums.at[buffer], out.at[work.row, place])


def unsupported(q: Any, pool: Any) -> str | None:
    """Returns why the kernel does not support these arrays (or their shapes and types), or None if it does."""
    heads, width = q.shape[-2:]
    if is_fp8(pool):
        return None if width == 128 and heads % 8 == 0 else f"{heads} heads of {width} on FP8 keys are not 8n of 128"
    if q.dtype not in HALF_DTYPES or pool.dtype != q.dtype:
        return f"queries of {q.dtype} and index keys of {pool.dtype} are not of one type of 16 bits"
    if heads % 8 or width % 64:
        return f"{heads} heads of {width} are no multiples of 8 and 64"
    return None
