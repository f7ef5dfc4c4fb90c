"""Argument checks of the MLA operations: a ValueError with the offending shapes, before anything is traced."""

import jax
import jax.numpy as jnp

from pallas_kernels.mla.layout import FLOAT_DTYPES, FP8_TILE, PAGE_SIZE, fp8_row_bytes, is_fp8


def check_decode(
    q: jax.Array, pages: jax.Array, page_table: jax.Array, lengths: jax.Array, pages_per_layer: int, value_width: int
) -> None:
    _check_rank("q", q, "[B, S, H, R + P]")
    _check_float("q", q)
    check_pool(pages, pages_per_layer, q.shape[-1], value_width, "q", q)
    _check_table(page_table, "B", q.shape[0])
    _check_ints("lengths", lengths, "B", q.shape[0])


def check_prefill(
    q: jax.Array, k: jax.Array, v: jax.Array, cu_lengths: jax.Array, shared_key: jax.Array | None = None
) -> None:
    _check_rank("q", q, "[T, H, N + P]")
    _check_float("q", q)
    if shared_key is None and k.shape != q.shape:
        raise ValueError(f"k must have the shape of q, {q.shape}, but is {k.shape}")
    if shared_key is not None:
        _check_key_parts(q, k, shared_key)
    if v.ndim != 3 or v.shape[:2] != q.shape[:2]:
        raise ValueError(f"v must be [T, H, V] with T, H = {q.shape[:2]}, but is {v.shape}")
    _check_dtype_of(q, k=k, v=v)
    _check_cu_lengths(cu_lengths)


