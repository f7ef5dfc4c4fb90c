"""Queries and latents of DeepSeek-V4: over their root mean square, and rotated.

XLA compiles either to three kernels or more on a GPU, each of which reads the rows. The Triton kernels read them once,
on Hopper too.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend, resolve_operation, traced_gpu, uses_triton
from pallas_kernels.float8 import AMAX_FLOOR, BLOCK, E4M3, E4M3_MAX
from pallas_kernels.fp8 import quantize_1x128
from pallas_kernels.rows import differentiable, rms_norm, rotate_heads
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import power_of_two


class NormedLatents(NamedTuple):
    """Query latents `[T, Q]` and latents `[T, d]`, normed, and what `fp8.quantize_1x128` gives of the former."""

    query: jax.Array
    latent: jax.Array
    quantized: tuple[jax.Array, jax.Array] | None = None


def unit_rotated_heads(
    x: jax.Array, cos: jax.Array, sin: jax.Array, eps: float, *, backend: Backend | None = None
) -> jax.Array:
    """Returns `x / rms(x)` over the last axis of `x` `[T, H, W]`, rounded to its dtype, then rotated.

    Args:
      x: [T, H, W] of a float type.
      cos, sin: [T, P / 2] float32, for the last P values of each head, as in `rotate_heads`.
      eps: added to the mean square, which is float32.
      backend: implementation; None selects by device.
    """
    backend = resolve_operation("unit_rotated_heads", backend)
    reference = functools.partial(_reference, eps, backend)
    if not uses_triton(backend) or not x.size:
        return reference(x, cos, sin)
    return differentiable(functools.partial(_kernel, eps, backend), reference)(x, cos, sin)


def normed_latents(
    down: jax.Array,
    query_norm: jax.Array,
    norm: jax.Array,
    layer: jax.Array | int,
    cos: jax.Array,
    sin: jax.Array,
    eps: float,
    *,
    ue8m0: bool | None = None,
    backend: Backend | None = None,
) -> NormedLatents:
    """Returns query latents `[T, Q]`, and latents `[T, d]` rotated as by `rotate_heads`, both normed as by `rms_norm`.

    Args:
      down: [T, Q + d] of a float type.
      query_norm: [L, Q]; norm: [L, d].
      layer: Python or traced integer.
      cos, sin: [T, P / 2] float32, for the last P values of a latent.
      eps: added to the mean squares.
      ue8m0: of the scales, if query latents are quantized too. They have no gradient then.
      backend: implementation; None selects by device.
    """
    backend = resolve_operation("normed_latents", backend)
    reference = functools.partial(_latents_reference, eps, backend)
    arrays = down, query_norm, norm, jnp.asarray(layer, jnp.int32), cos, sin
    if not uses_triton(backend) or not down.size:
        found = reference(*arrays)
    elif ue8m0 is not None and quantizes_rows(query_norm.shape[1], backend):
        return _latents_kernel(eps, backend, *arrays, ue8m0=ue8m0)
    else:
        found = differentiable(functools.partial(_latents_kernel, eps, backend), reference)(*arrays)
    if ue8m0 is None:
        return found
    return found._replace(quantized=quantize_1x128(found.query, ue8m0=ue8m0, backend=backend))


def quantizes_rows(width: int, backend: Backend) -> bool:
    """Returns whether kernels that make rows of this width quantize them, too."""
    return traced_gpu(backend).fp8 and width % BLOCK == 0


def _latents_reference(
    eps: float,
    backend: Backend,
    down: jax.Array,
    query_norm: jax.Array,
    norm: jax.Array,
    layer: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
) -> NormedLatents:
    latent = rms_norm(down[:, -norm.shape[1] :], norm, layer, eps, backend=backend)
    turned = rotate_heads(latent[:, None], cos, sin, backend=backend)[:, 0]
    return NormedLatents(rms_norm(down, query_norm, layer, eps, backend=backend), turned)


def _latents_kernel(
    eps: float,
    backend: Backend,
    down: jax.Array,
    query_norm: jax.Array,
    norm: jax.Array,
    layer: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    ue8m0: bool | None = None,
) -> NormedLatents:
    widths = query_norm.shape[1], norm.shape[1]
    shapes = [jax.ShapeDtypeStruct((len(down), width), down.dtype) for width in widths]
    fp8 = quantized_shapes(len(down), widths[0], ue8m0)
    query, latent, values, scale = call.start(
        "heads.normed_latents",
        (down, query_norm, norm, layer.reshape(1), cos, sin),
        (*shapes, *fp8),
        grid=(len(down), 2),
        backend=backend,
        QUERY=widths[0],
        WIDTH=widths[1],
        ROTATED=2 * cos.shape[1],
        EPS=eps,
        **quantization(ue8m0),
        BLOCK_Q=power_of_two(widths[0]),
        BLOCK=power_of_two(widths[1]),
    )
    return NormedLatents(query, latent, None if ue8m0 is None else (values, scale))


def quantized_shapes(rows: int, width: int, ue8m0: bool | None) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes of values and scales of rows, of one element each where a kernel does not quantize."""
    values, scale = ((rows, width), (width // BLOCK, rows)) if ue8m0 is not None else ((1,), (1,))
    return jax.ShapeDtypeStruct(values, E4M3 if ue8m0 is not None else jnp.uint8), jax.ShapeDtypeStruct(
        scale, jnp.float32
    )


def quantization(ue8m0: bool | None) -> dict[str, Any]:
    """Returns the arguments of a kernel that quantizes rows, unless `ue8m0` is None."""
    how = {"QUANTIZED": ue8m0 is not None, "POWER_OF_TWO": bool(ue8m0)}
    return {**how, "FLOOR": AMAX_FLOOR, "MAX": E4M3_MAX}


def _reference(eps: float, backend: Backend, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    unit = (x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)
    return rotate_heads(unit, cos, sin, backend=backend)


def _kernel(eps: float, backend: Backend, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    T, heads, width = x.shape
    (out,) = call.start(
        "heads.unit_rotated",
        (x, cos, sin),
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=(T, heads),
        backend=backend,
        warps=1,
        HEADS=heads,
        WIDTH=width,
        ROTATED=2 * cos.shape[1],
        EPS=eps,
        BLOCK=power_of_two(width),
    )
    return out
