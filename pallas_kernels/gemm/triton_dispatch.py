"""The matrix products on Triton kernels, with the signatures of `dispatch.py`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import invariance, tuned
from pallas_kernels.backend import traced_gpu
from pallas_kernels.float8 import E4M3
from pallas_kernels.gpus import GpuKind
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import TritonTile, fp4_tile, int4_tile, k_splits, product_tile, product_tiles

DENSE = "dense product by Triton"
"""The kernel of measured tiles."""
_BAND = 8
"""Tiles of rows that share weights in the L2 cache."""


def dense(a, a_scale, b, b_scale, layer, out_dtype) -> jax.Array:
    """Multiplies a [M, K] with b[layer] of [L, N, K]; scales are None for 16 bits."""
    (m, k), n, gpu = a.shape, b.shape[1], traced_gpu()
    rows, itemsize = invariance.planned_rows(m), a.dtype.itemsize
    tile = tuned.choose(
        DENSE, (m, n, k, itemsize), product_tile(gpu, rows, itemsize), lambda: product_tiles(gpu, rows, itemsize)
    )
    tiles = _count(m, tile.rows) * _count(n, tile.columns)
    splits = 1 if invariance.required() else k_splits(gpu, tiles, _count(k, tile.depth))
    out = jax.ShapeDtypeStruct((splits, m, n), out_dtype if splits == 1 else jnp.float32)
    parts = _product(gpu, tile, _count(m, tile.rows), a[:, None], a_scale, b, b_scale, None, layer, out)
    return parts[0] if splits == 1 else jnp.sum(parts, axis=0).astype(out_dtype)


def contiguous(x, x_scale, w, w_scale, tile_group, group_offset, tile_m, out_dtype) -> jax.Array:
    """Multiplies aligned rows x [A, K] with their tiles' weights."""
    (m, _), n, gpu = x.shape, w.shape[1], traced_gpu()
    tile = product_tile(gpu, tile_m, x.dtype.itemsize)
    tiles_m = tile_group.shape[0] * _count(tile_m, tile.rows)
    out = jax.ShapeDtypeStruct((1, m, n), out_dtype)
    layout = tile_group.astype(jnp.int32), tile_m
    return _product(gpu, tile, tiles_m, x[:, None], x_scale, w, w_scale, layout, group_offset, out)[0]


def int4_contiguous(x, w, w_scale, tile_group, group_offset, tile_m) -> jax.Array:
    """Multiplies aligned rows x [A, K] with their tiles' INT4 words [G, N, K / 8]."""
    return _packed("product.int4", (x, w, w_scale), int4_tile(tile_m), tile_group, group_offset, tile_m, x.dtype)


def fp4_contiguous(
    x, x_scale, w, w_powers, w_scale, tile_group, group_offset, tile_m, out_dtype
) -> jax.Array:  # fmt: skip
    """Multiplies aligned rows x [A, K] with their tiles' FP4 words [G, N, K / 8]."""
    gpu = traced_gpu()
    x = x if gpu.fp8 else lax.bitcast_convert_type(x, jnp.uint8)
    operands = x, x_scale, w, w_powers, w_scale
    return _packed(
        "product.fp4", operands, fp4_tile(tile_m), tile_group, group_offset, tile_m, out_dtype, BYTES=not gpu.fp8
    )


def _packed(
    kernel: str, operands: tuple, tile: TritonTile, tile_group, group_offset, tile_m: int, out_dtype, **how
) -> jax.Array:
    """Starts a kernel of words [G, N, K / 8], which follow x [A, K] and its scales."""
    (m, k), words = operands[0].shape, next(x for x in operands if x.ndim == 3)
    n = words.shape[1]
    (result,) = call.start(
        kernel,
        (*operands, tile_group.astype(jnp.int32), call.scalar(group_offset)),
        (jax.ShapeDtypeStruct((m, n), out_dtype),),
        grid=(tile_group.shape[0] * _count(tile_m, tile.rows) * _count(n, tile.columns),),
        warps=tile.warps,
        stages=tile.stages,
        rows=m,
        N=n,
        K=k,
        TILE_ROWS=tile_m,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BAND=_BAND,
        **how,
    )
    return result


def heads(x, w, layer, transposed: bool) -> jax.Array:
    """Multiplies each head of x [M, H, K] with its w [L * H, N, K], or transposed [L * H, K, N]."""
    (m, h, _), n, gpu = x.shape, w.shape[2 if transposed else 1], traced_gpu()
    tile = product_tile(gpu, invariance.planned_rows(m), x.dtype.itemsize)
    out = jax.ShapeDtypeStruct((1, m, h, n), x.dtype)
    return _product(
        gpu, tile, _count(m, tile.rows), x, None, w, None, None, layer, out, transposed=transposed
    )[0]  # fmt: skip


def _product(
    gpu: GpuKind,
    tile: TritonTile,
    tiles_m: int,
    x,
    x_scale,
    w,
    w_scale,
    layout,
    first_group,
    out,
    transposed: bool = False,
) -> jax.Array:
    """Starts the kernel for x [M, H, K]; `layout` is the groups of tiles and their rows, or None."""
    (m, h, k), n = x.shape, w.shape[2 if transposed else 1]
    first = call.scalar(first_group)
    tile_group, tile_rows = layout or (first, 0)
    as_bytes = x.dtype == E4M3 and not gpu.fp8
    x, w = (lax.bitcast_convert_type(v, jnp.uint8) if as_bytes else v for v in (x, w))
    scales: tuple[Any, Any] = (x, w) if x_scale is None else (x_scale, w_scale)  # a plain product reads none
    (result,) = call.start(
        "product.product",
        (x, w, *scales, tile_group, first),
        (out,),
        grid=(tiles_m * _count(n, tile.columns), out.shape[0], h),
        warps=tile.warps,
        stages=tile.stages,
        rows=m,
        N=n,
        K=k,
        HEADS=h,
        TILE_ROWS=tile_rows,
        TRANSPOSED=transposed,
        SPLITS=out.shape[0],
        SCALED=x_scale is not None,
        BYTES=as_bytes,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        BAND=_BAND,
    )
    return result


def _count(extent: int, block: int) -> int:
    return -(-extent // block)
