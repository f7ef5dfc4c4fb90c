"""Argument checks of the products: a ValueError with the offending shapes and types, before anything is traced."""

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.backend import Backend, resolve_operation
from pallas_kernels.float8 import BLOCK, E4M3

KERNEL_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
"""Types without scales that the kernels multiply."""

PLAIN_DTYPES = (*KERNEL_DTYPES, jnp.dtype(jnp.float32))
"""Types without scales that the references multiply."""


def plain_backend(
    name: str,
    dtype: jax.typing.DTypeLike,
    rows: int,
    requested: Backend | None,
    weights: tuple[int, ...] | None = None,
) -> Backend:
    """Returns the backend of product `name` of `rows` rows without scales, the reference if there is no kernel.

    MOSAIC and TRITON have none for float32; NATIVE none for float16, and for many rows unless it was measured to be
    faster at the shape `weights` `[L, N, K]`.

    Raises ValueError if MOSAIC or TRITON is requested for an unsupported type.
    """
    if requested in (Backend.MOSAIC, Backend.TRITON) and jnp.dtype(dtype) not in KERNEL_DTYPES:
        kernel = requested.value.capitalize()
        raise ValueError(f"{name}: the {kernel} kernel takes bfloat16 or float16, got {dtype}; use Backend.REFERENCE")
    chosen = resolve_operation(name, requested)
    has_kernel = native.takes(dtype, rows, weights) if chosen is Backend.NATIVE else jnp.dtype(dtype) in KERNEL_DTYPES
    return chosen if has_kernel else Backend.REFERENCE


def check_plain_dtypes(name: str, x: jax.Array, w: jax.Array) -> None:
    """Raises ValueError unless x and w have one dtype of `PLAIN_DTYPES`."""
    if x.dtype != w.dtype or x.dtype not in PLAIN_DTYPES:
        raise ValueError(f"{name}: x and w must be of one dtype, bfloat16, float16 or float32, "
                         f"got {x.dtype} and {w.dtype}")  # fmt: skip


def check_plain(name: str, x: jax.Array, w: jax.Array, x_ndim: int) -> None:
    """Raises ValueError unless x (of `x_ndim` axes) and w [G, N, K] share K and a dtype of `PLAIN_DTYPES`."""
    if x.ndim != x_ndim or w.ndim != 3 or x.shape[-1] != w.shape[-1]:
        raise ValueError(f"{name}: needs x of {x_ndim} axes and w [G, N, K] with one K, got {x.shape} and {w.shape}")
    check_plain_dtypes(name, x, w)


def check_fp8(
    name: str, x: jax.Array, x_scale: jax.Array, w: jax.Array | jax.ShapeDtypeStruct, w_scale: jax.Array, x_ndim: int
) -> None:
    """Raises ValueError unless the four arrays are a block-scaled x (of `x_ndim` axes) and w [G, N, K]."""
    if x.ndim != x_ndim or w.ndim != 3 or x.shape[-1] != w.shape[-1]:
        raise ValueError(f"{name}: needs x of {x_ndim} axes and w [G, N, K] with one K, got {x.shape} and {w.shape}")
    check_operands(name, x, x_scale, w, w_scale)


def check_operands(
    name: str, a: jax.Array, a_scale: jax.Array, b: jax.Array | jax.ShapeDtypeStruct, b_scale: jax.Array
) -> None:
    """Raises ValueError unless a [..., M, K] and b [..., N, K] are e4m3 and the scales float32 of matching shapes."""
    (m, k), n = a.shape[-2:], b.shape[-2]
    k_blocks = -(-k // BLOCK)
    a_scale_shape = (*a.shape[:-2], k_blocks, m)
    b_scale_shape = (*b.shape[:-2], -(-n // BLOCK), k_blocks)
    if a_scale.shape != a_scale_shape or b_scale.shape != b_scale_shape:
        raise ValueError(
            f"{name}: operands {a.shape} and {b.shape} need scales {a_scale_shape} and {b_scale_shape}, "
            f"got {a_scale.shape} and {b_scale.shape}"
        )
    if a.dtype != E4M3 or b.dtype != E4M3 or a_scale.dtype != jnp.float32 or b_scale.dtype != jnp.float32:
        raise ValueError(
            f"{name}: needs float8_e4m3fn operands and float32 scales, "
            f"got {a.dtype}, {b.dtype} and {a_scale.dtype}, {b_scale.dtype}"
        )


def check_tiles(name: str, rows: int, tile_group: jax.Array, tile_m: int) -> None:
    """Raises ValueError unless `tile_group` has an integer for each tile of `tile_m` of the aligned rows."""
    if tile_m < 1 or rows % tile_m or tile_group.shape != (rows // tile_m,):
        raise ValueError(f"{name}: {rows} rows in tiles of {tile_m} need tile_group [{rows}/{tile_m}], "
                         f"got {tile_group.shape}")  # fmt: skip
    if not jnp.issubdtype(tile_group.dtype, jnp.integer):
        raise ValueError(f"{name}: tile_group must be integers, got {tile_group.dtype}")
