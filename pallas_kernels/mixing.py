"""Hyper-connections (arXiv:2512.24880): what a block reads of several residual streams, and the streams after it.

XLA runs Sinkhorn's algorithm on a GPU as a loop of small kernels, two per iteration. The Triton kernels are two for
what is read and one for what is written, on Hopper too. They address the layer in the stack of weights; XLA would copy
it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dense, invariance
from pallas_kernels.backend import Backend, resolve_operation, uses_triton
from pallas_kernels.fp8 import quantize_1x128
from pallas_kernels.heads import quantization, quantized_shapes, quantizes_rows
from pallas_kernels.rows import differentiable, rms_norm
from pallas_kernels.triton import call
from pallas_kernels.triton.tiles import power_of_two

_PARTS = 16
"""Parts of a row's product with the weights. They are the same for any number of rows, and so are a row's sums."""
_DEPTH = 64  # of a row at once
_COLUMNS = 1024  # of a program that writes streams


class StreamsRead(NamedTuple):
    """What a block reads, how its result is added to each of n streams, and how they change places."""

    normed: jax.Array  # [T, D]
    post: jax.Array  # [T, n] float32
    between: jax.Array  # [T, n, n] float32: from stream j, the second axis, to stream k, the third
    quantized: tuple[jax.Array, jax.Array] | None = None  # what `fp8.quantize_1x128` gives of `normed`


def read_streams(
    streams: jax.Array,
    weight: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    norm: jax.Array,
    layer: jax.Array | int,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    ue8m0: bool | None = None,
    backend: Backend | None = None,
) -> StreamsRead:
    """Returns what a block reads, over its root mean square, and how it writes.

    Args:
      streams: [T, n, D] of a float type. The kernels take powers of two for n, the reference any number.
      weight: [L, M, n * D] float32, for n logits of what is read, n of `post`, then n * n of `between`: M is their sum.
      base: [L, M] float32, added to the scaled logits; scale: [L, 3] float32, of the three parts.
      norm: [L, D], the weights of what is read; see `rows.rms_norm`.
      layer: Python or traced integer.
      iterations: of Sinkhorn's algorithm, which makes `between` doubly stochastic.
      eps: added to the weights of what is read, and in the algorithm's quotients.
      norm_eps: added to the mean squares of all streams of a token and of what is read.
      ue8m0: of the scales, if what is read is quantized too. It has no gradient then.
      backend: implementation; None selects by device.
    """
    backend = resolve_operation("read_streams", backend)
    how: dict[str, Any] = {"iterations": iterations, "eps": eps, "norm_eps": norm_eps}
    reference: Callable[..., StreamsRead] = functools.partial(_read_reference, backend=backend, **how)
    arrays = streams, weight, base, scale, norm, jnp.asarray(layer, jnp.int32)
    if not _takes(streams, backend):
        found = reference(*arrays)
    elif ue8m0 is not None and quantizes_rows(streams.shape[2], backend):
        return _read_kernels(*arrays, backend=backend, ue8m0=ue8m0, **how)
    else:
        found = differentiable(functools.partial(_read_kernels, backend=backend, **how), reference)(*arrays)
    if ue8m0 is None:
        return found
    return found._replace(quantized=quantize_1x128(found.normed, ue8m0=ue8m0, backend=backend))


def write_streams(
    streams: jax.Array, post: jax.Array, between: jax.Array, *parts: jax.Array, backend: Backend | None = None
) -> jax.Array:
    """Returns the streams after a block, `[T, n, D]` in their dtype; sums are float32.

    Args:
      streams, post, between: as in `read_streams` and its result.
      parts: [T, D] of float types, one or more, whose sum is the block's result. The kernel takes one or two.
      backend: implementation; None selects by device.
    """
    backend = resolve_operation("write_streams", backend)
    arrays = streams, post, between, *parts
    if len(parts) > 2 or not _takes(streams, backend):
        return _write_reference(*arrays)
    return differentiable(functools.partial(_write_kernel, backend), _write_reference)(*arrays)


def stream_logits(
    streams: jax.Array, weight: jax.Array, layer: jax.Array | int, norm_eps: float, backend: Backend
) -> jax.Array:
    """Returns the logits float32 `[T, M]` of streams `[T, n, D]`, over one root mean square of all of a token.

    `weight` is `[L, M, n * D]` float32.
    """
    flat = streams.reshape(len(streams), -1).astype(jnp.float32)
    if backend is Backend.NATIVE:
        logits = dense.layer_gemm(flat, weight, layer, backend=backend)
    else:
        of_layer = lax.dynamic_index_in_dim(weight, layer, keepdims=False)
        logits = invariance.in_blocks(lambda rows: jnp.einsum("td,md->tm", rows, of_layer, precision="highest"), flat)
    return logits * lax.rsqrt(jnp.mean(jnp.square(flat), axis=-1, keepdims=True) + norm_eps)


def doubly_stochastic(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Returns `[T, n, n]` whose rows and columns sum to 1, by Sinkhorn's algorithm; the columns come last.

    The first step over rows is a softmax.
    """

    def columns(c: jax.Array) -> jax.Array:
        return c / (c.sum(-2, keepdims=True) + eps)

    def both(_: int, c: jax.Array) -> jax.Array:
        return columns(c / (c.sum(-1, keepdims=True) + eps))

    first = columns(jax.nn.softmax(logits, axis=-1) + eps)
    return lax.fori_loop(1, iterations, both, first)


