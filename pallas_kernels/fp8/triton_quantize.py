"""Quantization on the Triton kernel, beside `mosaic_quantize.py`."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import traced_gpu
from pallas_kernels.float8 import AMAX_FLOOR, BLOCK, E4M3, E4M3_MAX
from pallas_kernels.triton import call

_ROWS = 16


def quantize_rows(
    x: jax.Array, used_rows: jax.Array | None, *, gated: bool, limit: float | None, power_of_two: bool
) -> tuple[jax.Array, jax.Array]:
    """Quantizes x [G, M, C], or [G, M, 2C] when gated, per row and 128 channels, after SwiGLU when gated.

    Args:
      used_rows: int32, or None for M; tiles of 16 rows that begin past it are not read and not written.
      limit: of SwiGLU's halves, the first only from above; None: no bound.
      power_of_two: round scales up to powers of two.

    Returns:
      values [G, M, C] e4m3 and scales [G, ceil(C/128), M] float32.
    """
    groups, rows, width = x.shape
    channels = width // 2 if gated else width
    blocks, values_type = -(-channels // BLOCK), E4M3 if traced_gpu().fp8 else jnp.uint8
    values, scale = call.start(
        "quantize.quantize",
        (x, jnp.asarray(rows if used_rows is None else used_rows, jnp.int32).reshape(1)),
        (
            jax.ShapeDtypeStruct((groups, rows, channels), values_type),
            jax.ShapeDtypeStruct((groups, blocks, rows), jnp.float32),
        ),
        grid=(-(-rows // _ROWS), blocks, groups),
        rows=rows,
        CHANNELS=channels,
        GATED=gated,
        LIMIT=limit or 0.0,
        POWER_OF_TWO=power_of_two,
        FLOOR=AMAX_FLOOR,
        MAX=E4M3_MAX,
        BLOCK_M=_ROWS,
        BLOCK=BLOCK,
    )
    return values if values.dtype == E4M3 else lax.bitcast_convert_type(values, E4M3), scale
