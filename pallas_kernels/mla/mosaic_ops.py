"""The MLA operations on Mosaic GPU kernels: from the public shapes to the kernels' groups of rows and back."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import multiprocessors as gpu_multiprocessors
from pallas_kernels.mla import mosaic_decode, mosaic_latent, mosaic_prefill
from pallas_kernels.mla.layout import HALF_DTYPES, is_fp8
from pallas_kernels.mla.mosaic_combine import combine_splits
from pallas_kernels.mla.mosaic_fp8_cache import VALUE_WIDTH as FP8_VALUE_WIDTH
from pallas_kernels.mla.schedule import REQUEST_OVERHEAD, DecodeSchedule, schedule_pages
from pallas_kernels.search import search


def decode_schedule(
    lengths: jax.Array,
    *,
    queries: int,
    heads: int,
    multiprocessors: int | None = None,
    request_overhead: int = REQUEST_OVERHEAD,
) -> DecodeSchedule:
    """Returns the schedule of a decode step over `lengths` [B] int32: the same for all its layers, so compute it once.

    Args:
      queries, heads: S and H of the queries `[B, S, H, R + P]` of `mla_decode`.
      multiprocessors: of the kernel; None for those of the program.
      request_overhead: the fixed cost of a request, in pages; at least 1.
    """
    rows = mosaic_decode.padded_rows(queries * heads)
    return schedule_pages(lengths, _parts(rows, multiprocessors), request_overhead)


def _parts(rows: int, multiprocessors: int | None) -> int:
    return mosaic_decode.part_count(rows, multiprocessors or gpu_multiprocessors.traced().taken)


def decode_mosaic(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    first_page: jax.Array | int,
    schedule: DecodeSchedule | None = None,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `mla_decode`."""
    B, S, H, _ = q.shape
    if schedule is None:
        schedule = decode_schedule(lengths, queries=S, heads=H, multiprocessors=multiprocessors)
    out, lse = _attend(
        tuple(part.reshape(B, S * H, -1) for part in _query_parts(q, pages)),
        pages,
        page_table,
        jnp.arange(B, dtype=jnp.int32),
        lengths,
        schedule,
        heads=H,
        queries=S,
        scale=scale,
        first_page=first_page,
        interpret=interpret,
    )
    return out.reshape(B, S, H, -1), lse.reshape(B, S, H)