def weighted_sum(weights: jax.Array, streams: jax.Array) -> jax.Array:
    """Returns the sum of streams `[T, n, D]` by weights `[T, n]`, `[T, D]` in the streams' dtype."""
    return (weights[..., None] * streams.astype(jnp.float32)).sum(1).astype(streams.dtype)


def _takes(streams: jax.Array, backend: Backend) -> bool:
    """Returns whether the kernels run."""
    T, n, _ = streams.shape
    return uses_triton(backend) and n & (n - 1) == 0 and T > 0


def _read_reference(
    streams: jax.Array,
    weight: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    norm: jax.Array,
    layer: jax.Array,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    backend: Backend,
) -> StreamsRead:
    n, logits = streams.shape[1], stream_logits(streams, weight, layer, norm_eps, backend)
    base, scale = (lax.dynamic_index_in_dim(a, layer, keepdims=False) for a in (base, scale))
    pre = jax.nn.sigmoid(logits[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * jax.nn.sigmoid(logits[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    between = (logits[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
    normed = rms_norm(weighted_sum(pre, streams), norm, layer, norm_eps, backend=backend)
    return StreamsRead(normed, post, doubly_stochastic(between, iterations, eps))


def _read_kernels(
    streams: jax.Array,
    weight: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    norm: jax.Array,
    layer: jax.Array,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    backend: Backend,
    ue8m0: bool | None = None,
) -> StreamsRead:
    (T, n, D), outputs = streams.shape, weight.shape[1]
    layer, columns, rows = layer.reshape(1), power_of_two(outputs + 1), 16 if invariance.planned_rows(T) <= 1024 else 32
    (sums,) = call.start(
        "mixing.product",
        (streams, weight, layer),
        [jax.ShapeDtypeStruct((_PARTS, T, columns), jnp.float32)],
        grid=(-(-T // rows), _PARTS),
        backend=backend,
        warps=rows // 4,
        rows=T,
        WIDTH=n * D,
        OUTPUTS=outputs,
        PART=-(-n * D // (_PARTS * _DEPTH)) * _DEPTH,
        BLOCK_M=rows,
        BLOCK_N=columns,
        BLOCK_K=_DEPTH,
    )
    normed, post, between, values, scales = call.start(
        "mixing.read",
        (streams, sums, base, scale, norm, layer),
        [
            jax.ShapeDtypeStruct((T, D), streams.dtype),
            _float32(T, n),
            _float32(T, n, n),
            *quantized_shapes(T, D, ue8m0),
        ],
        grid=(T,),
        backend=backend,
        warps=8,
        rows=T,
        STREAMS=n,
        WIDTH=D,
        ITERATIONS=iterations,
        EPS=eps,
        NORM_EPS=norm_eps,
        PARTS=_PARTS,
        COLUMNS=columns,
        **quantization(ue8m0),
        BLOCK=power_of_two(D),
    )
    return StreamsRead(normed, post, between, None if ue8m0 is None else (values, scales))


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _write_reference(streams: jax.Array, post: jax.Array, between: jax.Array, *parts: jax.Array) -> jax.Array:
    y = jnp.stack([part.astype(jnp.float32) for part in parts]).sum(0)
    # Products and their sum are one kernel on a GPU; a batch of 4 x 4 matrices is not.
    moved = (between[..., None] * streams.astype(jnp.float32)[:, :, None]).sum(1)
    return (post[..., None] * y[:, None] + moved).astype(streams.dtype)


def _write_kernel(
    backend: Backend, streams: jax.Array, post: jax.Array, between: jax.Array, *parts: jax.Array
) -> jax.Array:
    T, n, D = streams.shape
    (out,) = call.start(
        "mixing.write",
        (streams, post, between, parts[0], parts[-1]),
        [jax.ShapeDtypeStruct(streams.shape, streams.dtype)],
        grid=(T, -(-D // _COLUMNS)),
        backend=backend,
        STREAMS=n,
        WIDTH=D,
        TWO=len(parts) > 1,
        BLOCK=_COLUMNS,
    )
    return out
