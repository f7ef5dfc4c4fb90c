"""FP8 (e4m3) with block scales: quantization, alone or after SwiGLU, and dense products, also of training.

Follows section 3.3.2 of the DeepSeek-V3 report (arXiv:2412.19437) and DeepGEMM's test utilities: the scale of a block
is its largest magnitude over 448, with the magnitude clamped at 1e-4; a value is recovered by *multiplying* with it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import mosaic_quantize, native
from pallas_kernels.backend import Backend, resolve_backend, resolve_operation, traced_gpu, with_fallback
from pallas_kernels.float8 import AMAX_FLOOR, BLOCK, E4M3, E4M3_MAX
from pallas_kernels.gemm import KERNELS
from pallas_kernels.gemm.checks import check_operands
from pallas_kernels.triton import call

_LEAST_ROWS = 8
"""Rows are padded to this many: XLA:CPU multiplies bfloat16 natively from here on, and is slower for one row."""
_TRITON_ROWS = 16  # of a program


def fp8_gemm(
    a: jax.Array,
    a_scale: jax.Array,
    b: jax.Array,
    b_scale: jax.Array,
    *,
    layer: jax.Array | int | None = None,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: Backend | None = None,
) -> jax.Array:
    """Returns `(a * a_scale) @ (b * b_scale).T` (DeepGEMM's `fp8_gemm_nt`), with float32 sums of each 128 of K.

    Args:
      a: [M, K] e4m3 activations, and a_scale: [ceil(K/128), M] float32, both from `quantize_1x128`.
      b: [N, K] e4m3 weights, or a stack [L, N, K] with `layer`.
      b_scale: [ceil(N/128), ceil(K/128)] float32, or [L, ceil(N/128), ceil(K/128)]: `weight_scale_inv`.
      layer: which weight of the stack, a Python or traced integer. XLA would copy the weight
        that a scan slices, every iteration; the kernel addresses it in place.
      out_dtype: bfloat16 or float32.
      backend: implementation; None selects by device.

    Returns:
      [M, N] in `out_dtype`.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also N that is no multiple of 8 or K that is
        no multiple of 16.
    """
    _validate(a, a_scale, b, b_scale, layer, out_dtype)
    chosen = resolve_operation("fp8_gemm", backend)
    stack = (b[None], b_scale[None], 0) if layer is None else (b, b_scale, layer)
    if chosen in KERNELS:
        return KERNELS[chosen].dense(a, a_scale, *stack, out_dtype)
    if chosen is Backend.NATIVE and native.takes(a.dtype, a.shape[0]):
        b, b_scale, layer = stack
        return native.fp8_grouped_product(a, a_scale, b, b_scale, jnp.zeros(1, jnp.int32), layer, out_dtype)
    if layer is not None:
        b = lax.dynamic_index_in_dim(b, layer, 0, keepdims=False)
        b_scale = lax.dynamic_index_in_dim(b_scale, layer, 0, keepdims=False)
    return scaled_matmul(a, a_scale, b, b_scale).astype(out_dtype)


def _validate(a, a_scale, b, b_scale, layer, out_dtype) -> None:
    given = f"a {a.shape} {a.dtype}, a_scale {a_scale.shape}, b {b.shape} {b.dtype}, b_scale {b_scale.shape}"
    if a.ndim != 2 or b.ndim not in (2, 3) or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"fp8_gemm: needs a [M, K] and b [N, K] or [L, N, K] with one K; got {given}")
    if (b.ndim == 3) != (layer is not None):
        raise ValueError(f"fp8_gemm: `layer` is for a stack b [L, N, K] and only for it; got layer={layer}, {given}")
    check_operands("fp8_gemm", a, a_scale, b, b_scale)
    if jnp.dtype(out_dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"fp8_gemm: out_dtype must be bfloat16 or float32, got {jnp.dtype(out_dtype)}")


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


def trained_gemm(x: jax.Array, w: jax.Array, *, backend: Backend | None = None) -> jax.Array:
    """Returns `x @ w.T` of e4m3 values, with gradients of e4m3 values too; all sums are float32.

        y  = x w^T     x in tiles of 1 x 128, w in blocks of 128 x 128
        dx = dy w      dy in tiles of 1 x 128, the same blocks of w
        dw = dy^T x    both in tiles of 128 x 1: 128 tokens of one channel

    The first two are `fp8_gemm`, which has a kernel on every GPU. No kernel here supports a scale per row of both
    operands, which the third has. There the e4m3 values are multiplied in bfloat16, at its rate: scales are powers of
    two, so that is exact.

    The gradient saves x as e4m3 tiles, one byte per value. They are requantized along the tokens there.

    Args:
      x: [T, K] bfloat16 or float32.
      w: [N, K] bfloat16 or float32, not quantized: the gradient is that of these values.
      backend: implementation; None selects by device.

    Returns:
      [T, N] in x's dtype. The gradients have the dtypes of x and w.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also N or K that is no multiple of 16.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"trained_gemm: needs x [T, K] and w [N, K] with one K, got {x.shape} and {w.shape}")
    backend = with_fallback("trained_gemm", backend)
    return trained_product("trained_gemm", x, w, None, _trained_dense, _dense_gradient, backend)


def _quantize_rows(
    x, used_rows, *, gated: bool, ue8m0: bool, backend: Backend | None, limit: float | None = None
) -> tuple[jax.Array, jax.Array]:
    scale_of = _power_of_two_block_scale if ue8m0 else _block_scale
    backend = with_fallback("swiglu_quantize" if gated else "quantize_1x128", backend)
    chosen, grouped = resolve_backend(requested=backend), x.reshape(-1, *x.shape[-2:])
    if chosen is Backend.TRITON and x.size:
        made = _quantize_triton(grouped, used_rows, gated=gated, limit=limit, power_of_two=ue8m0)
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


def scaled_matmul(a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array) -> jax.Array:
    """Computes `(a * a_scale) @ (b * b_scale).T` as Hopper does: float32 sums of 128 exact products, scaled, added.

    Args:
      a: [M, K] e4m3; a_scale: [ceil(K/128), M] float32.
      b: [N, K] e4m3; b_scale: [ceil(N/128), ceil(K/128)] float32.

    Returns:
      [M, N] float32.
    """
    m, n = a.shape[0], b.shape[0]
    a, b = _pad(a, max(m, _LEAST_ROWS), BLOCK), _pad(b, n, BLOCK)
    a_scale = jnp.pad(a_scale, ((0, 0), (0, a.shape[0] - m)))
    column_scale = jnp.repeat(b_scale, BLOCK, axis=0, total_repeat_length=b_scale.shape[0] * BLOCK)[:n].T  # [k, N]

    def add_block(i, acc):
        # e4m3 is exact in bfloat16, and from 8 rows up XLA:CPU multiplies bfloat16 natively.
        a_k = lax.dynamic_slice_in_dim(a, i * BLOCK, BLOCK, 1).astype(jnp.bfloat16)
        b_k = lax.dynamic_slice_in_dim(b, i * BLOCK, BLOCK, 1).astype(jnp.bfloat16)
        partial = lax.dot_general(a_k, b_k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return acc + partial * a_scale[i][:, None] * column_scale[i][None, :]

    zero = jnp.zeros((a.shape[0], n), jnp.float32)
    return lax.fori_loop(0, a.shape[1] // BLOCK, add_block, zero, unroll=4)[:m]


def _pad(x: jax.Array, rows: int, column_multiple: int) -> jax.Array:
    pad = ((0, rows - x.shape[0]), (0, -x.shape[1] % column_multiple))
    return jnp.pad(x, pad) if any(high for _, high in pad) else x


def _quantize_triton(
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
        (x, call.scalar(rows if used_rows is None else used_rows)),
        (
            jax.ShapeDtypeStruct((groups, rows, channels), values_type),
            jax.ShapeDtypeStruct((groups, blocks, rows), jnp.float32),
        ),
        grid=(-(-rows // _TRITON_ROWS), blocks, groups),
        rows=rows,
        CHANNELS=channels,
        GATED=gated,
        LIMIT=limit or 0.0,
        POWER_OF_TWO=power_of_two,
        FLOOR=AMAX_FLOOR,
        MAX=E4M3_MAX,
        BLOCK_M=_TRITON_ROWS,
        BLOCK=BLOCK,
    )
    return values if values.dtype == E4M3 else lax.bitcast_convert_type(values, E4M3), scale


Quantized = tuple[jax.Array, jax.Array]
"""e4m3 values and their float32 scales."""


def trained_product(
    name: str,
    x: jax.Array,
    w: jax.Array,
    tile_group: jax.Array | None,
    multiply: Callable[..., jax.Array],
    weight_gradient: Callable[..., jax.Array],
    backend: Backend | None,
) -> jax.Array:
    """Returns the product of training `name`, see `trained_gemm`; with `tile_group` of experts.

    Args:
      multiply: (tiles of x, blocks of w, tile_group, dtype, backend) -> their product.
      weight_gradient: (dy, x, tile_group, w) -> dy^T x, float32; dy and x are bfloat16, w is for its shape.

    Raises ValueError unless x and w are bfloat16 or float32.
    """
    supported = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
    if x.dtype not in supported or w.dtype not in supported:
        raise ValueError(f"{name}: x and w must be bfloat16 or float32, got {x.dtype} and {w.dtype}")
    return _trained(x, w, tile_group, multiply, weight_gradient, jnp.dtype(w.dtype), backend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _trained(x, w, tile_group, multiply, weight_gradient, weight_dtype, backend):
    return _trained_forward(x, w, tile_group, multiply, weight_gradient, weight_dtype, backend)[0]


def _trained_forward(x, w, tile_group, multiply, weight_gradient, weight_dtype, backend):
    tiles, blocks = activation_tiles(x, backend), quantize_128x128(w, backend=backend)
    return multiply(tiles, blocks, tile_group, x.dtype, backend), (tiles, blocks, tile_group)


def _trained_backward(multiply, weight_gradient, weight_dtype, backend, saved, dy):
    tiles, blocks, tile_group = saved
    transposed = [jnp.swapaxes(part, -1, -2) for part in blocks]
    dx = multiply(activation_tiles(dy, backend), transposed, tile_group, dy.dtype, backend)
    by_token = along_tokens(dy, backend), along_tokens(dequantized(tiles), backend)
    return dx, weight_gradient(*by_token, tile_group, blocks[0]).astype(weight_dtype), None


_trained.defvjp(_trained_forward, _trained_backward)


def _trained_dense(tiles, blocks, tile_group, dtype, backend):
    return fp8_gemm(*tiles, *blocks, out_dtype=dtype, backend=backend)


def _dense_gradient(dy, x, tile_group, w):
    return lax.dot_general(dy, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def activation_tiles(x: jax.Array, backend: Backend | None) -> Quantized:
    """Returns x `[T, C]` in tiles of one token by 128 channels: values `[T, C]`, scales `[ceil(C/128), T]`."""
    return quantize_1x128(x, ue8m0=True, backend=backend)


def along_tokens(x: jax.Array, backend: Backend | None) -> jax.Array:
    """Returns x `[T, C]` rounded to e4m3 in tiles of 128 tokens by one channel, exact in bfloat16.

    The last tile may have fewer tokens.
    """
    return dequantized(activation_tiles(x.T, backend)).T


def dequantized(tiles: Quantized) -> jax.Array:
    """Returns the values of tiles with power-of-two scales, bfloat16 `[M, K]`, exactly.

    `tiles` are values `[M, K]` and scales `[ceil(K/128), M]`.
    """
    values, scale = tiles
    columns = jnp.repeat(scale.T, BLOCK, axis=1, total_repeat_length=scale.shape[0] * BLOCK)
    return (values.astype(jnp.float32) * columns[:, : values.shape[1]]).astype(jnp.bfloat16)
