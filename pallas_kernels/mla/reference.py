"""Attention in plain jax.numpy: the path of a CPU, and the oracle of the kernels.

All are flash attention with an online softmax: loops over blocks of keys stop at the longest length in the batch, so
wide page tables and padding are free.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mla.layout import PAGE_SIZE, fp8_rows_of_pages, is_fp8, unpack_fp8
from pallas_kernels.search import search

_PAGES_PER_STEP = 2
_SPAN = _PAGES_PER_STEP * PAGE_SIZE
_PREFILL_BLOCK = 128
_CONTEXT_BLOCK = 64


class _Softmax(NamedTuple):
    """Running maximum [..., M], sum [..., M] and unnormalized output [..., M, V], all float32."""

    top: jax.Array
    total: jax.Array
    out: jax.Array


def decode_reference(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    first_page: jax.Array | int,
    value_width: int,
) -> tuple[jax.Array, jax.Array]:
    """See `mla_decode`; `first_page` is the layer's first page in the pool."""
    B, S, H, D = q.shape
    table = _pad_table(page_table)
    rows = q.reshape(B, S * H, D)
    visible = jnp.repeat(lengths[:, None] - (S - 1 - jnp.arange(S)), H, axis=1)  # [B, S * H]

    def step(state: tuple[jax.Array, _Softmax]) -> tuple[jax.Array, _Softmax]:
        index, softmax = state
        keys = _latents(pages, table, lengths, index, first_page, value_width, q.dtype)  # [B, span, D]
        scores = jnp.einsum("bmd,bkd->bmk", rows, keys, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(index * _SPAN + jnp.arange(_SPAN) < visible[..., None], scores, -jnp.inf)
        return index + 1, _accumulate(softmax, scores, keys[..., :value_width], "bmk,bkv->bmv")

    steps = (jnp.max(lengths) + _SPAN - 1) // _SPAN
    start = (jnp.int32(0), _start((B, S * H), value_width))
    _, softmax = lax.while_loop(lambda state: state[0] < steps, step, start)
    out, lse = _finish(softmax, q.dtype)
    return out.reshape(B, S, H, value_width), lse.reshape(B, S, H)


def prefill_reference(
    q: jax.Array, k: jax.Array, v: jax.Array, cu_lengths: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `mla_prefill`."""
    T, end = q.shape[0], cu_lengths[-1]
    live = jnp.arange(T) < end
    v = jnp.where(live[:, None, None], v, 0)  # a masked NaN would still poison 0 * NaN
    starts, ends = _segment_starts(cu_lengths, T), jnp.where(live, jnp.arange(1, T + 1), 0)
    return spans_reference(q, k, v, starts, ends, scale=scale)


def spans_reference(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `mla_prefill_spans`, with whole keys."""
    block = min(_PREFILL_BLOCK, len(q))
    begins, stops = (_query_blocks(x, block) for x in (starts, ends))

    def seen(index: jax.Array, key_block: jax.Array) -> jax.Array:
        keys = key_block * block + jnp.arange(block)
        return (keys >= begins[index][:, None]) & (keys < stops[index][:, None])

    return _by_blocks(q, k, v, begins, stops, block, seen, scale)


def topk_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bits: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """See `mla_prefill_topk`, with whole keys."""
    block = _PREFILL_BLOCK
    begins, stops = (_query_blocks(x, block) for x in (starts, ends))
    words = _query_blocks(bits, block).reshape(-1, block // 32, *begins.shape)
    words = words.transpose(2, 0, 3, 1)  # [queries, keys, block, words]

    def seen(index: jax.Array, key_block: jax.Array) -> jax.Array:
        return ((words[index, key_block][..., None] >> jnp.arange(32)) & 1).reshape(block, block) != 0

    return _by_blocks(q, k, v, begins, stops, block, seen, scale)[0]


def _by_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    begins: jax.Array,
    stops: jax.Array,
    block: int,
    seen: Callable[[jax.Array, jax.Array], jax.Array],
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns out `[T, H, V]` and lse `[T, H]`; scores are at most `[H, block, block]`.

    Args:
      begins, stops: `[query blocks, block]`, between which a query's keys lie; `stops` is 0 for one without keys.
      seen: (query block, key block) -> bool `[block, block]`, which keys a query sees.
    """
    T, K = len(q), len(k)
    padded, padded_keys = begins.size, -(-K // block) * block
    qs, ks, vs = (_head_blocks(x, block, n) for x, n in ((q, padded), (k, padded_keys), (v, padded_keys)))

    def query_block(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(key_block: jax.Array, softmax: _Softmax) -> _Softmax:
            scores = jnp.einsum("hmd,hkd->hmk", qs[index], ks[key_block], preferred_element_type=jnp.float32) * scale
            scores = jnp.where(seen(index, key_block), scores, -jnp.inf)
            return _accumulate(softmax, scores, vs[key_block], "hmk,hkv->hmv")

        first = jnp.where(stops[index] > 0, begins[index], K).min() // block
        stop = -(-stops[index].max() // block)
        return _finish(lax.fori_loop(first, stop, step, _start(qs.shape[1:3], v.shape[-1])), q.dtype)

    out, lse = lax.map(query_block, jnp.arange(padded // block))
    out, lse = out.transpose(0, 2, 1, 3), lse.transpose(0, 2, 1)
    return out.reshape(padded, *out.shape[2:])[:T], lse.reshape(padded, -1)[:T]


def context_reference(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    context_lengths: jax.Array,
    cu_lengths: jax.Array,
    *,
    scale: float,
    first_page: jax.Array | int,
    value_width: int,
) -> tuple[jax.Array, jax.Array]:
    """See `mla_prefill_context`. A block of 64 tokens loops over the requests of its tokens."""
    T, H, D = q.shape
    block = min(_CONTEXT_BLOCK, T)
    padded = -(-T // block) * block
    blocks = jnp.pad(q, ((0, padded - T), (0, 0), (0, 0))).reshape(-1, block * H, D)
    request = _segment_ids(cu_lengths, padded).reshape(-1, block)  # G for padding
    table, groups = _pad_table(page_table), context_lengths.shape[0]

    def token_block(rows: jax.Array, request: jax.Array) -> tuple[jax.Array, jax.Array]:
        row_request = jnp.repeat(request, H)

        def visit(g: jax.Array, softmax: _Softmax) -> _Softmax:
            length = lax.dynamic_slice_in_dim(context_lengths, g, 1)

            def step(index: jax.Array, softmax: _Softmax) -> _Softmax:
                row = lax.dynamic_slice_in_dim(table, g, 1)
                keys = _latents(pages, row, length, index, first_page, value_width, q.dtype)[0]
                scores = jnp.einsum("md,kd->mk", rows, keys, preferred_element_type=jnp.float32) * scale
                seen = (row_request == g)[:, None] & (index * _SPAN + jnp.arange(_SPAN) < length)
                scores = jnp.where(seen, scores, -jnp.inf)
                return _accumulate(softmax, scores, keys[:, :value_width], "mk,kv->mv")

            return lax.fori_loop(0, (length[0] + _SPAN - 1) // _SPAN, step, softmax)

        last = jnp.minimum(request[-1], groups - 1)
        return _finish(lax.fori_loop(request[0], last + 1, visit, _start((block * H,), value_width)), q.dtype)

    def attend() -> tuple[jax.Array, jax.Array]:
        out, lse = lax.map(lambda args: token_block(*args), (blocks, request))
        return out.reshape(padded, H, value_width)[:T], lse.reshape(padded, H)[:T]

    def nothing() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((T, H, value_width), q.dtype), jnp.full((T, H), jnp.inf, jnp.float32)

    return lax.cond(jnp.any(context_lengths > 0), attend, nothing)


def _pad_table(page_table: jax.Array) -> jax.Array:
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % _PAGES_PER_STEP)))


def _latents(
    pages: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    index: jax.Array,
    first_page: jax.Array | int,
    value_width: int,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Returns the cached rows [B, span, D] of one step in `dtype`.

    Rows past a length are 0: table entries there must not be read.
    """
    columns = index * _PAGES_PER_STEP + jnp.arange(_PAGES_PER_STEP)
    ids = lax.dynamic_slice_in_dim(table, index * _PAGES_PER_STEP, _PAGES_PER_STEP, axis=1)
    ids = jnp.where(columns * PAGE_SIZE < lengths[:, None], first_page + ids, 0)
    rows = pages.at[ids].get(mode="clip")
    if is_fp8(pages):
        rows = unpack_fp8(fp8_rows_of_pages(rows, value_width), value_width, dtype)
    rows = rows.reshape(table.shape[0], _SPAN, -1).astype(dtype)
    return jnp.where((index * _SPAN + jnp.arange(_SPAN) < lengths[:, None])[..., None], rows, 0)


def _start(rows: tuple[int, ...], value_width: int) -> _Softmax:
    return _Softmax(jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((*rows, value_width)))


def _accumulate(softmax: _Softmax, scores: jax.Array, values: jax.Array, product: str) -> _Softmax:
    top = jnp.maximum(softmax.top, scores.max(-1))
    base = jnp.where(jnp.isneginf(top), 0, top)
    weights, shrink = jnp.exp(scores - base[..., None]), jnp.exp(softmax.top - base)
    update = jnp.einsum(product, weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return _Softmax(top, softmax.total * shrink + weights.sum(-1), softmax.out * shrink[..., None] + update)


def _finish(softmax: _Softmax, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    seen = softmax.total > 0
    total = jnp.where(seen, softmax.total, 1)
    return (softmax.out / total[..., None]).astype(dtype), jnp.where(seen, softmax.top + jnp.log(total), jnp.inf)


def _segment_ids(cu_lengths: jax.Array, tokens: int) -> jax.Array:
    """Returns the segment [T] of each token; G for tokens past the last segment."""
    return search(cu_lengths[1:], jnp.arange(tokens, dtype=jnp.int32), side="right")


def _segment_starts(cu_lengths: jax.Array, tokens: int) -> jax.Array:
    """Returns the first token [T] of each token's segment; the number of live tokens for padding."""
    return cu_lengths[_segment_ids(cu_lengths, tokens)]


def _query_blocks(x: jax.Array, block: int) -> jax.Array:
    """Pads the last axis, that of queries, to whole blocks, and divides it."""
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
    return padded.reshape(*x.shape[:-1], -1, block)


def _head_blocks(x: jax.Array, block: int, padded: int) -> jax.Array:
    x = jnp.pad(x, ((0, padded - x.shape[0]), (0, 0), (0, 0)))
    return x.reshape(-1, block, *x.shape[1:]).transpose(0, 2, 1, 3)
