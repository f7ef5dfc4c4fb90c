"""Operands of the cases: random and quantized values, stacks of weights, and NaN where nothing may be read."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import fp4
from pallas_kernels.backend import Backend
from pallas_kernels.float8 import BLOCK
from pallas_kernels.fp8 import quantize_1x128, quantize_128x128

STACK_BYTES = 256 << 20
"""Total weights of a case at a model's shape: five times the L2 cache of an H200, so that a loop over the stack
reads weights from memory as a model does."""


def stack(weight_bytes: float, quick: bool) -> int:
    """Returns the number of weights in a case; a quick one has one before and one after the checked one."""
    return 3 if quick else max(2, math.ceil(STACK_BYTES / weight_bytes))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def normal(key: jax.Array, *shape: int) -> jax.Array:
    """Returns normal values in bfloat16."""
    return jax.random.normal(key, shape, jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=1)
def small(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns normal values of deviation 0.1 in bfloat16, clipped to 1, as in FlashMLA's tests."""
    return jnp.clip(jax.random.normal(key, shape, jnp.bfloat16) / 10, -1, 1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def activation(key: jax.Array, m: int, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns normal values `[m, k]` quantized per row and 128 channels."""
    return quantize_1x128(normal(key, m, k), backend=Backend.REFERENCE)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def fp8_weights(key: jax.Array, count: int, n: int, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns a stack of normal weights `[count, n, k]`, quantized in blocks of 128 by 128."""
    return jax.lax.map(lambda key: quantize_128x128(normal(key, n, k)), jax.random.split(key, count))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def int4_weights(key: jax.Array, count: int, n: int, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns a stack of INT4 weights, and their scales."""
    words_key, scale_key = jax.random.split(key)
    words = jax.random.bits(words_key, (count, n, k // 8), jnp.uint32).astype(jnp.int32)
    return words, jax.random.uniform(scale_key, (count, k // 32, n), jnp.bfloat16, 0.01, 0.02)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def fp4_weights(key: jax.Array, count: int, n: int, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a stack of FP4 weights: words, powers of groups and scales of blocks."""
    words_key, powers_key, scale_key = jax.random.split(key, 3)
    words = jax.random.bits(words_key, (count, n, k // fp4.VALUES_PER_WORD), jnp.uint32)
    places = jax.random.randint(powers_key, (count, n, k // fp4.GROUP), 0, 4)
    scale = jax.random.uniform(scale_key, (count, -(-n // BLOCK), k // BLOCK), jnp.float32, 2.0**-14, 2.0**-13)
    return words, fp4.pack_powers(places), scale


def anew[T](operands: T, i: jax.Array) -> T:
    """Returns the operands, as if they depended on `i`: a loop of calls would compute a result without it once."""
    return jax.lax.optimization_barrier((operands, i))[0]


def only(weights: Any, first: Any, count: int = 1) -> Any:
    """Returns the stacks with NaN in all but `count` weights from `first` on. Integers stay."""

    def poisoned(w: jax.Array) -> jax.Array:
        if not jnp.issubdtype(w.dtype, jnp.floating):
            return w
        place = jnp.arange(len(w)).reshape(-1, *(1,) * (w.ndim - 1))
        return jnp.where((place >= first) & (place < first + count), w, jnp.asarray(jnp.nan, w.dtype))

    return jax.tree.map(poisoned, weights)


def dequantized_rows(q: jax.Array, scale: jax.Array) -> jax.Array:
    """Dequantizes values and scales of `quantize_1x128` to float32."""
    return q.astype(jnp.float32) * jnp.repeat(scale.T, 128, axis=1)[:, : q.shape[1]]


def without(weights: Any, place: Any) -> Any:
    """Returns the stacks with NaN in the weight at `place`. Integers stay."""
    return jax.tree.map(
        lambda w: w.at[place].set(jnp.nan) if jnp.issubdtype(w.dtype, jnp.floating) else w,
        weights,
    )
