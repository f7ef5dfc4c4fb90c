"""Quantization as one Mosaic GPU kernel: values read once, written once.

XLA compiles the jnp form to three kernels that read the input twice, and for SwiGLU writes and reads back a float32
product besides: 109 bytes where 42 would do (from the program compiled for an H200, 4096 rows of 2 x 2048).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import bodies
from pallas_kernels.float8 import BLOCK, E4M3
from pallas_kernels.mosaic import pad_to_tiles, plgpu, swizzle_transforms, whole_tile

_ROWS = 64


def supports(x: jax.Array, halves: int) -> bool:
    """Returns whether TMA can address input and result: rows of bfloat16 or float32 in multiples of 16 values.

    Results longer than a tile must be whole swizzled rows of 32 values.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float32) or x.shape[-1] % (16 * halves) or not x.size:
        return False
    channels = x.shape[-1] // halves
    return channels <= BLOCK or channels % 32 == 0


@functools.partial(jax.jit, static_argnames=("gated", "limit", "scale_of", "finish"))  # equal calls share a lowering
def quantize_rows(
    x: jax.Array, used_rows: jax.Array | None, *, gated: bool, limit: float | None, scale_of, finish
) -> tuple[jax.Array, jax.Array]:
    """Quantizes per row and 128 channels, after SwiGLU when `gated`.

    Args:
      x: [G, M, C], or [G, M, 2C] when gated.
      used_rows: int32, or None for M; tiles of 64 rows that begin past it are not read and not written.
      gated: the channels are gate and up halves.
      limit: of SwiGLU's halves, the first only from above; None: no bound.
      scale_of: from the largest magnitudes of rows to their scales.
      finish: from scaled float32 values to e4m3.

    Returns:
      values [G, M, C] e4m3 and scales [G, ceil(C/128), M] float32.
    """
    wanted_rows = x.shape[1]
    x = pad_to_tiles(x)
    groups, rows, width = x.shape
    halves = 2 if gated else 1
    channels = width // halves
    padded_rows = pl.cdiv(rows, 4) * 4  # TMA strides are multiples of 16 bytes
    blocks = pl.cdiv(channels, BLOCK)
    used_rows = jnp.asarray(wanted_rows if used_rows is None else used_rows, jnp.int32).reshape(1)

    def body(x_ref, used_ref, q_ref, scale_ref, x_s, q_s, scale_s, loaded):
        group, block = lax.axis_index("group"), lax.axis_index("block")
        first = lax.axis_index("row") * _ROWS
        at = pl.ds(first, _ROWS)
        channel = pl.ds(block * BLOCK, BLOCK)

        @pl.when(first < used_ref[0])
        def _quantize():
            for half in range(halves):
                plgpu.copy_gmem_to_smem(x_ref.at[group, at, half, channel], x_s.at[half], loaded)
            plgpu.barrier_wait(loaded)
            values = _load(x_s.at[0])
            if gated:
                up = _load(x_s.at[1])
                if limit is not None:
                    values, up = jnp.minimum(values, limit), jnp.clip(up, -limit, limit)
                values = values / (1.0 + jnp.exp(-values)) * up
            scale = scale_of(jnp.max(jnp.abs(values), axis=1))
            inverse = lax.broadcast_in_dim(1.0 / scale, values.shape, [0])
            q_s[...] = finish(values * inverse)
            scale_s[...] = scale
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_s, q_ref.at[group, at, channel])
            plgpu.copy_smem_to_gmem(scale_s, scale_ref.at[group, block, at])
            plgpu.wait_smem_to_gmem(0)

    body.__name__ = "swiglu_quantize" if gated else "quantize_1x128"  # the name in profiles
    q, scale = plgpu.kernel(
        bodies.traced(body),
        out_type=(
            jax.ShapeDtypeStruct((groups, rows, channels), E4M3),
            jax.ShapeDtypeStruct((groups, blocks, padded_rows), jnp.float32),
        ),
        grid=(groups, pl.cdiv(rows, _ROWS), blocks),
        grid_names=("group", "row", "block"),
        num_threads=1,
        thread_name="wg",
        scratch_types={
            "x_s": plgpu.SMEM((halves, _ROWS, BLOCK), x.dtype, transforms=_transforms(x.dtype, channels)),
            "q_s": plgpu.SMEM((_ROWS, BLOCK), E4M3, transforms=_transforms(E4M3, channels)),
            "scale_s": plgpu.SMEM((_ROWS,), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=halves),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(x.reshape(groups, rows, halves, channels), used_rows)
    return q[:, :wanted_rows], scale[..., :wanted_rows]


def _transforms(dtype: jax.typing.DTypeLike, channels: int) -> Any:
    """Returns tiling and swizzle of a block whose tiles divide rows of so many channels, as TMA requires."""
    return swizzle_transforms(dtype, whole_tile(BLOCK, channels, jnp.dtype(dtype)))


def _load(ref) -> jax.Array:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
