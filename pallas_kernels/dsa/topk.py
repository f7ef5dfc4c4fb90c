"""Index scores and top-k selection: which cached tokens each query attends to."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend, resolve_backend, resolve_operation, traced_gpu, uses_triton, with_fallback
from pallas_kernels.dsa import mosaic_scores
from pallas_kernels.dsa.keys import check_keys, fp8_chunk, fp8_queries, keys_of_pages, queries_for
from pallas_kernels.mla.layout import HALF_DTYPES, PAGE_SIZE, is_fp8
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import power_of_two

_PAGES_PER_STEP = 2
_SPAN = _PAGES_PER_STEP * PAGE_SIZE
_SELECT_BLOCK, _SELECT_WARPS = 4096, 16  # one program per row and multiprocessor: many loads in flight
_SCORE_WARPS, _SCORE_STAGES = 4, 3
SCORE_PAGES = 32
"""Pages of a program of Triton's scores: 2,048 tokens."""


def index_scores(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    visible: jax.Array,
    *,
    first_page: jax.Array | int,
    backend: Backend | None = None,
) -> jax.Array:
    """Scores the cached tokens for each query: the weighted sum over heads of `relu(q . k)`, in float32.

    Args:
      q: `[T, Hi, Y]` of a float type, rotated.
      weights: `[T, Hi]` float32, one factor per head.
      pool: pages of index keys, as in `write_keys`.
      page_table: `[T, Mp]` int32, pages of each query's request. Entries past its visible tokens are never read.
      visible: `[T]` int32, tokens that each query sees, from the first of its request on; 0 for padding.
      first_page: the layer's first page in the pool.
      backend: an implementation, or None for that of the default device.

    Returns:
      float32 `[T, 64 * Mp']`, Mp' being Mp or Mp + 1; -inf past a query's visible tokens. Zeros are positive, so that
      equal scores have equal bits.

    Raises:
      ValueError: the pool has no rows for keys of this width.
    """
    sums = raw_scores(q, weights, pool, page_table, visible, first_page=first_page, backend=backend)
    seen = jnp.arange(sums.shape[1]) < visible[:, None]
    return jnp.where(seen, jnp.where(sums == 0, 0.0, sums), -jnp.inf)


def raw_scores(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    visible: jax.Array,
    *,
    first_page: jax.Array | int,
    backend: Backend | None = None,
) -> jax.Array:
    """Computes `index_scores`, but scores past a query's visible tokens are undefined, and zeros have both signs."""
    check_keys(pool, q.shape[-1])
    backend = with_fallback("index_scores", backend)
    chosen = resolve_backend(requested=backend)
    if scores_unsupported(q, pool, chosen) is None:
        operands = fp8_queries(q, weights) if is_fp8(pool) else (q, weights)
        kernels = {Backend.MOSAIC: mosaic_scores.index_scores_mosaic, Backend.TRITON: index_scores_triton}
        return kernels[chosen](*operands, pool, page_table, visible, first_page=first_page)
    return _sums(queries_for(pool, q), weights, pool, page_table, visible, first_page=first_page)


def scores_unsupported(q: Any, pool: Any, backend: Backend) -> str | None:
    """Returns why there is no kernel for these arrays (or their shapes and types), or None if there is one."""
    if backend is Backend.MOSAIC:
        return mosaic_scores.unsupported(q, pool)
    if backend is Backend.TRITON and uses_triton(backend):
        return _triton_unsupported(q, pool)
    return f"{backend.value} has no kernel of scores"


def select_topk(scores: jax.Array, visible: jax.Array, topk: int) -> jax.Array:
    """Returns the positions int32 `[T, topk]` of the `topk` highest `scores` `[T, N]` of each row, in rising order.

    Only the first `visible` `[T]` scores of a row count, none of them NaN; the others are -inf. Of equal scores the
    first win. A row with fewer than `topk` visible scores is padded with N.
    """
    N = scores.shape[1]
    _, positions = lax.top_k(scores, min(topk, N))
    positions = jnp.sort(jnp.where(positions < visible[:, None], positions, N), axis=1)
    return jnp.pad(positions, ((0, 0), (0, topk - positions.shape[1])), constant_values=N)


def topk_indices(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    visible: jax.Array,
    *,
    first_page: jax.Array | int,
    topk: int,
    backend: Backend | None = None,
) -> jax.Array:
    """Returns the positions int32 `[T, topk]` of the tokens that each query attends to, in rising order.

    The arguments are those of `index_scores`. A query that sees fewer than `topk` tokens has invisible positions at the
    end.
    """
    arrays, backend = (q, weights, pool, page_table, visible), with_fallback("topk_indices", backend)
    resolved = resolve_backend(requested=backend)
    scores_of = raw_scores if uses_triton(resolved) else index_scores
    return _best(scores_of(*arrays, first_page=first_page, backend=backend), visible, topk, resolved)


