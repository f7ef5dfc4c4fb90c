"""Block quantization to e4m3: 1x128 for activations, 128x128 for weights, and SwiGLU fused with the former.

Follows section 3.3.2 of the DeepSeek-V3 report (arXiv:2412.19437) and DeepGEMM's test utilities: the scale of a block
is its largest magnitude over 448, with the magnitude clamped at 1e-4; a value is recovered by *multiplying* with it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.backend import Backend, resolve_backend, with_fallback
from pallas_kernels.float8 import AMAX_FLOOR, BLOCK, E4M3, E4M3_MAX
from pallas_kernels.fp8 import mosaic_quantize, triton_quantize


def quantize_1x128(x: jax.Array, *, ue8m0: bool = False, backend: Backend | None = None) -> tuple[jax.Array, jax.Array]:
    """Quantizes activations per row and 128 channels.

    Args:
      x: [..., M, K] floating point. A last block of fewer than 128 channels has a scale of its own.
      ue8m0: round scales up to powers of two (DeepSeek-V3.1's `scale_fmt`).
      backend: implementation; None selects by device. The kernel needs bfloat16 or float32 and K in multiples of 16;
        other inputs take the reference on every device.

    Returns:
      values [..., M, K] e4m3 and scales [..., ceil(K/128), M] float32. The scales are M-major, as in DeepGEMM on
      Hopper, because the GEMM then loads one contiguous run of them per 128 of K. The scales of selected rows are
      `scale[..., rows]`.

    Raises:
      ValueError: x is no floating-point array of two or more axes.
    """
    _require_float("quantize_1x128", x, 2)
    return _quantize_rows(x, None, gated=False, ue8m0=ue8m0, backend=backend)


def quantize_128x128(
    w: jax.Array, *, ue8m0: bool = False, backend: Backend | None = None
) -> tuple[jax.Array, jax.Array]:
    """Quantizes weights in blocks of 128 rows by 128 columns, counted from the first row and column.

    Args:
      w: [..., N, K] floating point; blocks at the lower and right edges may be partial.
      ue8m0: round scales up to powers of two.
      backend: implementation; None selects by device.

    Returns:
      values [..., N, K] e4m3 and scales [..., ceil(N/128), ceil(K/128)] float32, which is `weight_scale_inv` of a
      DeepSeek checkpoint.
    """
    resolve_backend(requested=backend)
    _require_float("quantize_128x128", w, 2)
    n, k = w.shape[-2:]
    blocks = _split_blocks(w.astype(jnp.float32))  # [..., n, 128, k, 128]
    scale_of = _power_of_two_block_scale if ue8m0 else _block_scale
    scale = scale_of(jnp.max(jnp.abs(blocks), axis=(-3, -1)))  # [..., n, k]
    values = _to_e4m3(blocks / scale[..., :, None, :, None])
    return _join_blocks(values, n, k), scale


def dequantize_128x128(
    q: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike = jnp.bfloat16, *, backend: Backend | None = None
) -> jax.Array:
    """Recovers weights [..., N, K] in `dtype` from e4m3 values [..., N, K] and scales [..., ceil(N/128), ceil(K/128)].

    Raises:
      ValueError: the scale's shape does not belong to the values' shape.
    """
    resolve_backend(requested=backend)
    n, k = q.shape[-2:]
    expected = (*q.shape[:-2], -(-n // BLOCK), -(-k // BLOCK))
    if scale.shape != expected:
        raise ValueError(f"dequantize_128x128: values {q.shape} need scales {expected}, got {scale.shape}")
    blocks = _split_blocks(q).astype(jnp.float32) * scale.astype(jnp.float32)[..., :, None, :, None]
    return _join_blocks(blocks.astype(dtype), n, k)


def swiglu_quantize(
    gate_up: jax.Array,
    *,
    limit: float | None = None,
    ue8m0: bool = False,
    used_rows: jax.Array | None = None,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes `silu(gate) * up` in float32 and quantizes it per row and 128 channels, for an expert's second product.

    Args:
      gate_up: [..., M, 2I]; the first I channels are the gate.
      limit: bounds the gate from above and the others on both sides, as a value of gate_up's dtype; None: no bound.
      ue8m0, backend: as `quantize_1x128`.
      used_rows: int32 scalar on the device, or None for M. Later rows are undefined; the kernel skips them.

    Returns:
      values [..., M, I] e4m3 and scales [..., ceil(I/128), M] float32, as `quantize_1x128`.

    Raises:
      ValueError: as `quantize_1x128`, an odd number of channels, or `used_rows` that is no scalar.
    """
    _require_float("swiglu_quantize", gate_up, 2)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu_quantize: the last axis holds gate and up halves, got odd shape {gate_up.shape}")
    if used_rows is not None and jnp.ndim(used_rows):
        raise ValueError(f"swiglu_quantize: used_rows must be a scalar, got shape {jnp.shape(used_rows)}")
    limit = None if limit is None else float(np.asarray(limit, gate_up.dtype))
    return _quantize_rows(gate_up, used_rows, gated=True, limit=limit, ue8m0=ue8m0, backend=backend)


def _quantize_rows(
    x, used_rows, *, gated: bool, ue8m0: bool, backend: Backend | None, limit: float | None = None
) -> tuple[jax.Array, jax.Array]:
    scale_of = _power_of_two_block_scale if ue8m0 else _block_scale
    backend = with_fallback("swiglu_quantize" if gated else "quantize_1x128", backend)
    chosen, grouped = resolve_backend(requested=backend), x.reshape(-1, *x.shape[-2:])
    if chosen is Backend.TRITON and x.size:
        made = triton_quantize.quantize_rows(grouped, used_rows, gated=gated, limit=limit, power_of_two=ue8m0)
        return _ungrouped(x, *made)
    if chosen is Backend.MOSAIC and mosaic_quantize.supports(x, 2 if gated else 1):
        how = {"gated": gated, "limit": limit, "scale_of": scale_of, "finish": _to_e4m3}
        made = mosaic_quantize.quantize_rows(grouped, used_rows, **how)
        return _ungrouped(x, *made)
    x = x.astype(jnp.float32)
    if gated:
        gate, up = jnp.split(x, 2, axis=-1)
        if limit is not None:
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        x = jax.nn.silu(gate) * up
    if chosen is Backend.NATIVE and x.size:
        return _ungrouped(x, *native.quantize_rows(x.reshape(-1, *x.shape[-2:]), ue8m0))
    blocks = _split_last(x)  # [..., M, k, 128]
    scale = scale_of(jnp.max(jnp.abs(blocks), axis=-1))  # [..., M, k]
    values = _to_e4m3(blocks * (1.0 / scale)[..., None])
    return values.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], jnp.swapaxes(scale, -1, -2)