def check_topk(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bits: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    shared_key: jax.Array,
) -> None:
    check_spans(q, k, v, starts, ends, shared_key)
    if bits.shape != (len(k) // 32, len(q)) or bits.dtype != jnp.int32:
        raise ValueError(f"bits must be int32 {(len(k) // 32, len(q))}, but are {bits.dtype}{list(bits.shape)}")


def check_spans(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array, shared_key: jax.Array
) -> None:
    _check_rank("q", q, "[T, H, N + P]")
    _check_float("q", q)
    (T, H, width), K = q.shape, len(k)
    own = width - shared_key.shape[-1]
    if K % 128 or k.shape != (K, H, own) or shared_key.shape != (K, width - own) or v.shape[:2] != (K, H):
        raise ValueError(
            f"k, shared_key and v must be [K, H, N], [K, P] and [K, H, V] with K a multiple of 128 for q {q.shape}, "
            f"but are {k.shape}, {shared_key.shape} and {v.shape}"
        )
    _check_dtype_of(q, k=k, v=v, shared_key=shared_key)
    _check_ints("starts", starts, "T", T)
    _check_ints("ends", ends, "T", T)


def _check_key_parts(q: jax.Array, k: jax.Array, shared_key: jax.Array) -> None:
    _check_rank("shared_key", shared_key, "[T, P]")
    if shared_key.shape[0] != q.shape[0] or k.shape != (*q.shape[:2], q.shape[2] - shared_key.shape[1]):
        raise ValueError(
            f"k {k.shape} and shared_key {shared_key.shape} must be the parts [T, H, N] and [T, P] of keys {q.shape}"
        )
    _check_dtype_of(q, shared_key=shared_key)


def check_context(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    context_lengths: jax.Array,
    cu_lengths: jax.Array,
    pages_per_layer: int,
    value_width: int,
) -> None:
    _check_rank("q", q, "[T, H, R + P]")
    _check_float("q", q)
    check_pool(pages, pages_per_layer, q.shape[-1], value_width, "q", q)
    _check_cu_lengths(cu_lengths)
    groups = cu_lengths.shape[0] - 1
    _check_table(page_table, "G", groups)
    _check_ints("context_lengths", context_lengths, "G", groups)


def check_write(
    pages: jax.Array,
    latents: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    pages_per_layer: int,
    value_width: int,
) -> None:
    _check_rank("latents", latents, "[T, R + P]")
    _check_float("latents", latents)
    check_pool(pages, pages_per_layer, latents.shape[-1], value_width, "latents", latents)
    _check_ints("page_ids", page_ids, "T", latents.shape[0])
    _check_ints("offsets", offsets, "T", latents.shape[0])


def check_pool(
    pages: jax.Array, pages_per_layer: int, width: int, value_width: int, other_name: str, other: jax.Array
) -> None:
    """Checks the page pool against the row width of the array it is used with."""
    if pages.ndim != 3 or pages.shape[1] != PAGE_SIZE:
        raise ValueError(f"pages must be [layers * pages_per_layer, {PAGE_SIZE}, row width], but is {pages.shape}")
    if pages_per_layer < 1 or pages.shape[0] % pages_per_layer:
        raise ValueError(f"pages_per_layer {pages_per_layer} must divide the {pages.shape[0]} pages of the pool")
    if not 0 < value_width < width:
        raise ValueError(f"value_width {value_width} must be above 0 and below the row width {width} of {other_name}")
    if is_fp8(pages):
        if value_width > FP8_TILE and value_width % FP8_TILE:
            raise ValueError(f"FP8 pages need a value_width of whole tiles of {FP8_TILE}, not {value_width}")
        expected = fp8_row_bytes(value_width, width - value_width)
        if pages.shape[2] != expected:
            raise ValueError(
                f"FP8 pages must have rows of {expected} bytes for R {value_width} and P {width - value_width}, "
                f"but are {pages.shape}"
            )
        return
    if pages.dtype not in FLOAT_DTYPES:
        raise ValueError(f"pages must be float32, bfloat16, float16 or uint8 (FP8 rows), but are {pages.dtype}")
    if pages.shape[2] != width:
        raise ValueError(f"pages {pages.shape} and {other_name} {other.shape} must have the same last axis")


def check_merge(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> None:
    if out_a.shape != out_b.shape or out_a.dtype != out_b.dtype:
        raise ValueError(
            f"both sides must agree, but are {out_a.dtype}{list(out_a.shape)} and {out_b.dtype}{list(out_b.shape)}"
        )
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != out_a.shape[:-1]:
            raise ValueError(
                f"{name} must be {out_a.shape[:-1]}, the outputs' shape less its last axis, not {lse.shape}"
            )


def _check_rank(name: str, x: jax.Array, shape: str) -> None:
    if x.ndim != shape.count(",") + 1 or 0 in x.shape:
        raise ValueError(f"{name} must be {shape} with no empty axis, but is {x.shape}")


def _check_float(name: str, x: jax.Array) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be float32, bfloat16 or float16, but is {x.dtype}")


def _check_dtype_of(q: jax.Array, **others: jax.Array) -> None:
    for name, x in others.items():
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, but is {x.dtype}")


def _check_table(page_table: jax.Array, letter: str, rows: int) -> None:
    if page_table.ndim != 2 or page_table.shape[0] != rows or page_table.shape[1] < 1:
        raise ValueError(f"page_table must be [{letter}, MP] with {letter} = {rows}, but is {page_table.shape}")
    if page_table.dtype != jnp.int32:
        raise ValueError(f"page_table must be int32, but is {page_table.dtype}")


def _check_ints(name: str, x: jax.Array, letter: str, rows: int) -> None:
    if x.shape != (rows,):
        raise ValueError(f"{name} must be [{letter}] with {letter} = {rows}, but is {x.shape}")
    if x.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32, but is {x.dtype}")


def _check_cu_lengths(cu_lengths: jax.Array) -> None:
    if cu_lengths.ndim != 1 or cu_lengths.shape[0] < 2 or cu_lengths.dtype != jnp.int32:
        raise ValueError(
            f"cu_lengths must be int32 [G + 1] with G >= 1, but is {cu_lengths.dtype}{list(cu_lengths.shape)}"
        )
