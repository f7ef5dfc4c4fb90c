"""The weights by which hyper-connections mix residual streams (arXiv:2512.24880), from their logits.

XLA runs Sinkhorn's algorithm on a GPU as a loop of small kernels, 40 of them at 20 iterations. The Triton kernel does
all in one, on Hopper too.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Backend, has_jax_triton, resolve_backend, with_fallback
from pallas_kernels.dsa.triton_ops import traced_for
from pallas_kernels.rows import differentiable
from pallas_kernels.triton import call

_TOKENS = 32  # of a program


class MixingWeights(NamedTuple):
    """How n streams add up to what a block reads, how its result is added to each, and how they change places."""

    pre: jax.Array  # [T, n] float32
    post: jax.Array  # [T, n] float32
    between: jax.Array  # [T, n, n] float32: from stream j, the second axis, to stream k, the third


def mixing_weights(
    logits: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    streams: int,
    iterations: int,
    eps: float,
    backend: Backend | None = None,
) -> MixingWeights:
    """Returns the weights of T tokens.

    Args:
      logits: [T, n * (n + 2)] float32: n of `pre`, n of `post`, then n * n of `between`.
      base: [n * (n + 2)] float32, added to the scaled logits; scale: [3] float32, of the three parts.
      streams: n. The kernel takes powers of two, the reference any number.
      iterations: of Sinkhorn's algorithm, which makes `between` doubly stochastic.
      eps: added to `pre`, and in its quotients.
      backend: implementation; None selects by device.
    """
    backend = resolve_backend(requested=with_fallback("mixing_weights", backend))
    reference = functools.partial(_reference, streams=streams, iterations=iterations, eps=eps)
    takes = backend in (Backend.MOSAIC, Backend.TRITON) and has_jax_triton() and streams & (streams - 1) == 0
    if not takes:
        return reference(logits, base, scale)
    kernel = functools.partial(_kernel, backend, streams=streams, iterations=iterations, eps=eps)
    return differentiable(kernel, reference)(logits, base, scale)


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


def _reference(
    logits: jax.Array, base: jax.Array, scale: jax.Array, *, streams: int, iterations: int, eps: float
) -> MixingWeights:
    n = streams
    pre = jax.nn.sigmoid(logits[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * jax.nn.sigmoid(logits[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    between = (logits[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
    return MixingWeights(pre, post, doubly_stochastic(between, iterations, eps))


def _kernel(
    backend: Backend,
    logits: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    streams: int,
    iterations: int,
    eps: float,
) -> MixingWeights:
    T = len(logits)
    shapes = (T, streams), (T, streams), (T, streams, streams)
    with traced_for(backend):
        found = call.start(
            "mixing.weights",
            (logits, base, scale),
            [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
            grid=(-(-T // _TOKENS),),
            warps=1,
            rows=T,
            STREAMS=streams,
            ITERATIONS=iterations,
            EPS=eps,
            BLOCK=_TOKENS,
        )
    return MixingWeights(*found)
