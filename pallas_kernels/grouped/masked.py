"""Grouped products of [groups, max rows, K] with a row count per group on the device: decode."""

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend, resolve_backend
from pallas_kernels.gemm import launch
from pallas_kernels.grouped import reference
from pallas_kernels.grouped.align import choose_tile_m
from pallas_kernels.grouped.contiguous import check_fp8, check_plain, grouped_gemm_contiguous, plain_backend


def grouped_gemm_masked(
    x: jax.Array,
    w: jax.Array,
    counts: jax.Array,
    *,
    group_offset: jax.Array | int = 0,
    expected_rows: int | None = None,
    backend: Backend | None = None,
) -> jax.Array:
    """`x[g, :counts[g]] @ w[group_offset + g].T` for every group; the reference is differentiable in x and w.

    Args:
      x: [G, Mmax, K] bfloat16 or float32.
      w: [G_total, N, K] of the same dtype, G_total >= G; a stack of layers is [layers * experts, N, K].
      counts: [G] int32 on the device, 0..Mmax. A group of count 0 never reads its weight.
      group_offset: added to the group number, Python or traced integer: `layer * experts` for a stack.
      expected_rows: rows a group is likely to hold, for the choice of tiles; None takes half of Mmax.
      backend: implementation; None chooses by device.

    Returns:
      [G, Mmax, N] in x's dtype. Rows from counts[g] on are not written on Hopper, and zero in the reference.

    Raises:
      ValueError: shapes or dtypes that do not belong together.
    """
    check_plain("grouped_gemm_masked", x, w, 3)
    _check_counts("grouped_gemm_masked", x, w, counts)
    groups, rows, k = x.shape
    if plain_backend("grouped_gemm_masked", x.dtype, backend) is Backend.MOSAIC:
        expected = _expected_rows(rows, expected_rows)
        return launch.masked(x, None, w, None, counts, group_offset, x.dtype, expected_rows=expected)
    valid = jnp.arange(rows) < counts[:, None]
    tile_m = _reference_tile(rows)
    padded = _pad_rows(jnp.where(valid[..., None], x, 0), 1, tile_m)
    tile_group = reference.tiles_of_counts(counts, padded.shape[1] // tile_m, tile_m)
    y = grouped_gemm_contiguous(
        padded.reshape(-1, k), w, tile_group, tile_m=tile_m, group_offset=group_offset, backend=Backend.REFERENCE
    )
    return jnp.where(valid[..., None], y.reshape(groups, -1, w.shape[1])[:, :rows], 0)


def fp8_grouped_gemm_masked(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    counts: jax.Array,
    *,
    group_offset: jax.Array | int = 0,
    expected_rows: int | None = None,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: Backend | None = None,
) -> jax.Array:
    """`grouped_gemm_masked` of block-scaled e4m3 (DeepGEMM's `m_grouped_fp8_gemm_nt_masked`).

    Args:
      x: [G, Mmax, K] e4m3, and x_scale: [G, ceil(K/128), Mmax] float32, both from `quantize_1x128`.
      w: [G_total, N, K] e4m3, and w_scale: [G_total, ceil(N/128), ceil(K/128)] float32.
      counts, group_offset, expected_rows, backend: as `grouped_gemm_masked`.
      out_dtype: bfloat16 or float32; on Hopper float32 needs more than 64 expected rows.

    Returns:
      [G, Mmax, N] in `out_dtype`. Rows from counts[g] on are not written on Hopper, and zero in the reference.
    """
    check_fp8("fp8_grouped_gemm_masked", x, x_scale, w, w_scale, 3)
    _check_counts("fp8_grouped_gemm_masked", x, w, counts)
    groups, rows, k = x.shape
    if resolve_backend(requested=backend) is Backend.MOSAIC:
        expected = _expected_rows(rows, expected_rows)
        return launch.masked(x, x_scale, w, w_scale, counts, group_offset, out_dtype, expected_rows=expected)
    tile_m = _reference_tile(rows)
    padded = _pad_rows(x, 1, tile_m)
    scale = jnp.swapaxes(_pad_rows(x_scale, 2, tile_m), 0, 1).reshape(x_scale.shape[1], -1)
    tile_group = reference.tiles_of_counts(counts, padded.shape[1] // tile_m, tile_m)
    y = reference.fp8_contiguous(padded.reshape(-1, k), scale, w, w_scale, tile_group, group_offset, tile_m, out_dtype)
    valid = jnp.arange(rows) < counts[:, None]
    return jnp.where(valid[..., None], y.reshape(groups, -1, w.shape[1])[:, :rows], 0)


def _expected_rows(rows: int, expected: int | None) -> int:
    return max(1, rows // 2) if expected is None else expected


def _reference_tile(rows: int) -> int:
    """Tile height of the reference: the buffer is expected to be about half full."""
    return choose_tile_m(max(1, rows // 2), 1, backend=Backend.REFERENCE)


def _pad_rows(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, pad) if pad[axis][1] else x


def _check_counts(name: str, x: jax.Array, w: jax.Array, counts: jax.Array) -> None:
    if counts.shape != (x.shape[0],) or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(f"{name}: x {x.shape} needs integer counts [{x.shape[0]}], got {counts.shape} {counts.dtype}")
    if w.shape[0] < x.shape[0]:
        raise ValueError(f"{name}: {x.shape[0]} groups of x but only {w.shape[0]} weights in w {w.shape}")