def _ungrouped(x: jax.Array, q: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gives the results of a kernel [G, M, _], [G, _, M] the leading axes of x."""
    return q.reshape(*x.shape[:-1], q.shape[-1]), scale.reshape(*x.shape[:-2], *scale.shape[1:])


def _block_scale(amax: jax.Array) -> jax.Array:
    return jnp.maximum(amax, AMAX_FLOOR) / E4M3_MAX


def _power_of_two_block_scale(amax: jax.Array) -> jax.Array:
    return _ceil_to_power_of_two(_block_scale(amax))


def _ceil_to_power_of_two(scale: jax.Array) -> jax.Array:
    """Returns the next power of two, exactly, for positive normal float32: carry any mantissa bit into the exponent."""
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    return jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, jnp.float32)


def _to_e4m3(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(E4M3)  # rounding of the scale may push the largest past 448


def _split_last(x: jax.Array) -> jax.Array:
    """Splits [..., K] into [..., ceil(K/128), 128], zero-padded."""
    pad = -x.shape[-1] % BLOCK
    if pad:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)])
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def _split_blocks(w: jax.Array) -> jax.Array:
    """Splits [..., N, K] into [..., ceil(N/128), 128, ceil(K/128), 128], zero-padded."""
    pad_n, pad_k = -w.shape[-2] % BLOCK, -w.shape[-1] % BLOCK
    if pad_n or pad_k:
        w = jnp.pad(w, [(0, 0)] * (w.ndim - 2) + [(0, pad_n), (0, pad_k)])
    return w.reshape(*w.shape[:-2], w.shape[-2] // BLOCK, BLOCK, w.shape[-1] // BLOCK, BLOCK)


def _join_blocks(blocks: jax.Array, n: int, k: int) -> jax.Array:
    """Undoes `_split_blocks` and cuts the padding off."""
    *lead, rows, _, columns, _ = blocks.shape
    return blocks.reshape(*lead, rows * BLOCK, columns * BLOCK)[..., :n, :k]


def _require_float(name: str, x: jax.Array, min_ndim: int) -> None:
    if x.ndim < min_ndim or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name}: needs a floating-point array of {min_ndim} or more axes, got {x.shape} {x.dtype}")