def _best(scores: jax.Array, visible: jax.Array, topk: int, backend: Backend) -> jax.Array:
    """Selects as `select_topk`; the kernel does not read scores past a query's visible tokens."""
    if uses_triton(backend):
        return select_in_kernel(scores, visible, topk, backend)
    return select_topk(scores, visible, topk)


def topk_scores(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    visible: jax.Array,
    *,
    first_page: jax.Array | int,
    topk: int,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the positions of `topk_indices`, and the scores of `index_scores` there, -inf at invisible positions."""
    where: dict[str, Any] = {"first_page": first_page, "backend": backend}
    scores = index_scores(q, weights, pool, page_table, visible, **where)
    positions = _best(scores, visible, topk, resolve_operation("topk_indices", backend))
    found = jnp.take_along_axis(scores, jnp.minimum(positions, scores.shape[1] - 1), axis=1)
    return positions, jnp.where(positions < visible[:, None], found, -jnp.inf)


def _sums(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    visible: jax.Array,
    *,
    first_page: jax.Array | int,
) -> jax.Array:
    """Returns the scores `[T, 64 * Mp']`, undefined past a query's visible tokens."""
    (T, _, width), table = q.shape, jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % _PAGES_PER_STEP)))

    def step(index: jax.Array, scores: jax.Array) -> jax.Array:
        first = index * _SPAN
        ids = lax.dynamic_slice_in_dim(table, index * _PAGES_PER_STEP, _PAGES_PER_STEP, axis=1)
        starts = first + PAGE_SIZE * jnp.arange(_PAGES_PER_STEP)
        ids = jnp.where(starts < visible[:, None], first_page + ids, 0)
        keys = keys_of_pages(pool, ids, width, q.dtype).reshape(T, _SPAN, width)
        products = jnp.einsum("thi,tki->thk", q, keys, preferred_element_type=jnp.float32)
        sums = jnp.einsum("th,thk->tk", weights, jax.nn.relu(products), preferred_element_type=jnp.float32)
        return lax.dynamic_update_slice_in_dim(scores, sums, first, axis=1)

    steps = (jnp.max(visible) + _SPAN - 1) // _SPAN
    return lax.fori_loop(0, steps, step, jnp.zeros((T, table.shape[1] * PAGE_SIZE)))


def index_scores_triton(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    visible: jax.Array,
    *,
    first_page: jax.Array | int,
) -> jax.Array:
    """See `raw_scores`; FP8 pages need the results of `fp8_queries`."""
    (T, heads), columns, fp8 = weights.shape, page_table.shape[1], is_fp8(pool)
    width = q.size // (T * heads)
    (scores,) = call.start(
        "sparse.scores",
        (
            lax.bitcast_convert_type(q, jnp.uint8) if fp8 else q,
            weights,
            pool,
            page_table,
            visible,
            call.scalar(first_page),
        ),
        (jax.ShapeDtypeStruct((T, columns * PAGE_SIZE), jnp.float32),),
        grid=(T, -(-columns // SCORE_PAGES)),
        warps=_SCORE_WARPS,
        stages=_SCORE_STAGES,
        HEADS=heads,
        WIDTH=width,
        CHUNK=fp8_chunk(width) if fp8 else width,
        PAGE=PAGE_SIZE,
        PAGE_ITEMS=PAGE_SIZE * pool.shape[2],
        TABLE_WIDTH=columns,
        FP8=fp8,
        NATIVE=fp8 and traced_gpu().fp8,
        BLOCK_H=power_of_two(heads),
        PAGES=SCORE_PAGES,
    )
    return scores


def _triton_unsupported(q: Any, pool: Any) -> str | None:
    """Returns why the kernel does not support these arrays (or their shapes and types), or None if it does."""
    heads, width = q.shape[-2:]
    if width & (width - 1) or not 16 <= width <= 128 or heads > 128:
        return f"{heads} heads of {width} are more than 128, or no power of two from 16 to 128 wide"
    if is_fp8(pool):
        return None if width >= 32 else f"FP8 keys of {width} are narrower than what a tensor core multiplies, 32"
    if q.dtype not in HALF_DTYPES or pool.dtype != q.dtype:
        return f"queries of {q.dtype} and index keys of {pool.dtype} are not of one type of 16 bits"
    return None


def select_in_kernel(scores: jax.Array, visible: jax.Array, topk: int, backend: Backend) -> jax.Array:
    """Computes `select_topk` in Triton, on Hopper too; scores past `visible` may hold anything."""
    T, N = scores.shape
    (indices,) = call.start(
        "sparse.select",
        (scores, visible),
        (jax.ShapeDtypeStruct((T, topk), jnp.int32),),
        grid=(T,),
        backend=backend,
        warps=_SELECT_WARPS,
        N=N,
        TOPK=topk,
        BLOCK=_SELECT_BLOCK,
    )
    return indices