def context_mosaic(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    context_lengths: jax.Array,
    cu_lengths: jax.Array,
    *,
    scale: float,
    first_page: jax.Array | int,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `mla_prefill_context`. The decode kernel; a group is as many tokens of one request as fill 64 rows."""
    T, H, _ = q.shape
    together = max(1, mosaic_latent.ROWS // H)
    tokens, requests, group, place = _group_tokens(cu_lengths, T, together)
    parts = _query_parts(q, pages)
    if together > 1:
        some = (tokens < T)[..., None, None]
        parts = tuple(jnp.where(some, part.at[tokens].get(mode="clip"), 0) for part in parts)
    lengths = jnp.where(requests < context_lengths.shape[0], context_lengths.at[requests].get(mode="clip"), 0)

    padded = mosaic_decode.padded_rows(together * H)
    out, lse = _attend(
        tuple(part.reshape(-1, together * H, part.shape[-1]) for part in parts),
        pages,
        page_table,
        jnp.minimum(requests, page_table.shape[0] - 1),
        lengths,
        schedule_pages(lengths, _parts(padded, multiprocessors)),
        heads=H,
        queries=1,
        scale=scale,
        first_page=first_page,
        interpret=interpret,
    )
    out, lse = out.reshape(-1, together, H, out.shape[-1]), lse.reshape(-1, together, H)
    return (out[group, place], lse[group, place]) if together > 1 else (out[:, 0], lse[:, 0])


def _query_parts(q: jax.Array, pages: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the kernel's queries: whole, or in two parts for FP8 pages.

    The first part multiplies latents in float16, clipped to its range; the second multiplies rotated keys.
    """
    if not is_fp8(pages):
        return (q,)
    latents, rotated = jnp.split(q, [FP8_VALUE_WIDTH], axis=-1)
    most = float(jnp.finfo(jnp.float16).max)  # bfloat16 would round it up
    return jnp.clip(latents.astype(jnp.float32), -most, most).astype(jnp.float16), rotated


def _group_tokens(cu_lengths: jax.Array, T: int, together: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Packs the tokens of each request into groups of `together`.

    Returns:
      tokens [groups, together], T for none; request [groups], G for none; and for each token its group [T] and its
      index in it [T]. Padding tokens get a group without a request.
    """
    G = cu_lengths.shape[0] - 1
    if together == 1:
        token = jnp.arange(T, dtype=jnp.int32)
        request = search(cu_lengths[1:], token, side="right")
        return token[:, None], request, token, jnp.zeros_like(token)
    groups = T // together + G + 1  # each request leaves at most one group partly filled; the last is for padding
    counts = jnp.diff(cu_lengths)
    ends = jnp.cumsum(-(-counts // together))
    starts = ends + counts // -together
    group = jnp.arange(groups, dtype=jnp.int32)
    request = search(ends, group, side="right")
    owner = jnp.minimum(request, G - 1)
    token = (cu_lengths[owner] + (group - starts[owner]) * together)[:, None] + jnp.arange(together)
    token = jnp.where((request < G)[:, None] & (token < cu_lengths[owner + 1][:, None]), token, T)
    all_tokens = jnp.arange(T, dtype=jnp.int32)
    of = search(cu_lengths[1:], all_tokens, side="right")
    within = all_tokens - cu_lengths[jnp.minimum(of, G - 1)]
    padding = of == G
    token_group = jnp.where(padding, groups - 1, starts[jnp.minimum(of, G - 1)] + within // together)
    return token, request, token_group, jnp.where(padding, 0, within % together)


@functools.partial(jax.jit, static_argnames=("heads", "queries", "scale", "interpret"))
def _attend(
    parts: tuple[jax.Array, ...],
    pages: jax.Array,
    page_table: jax.Array,
    table_rows: jax.Array,
    lengths: jax.Array,
    schedule: DecodeSchedule,
    *,
    heads: int,
    queries: int,
    scale: float,
    first_page: jax.Array | int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Shares a trace and a lowering between equal calls of a program, like `_traced_once` of the products."""
    count = parts[0].shape[1]
    padded = mosaic_decode.padded_rows(count)
    shape = mosaic_latent.TileShape(
        heads=heads,
        queries=queries,
        rows=padded,
        parts=schedule.cuts.shape[0] - 1,
        dtype=parts[-1].dtype,
        scale=scale,
        interpreted=interpret is not None,
        fp8=is_fp8(pages),
        value_width=sum(part.shape[2] for part in parts) - mosaic_latent.ROPE_WIDTH,
    )
    parts = tuple(jnp.pad(part, ((0, 0), (0, padded - count), (0, 0))) for part in parts)
    first = jnp.asarray(first_page, jnp.int32).reshape(1)
    out, lse, partial_out, partial_lse = mosaic_decode.attend_pages(
        shape, parts[0], parts[-1], pages, page_table, table_rows, lengths, first, schedule, interpret=interpret
    )
    out, lse = combine_splits(out, lse, partial_out, partial_lse, schedule, interpret=interpret)
    return out[:, :count], lse[:, :count]


def decode_unsupported(q: Any, pages: Any, value_width: int) -> str | None:
    """Returns why the decode kernel does not support these arrays (or their shapes and types), or None if it does."""
    rope_width = q.shape[-1] - value_width
    if value_width not in mosaic_decode.VALUE_WIDTHS or rope_width != mosaic_latent.ROPE_WIDTH:
        return f"latent and rope widths {(value_width, rope_width)} are neither (512, 64) nor (256, 64)"
    if is_fp8(pages) and value_width != FP8_VALUE_WIDTH:
        return f"FP8 pages have latents of {value_width} values, not {FP8_VALUE_WIDTH}"
    if is_fp8(pages) and q.dtype != jnp.bfloat16:
        return f"queries on an FP8 cache are {q.dtype}, not bfloat16"
    if q.dtype not in HALF_DTYPES:
        return f"{q.dtype} is neither bfloat16 nor float16"
    if not is_fp8(pages) and pages.dtype != q.dtype:
        return f"pages of {pages.dtype} are not of the queries' type, {q.dtype}"
    return None


def prefill_mosaic(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_lengths: jax.Array,
    shared_key: jax.Array | None = None,
    *,
    scale: float,
    key_block: int | None = None,
    stages: int = 2,
    blocks: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `mla_prefill`; `key_block` and `stages` are for tuning; None fills the shared memory.

    `blocks` is the most thread blocks; None for those not reserved for the program's transfers.
    """
    T, end = len(q), cu_lengths[-1]
    padded = -(-T // mosaic_prefill.BLOCK) * mosaic_prefill.BLOCK
    k, v = (jnp.pad(x, ((0, padded - T), (0, 0), (0, 0))) for x in (k, v))
    shared_key = None if shared_key is None else jnp.pad(shared_key, ((0, padded - T), (0, 0)))
    token = jnp.arange(T, dtype=jnp.int32)
    starts = cu_lengths[search(cu_lengths[1:], token, side="right")]
    how: dict[str, Any] = {"key_block": key_block, "stages": stages, "blocks": blocks, "interpret": interpret}
    v, ends = _clear_tail(v, end), jnp.where(token < end, token + 1, 0)
    return prefill_spans_mosaic(q, k, shared_key, v, starts, ends, scale=scale, **how)


def prefill_spans_mosaic(
    q: jax.Array,
    k: jax.Array,
    shared_key: jax.Array | None,
    v: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    bits: jax.Array | None = None,
    *,
    scale: float,
    key_block: int | None = None,
    stages: int = 2,
    blocks: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `mla_prefill_spans`, with `bits` `mla_prefill_topk`; keys are whole if `shared_key` is None.

    Tuning as in `prefill_mosaic`.
    """
    T, H, key_width = q.shape
    key_block = key_block or mosaic_prefill.KEY_BLOCKS[key_width, v.shape[-1]]
    short = -T % mosaic_prefill.BLOCK
    q, starts, ends = jnp.pad(q, ((0, short), (0, 0), (0, 0))), jnp.pad(starts, (0, short)), jnp.pad(ends, (0, short))
    items, multiprocessors = len(q) // mosaic_prefill.BLOCK * H, gpu_multiprocessors.traced()
    blocks = blocks or (multiprocessors.taken if multiprocessors.reserved else items)
    shape = mosaic_prefill.PrefillShape(
        tokens=len(q),
        heads=H,
        key_width=key_width,
        value_width=v.shape[-1],
        dtype=q.dtype,
        scale=scale,
        interpreted=interpret is not None,
        key_block=key_block,
        stages=stages,
        blocks=blocks if blocks < items else None,
        shared_width=0 if shared_key is None else shared_key.shape[1],
        use_topk=bits is not None,
    )
    keys = k if shared_key is None else (k, shared_key)
    ranges = _key_ranges(starts, ends, key_block)
    seen: tuple[jax.Array, ...] = jnp.where(ends > 0, starts, mosaic_prefill.PADDING), ends
    if bits is not None:
        seen = (jnp.pad(bits, ((0, 0), (0, short))),)
    out, lse = mosaic_prefill.attend_spans(shape, q, keys, v, ranges, *seen, interpret=interpret)
    return out[:T], lse[:, :T].T


def _key_ranges(starts: jax.Array, ends: jax.Array, key_block: int) -> jax.Array:
    """Returns the first block of keys of each block of queries, and their number, `[T / 128, 2]` int32."""
    starts, ends = (x.reshape(-1, mosaic_prefill.BLOCK) for x in (starts, ends))
    first = jnp.where(ends > 0, starts, mosaic_prefill.PADDING).min(axis=1) // key_block
    last = -(-ends.max(axis=1) // key_block)
    return jnp.stack([jnp.minimum(first, last), jnp.maximum(last - first, 0)], axis=1).astype(jnp.int32)


def takes_parts(k: Any, shared_key: Any) -> bool:
    """Returns whether the prefill kernel supports these parts of keys: shared memory has tiles of 64 columns."""
    return k.shape[-1] % mosaic_prefill.TILE_COLUMNS == shared_key.shape[-1] % mosaic_prefill.TILE_COLUMNS == 0


def _clear_tail(v: jax.Array, end: jax.Array) -> jax.Array:
    """Zeroes the padding tokens of the block in which padding begins: their weights are 0, but 0 * NaN is not.

    Later blocks are never read. In place if `v` is not used again.
    """
    block = mosaic_prefill.BLOCK
    first = jnp.minimum(end // block * block, v.shape[0] - block)
    tail = lax.dynamic_slice_in_dim(v, first, block)
    tail = jnp.where((first + jnp.arange(block) < end)[:, None, None], tail, 0)
    return lax.dynamic_update_slice_in_dim(v, tail, first, 0)


def prefill_unsupported(q: Any, v: Any) -> str | None:
    """Returns why the prefill kernel does not support these arrays (or their shapes and types), or None if it does."""
    widths = (q.shape[-1], v.shape[-1])
    if widths not in mosaic_prefill.KEY_BLOCKS:
        known = ", ".join(map(str, mosaic_prefill.KEY_BLOCKS))
        return f"key and value widths {widths} are none of {known}"
    if q.dtype not in HALF_DTYPES:
        return f"{q.dtype} is neither bfloat16 nor float16"
    return None
