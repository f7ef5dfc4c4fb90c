"""Starts a kernel: checks TMA's constraints, selects the plan, and reshapes operands to the kernels' common form."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import invariance, multiprocessors
from pallas_kernels.gemm.heads import HeadKernel
from pallas_kernels.gemm.kernel import GemmKernel
from pallas_kernels.gemm.narrow import NarrowKernel, SplitKernel
from pallas_kernels.gemm.plan import TilePlan, plan_contiguous, plan_dense, plan_invariant
from pallas_kernels.gemm.schedule import Contiguous, ContiguousPairs, Dense, Heads, TileSchedule
from pallas_kernels.gemm.wide import TallKernel, WideKernel
from pallas_kernels.mosaic import TILE_ROWS, pad_to_tiles

_SCALES_PER_LOAD = 4
"""TMA needs strides in multiples of 16 bytes: rows of scales are padded to four float32."""
_SPLIT_TILE_COLUMNS = 32
"""Tokens of a swizzled tile of a split product, which is float32 and transposed."""


def dense(
    a, a_scale, b, b_scale, layer, out_dtype, *, plan: TilePlan | None = None, num_sms: int | None = None
) -> jax.Array:
    """Multiplies a [M, K] with b[layer] of [L, N, K] on Hopper. Operands are checked; scales are None for 16 bits.

    `num_sms` defaults to the program's multiprocessors; so in the other products.
    """
    num_sms = num_sms or multiprocessors.traced().taken
    (m, k), n = a.shape, b.shape[1]
    _check_strides("dense gemm", n, k, a.dtype)
    float32 = jnp.dtype(out_dtype) == jnp.float32
    if plan is None and invariance.required():
        plan = plan_invariant(n, k, a.dtype.itemsize, float32=float32)
    wanted = plan or plan_dense(m, n, k, a.dtype.itemsize, float32=float32, num_sms=num_sms)
    # A narrow tile is stored as float32 only untransposed, as in a split product.
    split = not wanted.wide and (wanted.splits > 1 or float32)
    padded_m = _padded_rows(m, split)
    out = ((wanted.splits, n, padded_m), jnp.float32) if split else ((1, padded_m, n), out_dtype)
    kernel_type: type[GemmKernel] = SplitKernel if split else NarrowKernel
    rows_together = wanted.tile_m * (wanted.cluster if wanted.shares_weights else 1)
    schedule = Dense(m, rows_together, wanted.splits)
    kernel = kernel_of_plan(wanted, schedule, a, b, out, kernel_type)
    result = kernel(pad_to_tiles(a[None]), b, _scales(a_scale, b_scale, lambda s: s[None]), (_offset(layer),), num_sms)
    return jnp.sum(result, axis=0).T[:m].astype(out_dtype) if split else result[0, :m]


def contiguous(
    x, x_scale, w, w_scale, tile_group, group_offset, tile_m, out_dtype, *, plan: TilePlan | None = None,
    num_sms: int | None = None,
) -> jax.Array:  # fmt: skip
    """Multiplies aligned rows x [A, K] with their tiles' weights on Hopper; operands are checked as in `dense`."""
    num_sms = num_sms or multiprocessors.traced().taken
    (m, k), n = x.shape, w.shape[1]
    _check_strides("grouped gemm, contiguous", n, k, x.dtype)
    wanted = plan or plan_contiguous(m, tile_m, n, k, x.dtype.itemsize, num_sms)
    _check_narrow_output("grouped gemm, contiguous", wanted, out_dtype)
    schedule = (ContiguousPairs if wanted.cluster > 1 else Contiguous)(m, tile_m)
    kernel = kernel_of_plan(wanted, schedule, x, w, ((1, m, n), out_dtype))
    operands = (tile_group.astype(jnp.int32), _offset(group_offset))
    return kernel(x[None], w, _scales(x_scale, w_scale, lambda s: s[None]), operands, num_sms)[0]


def heads(x, w, layer, transposed: bool, *, carried: int = 0, num_sms: int | None = None) -> jax.Array:
    """Multiplies each head of x [M, H, K] with its w [L * H, N, K], or transposed [L * H, K, N], on Hopper.

    With `carried` x has that many more columns, which are appended to the product, in place.
    """
    (m, h, width), n = x.shape, w.shape[2 if transposed else 1]
    k = width - carried
    _check_strides("head gemm", n + carried, width, x.dtype)
    _check_strides("head gemm", n, k, x.dtype)
    x = pad_to_tiles(x.reshape(1, m, h * width)).reshape(-1, h, width)
    tile_m = 64 if invariance.planned_rows(m) <= 64 else 128
    kernel = HeadKernel(
        tile_m=tile_m,
        tile_n=128,
        stages=None,
        cluster=1,
        schedule=Heads(h, m, tile_m),
        dtype=jnp.dtype(x.dtype),
        out_type=jax.ShapeDtypeStruct((x.shape[0], h, n + carried), x.dtype),
        shape_n=n,
        shape_k=k,
        transposed=transposed,
    )
    out = kernel(x, w, (), (_offset(layer),), num_sms or multiprocessors.traced().taken)
    return (lax.dynamic_update_slice(out, x[..., k:], (0, 0, n)) if carried else out)[:m]


def kernel_of_plan(
    plan: TilePlan, schedule: TileSchedule, x, w, out, narrow: type[GemmKernel] = NarrowKernel
) -> GemmKernel:
    """Returns the kernel of a plan for x `[.., M, K]` and w `[.., N, K]`; `out` is shape and dtype of its result."""
    wide = TallKernel if plan.is_tall else WideKernel
    return (wide if plan.wide else narrow)(
        tile_m=plan.tile_m,
        tile_n=plan.tile_n,
        stages=plan.stages,
        cluster=plan.cluster,
        schedule=schedule,
        dtype=jnp.dtype(x.dtype),
        out_type=jax.ShapeDtypeStruct(*out),
        shape_n=w.shape[1],
        shape_k=w.shape[2],
        shares_weights=plan.shares_weights,
    )


def _scales(x_scale, w_scale, lead) -> tuple:
    return () if x_scale is None else (lead(row_scales(x_scale)), w_scale)


def row_scales(scale: jax.Array) -> jax.Array:
    """Returns the scales of rows with as many columns as TMA needs."""
    pad = -scale.shape[-1] % _SCALES_PER_LOAD
    return jnp.pad(scale, [(0, 0)] * (scale.ndim - 1) + [(0, pad)]) if pad else scale


def _offset(group_offset) -> jax.Array:
    return jnp.asarray(group_offset, jnp.int32).reshape(1)


def _padded_rows(m: int, split: bool) -> int:
    """Rounds rows of a result up: TMA stores whole swizzled tiles, or less than one."""
    tile = _SPLIT_TILE_COLUMNS if split else TILE_ROWS
    multiple = _SCALES_PER_LOAD if m < tile else tile
    return -(-m // multiple) * multiple


def _check_strides(name: str, n: int, k: int, dtype) -> None:
    if k * dtype.itemsize % 16 or n % 8:
        raise ValueError(
            f"{name}: TMA needs K in multiples of {16 // dtype.itemsize} ({dtype}) and N in multiples of 8, "
            f"got N={n}, K={k}; pad the weights or use Backend.REFERENCE"
        )


def _check_narrow_output(name: str, plan: TilePlan, out_dtype) -> None:
    if not plan.wide and jnp.dtype(out_dtype).itemsize != 2:
        raise ValueError(
            f"{name}: tiles of {plan.tile_m} rows give 16-bit results, got out_dtype {jnp.dtype(out_dtype)}"
        )
