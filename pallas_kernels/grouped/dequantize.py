"""INT4 weights as numbers, in jax.numpy: the oracle of the kernel, and what other devices multiply with."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.int4 import GROUP, OFFSET, RUN, VALUES_PER_WORD


def dequantize_int4(words: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns weights `[..., N, K]` in `dtype`: each value times its scale in float32, rounded once.

    The product of four bits and a bfloat16 scale is exact in float32.

    Args:
      words: [..., N, K / 8] int32, in the order of `int4.interleave`.
      scale: [..., K / 32, N] bfloat16.
      dtype: of the result.

    Raises ValueError where the shapes do not belong together.
    """
    check_int4("dequantize_int4", words, scale)
    *lead, width = words.shape
    shifts = 4 * jnp.arange(VALUES_PER_WORD, dtype=jnp.int32)[:, None]
    runs = words.reshape(*lead, -1, 1, GROUP)
    values = (lax.shift_right_logical(runs, shifts + jnp.zeros_like(runs)) & 15) - OFFSET  # [..., N, runs, 8, 32]
    scales = jnp.swapaxes(scale, -1, -2).astype(jnp.float32).reshape(*lead, -1, VALUES_PER_WORD, 1)
    return (values.astype(jnp.float32) * scales).reshape(*lead, width * VALUES_PER_WORD).astype(dtype)


def check_int4(name: str, words: jax.Array, scale: jax.Array) -> None:
    """Raises ValueError unless `words` [..., N, K / 8] and `scale` [..., K / 32, N] are an INT4 weight."""
    k = words.shape[-1] * VALUES_PER_WORD
    if k % RUN or scale.shape != (*words.shape[:-2], k // GROUP, words.shape[-2]):
        raise ValueError(
            f"{name}: needs words [..., N, K/8] and scales [..., K/32, N] with K in multiples of {RUN}, "
            f"got {words.shape} and {scale.shape}"
        )
    if words.dtype != jnp.int32 or scale.dtype != jnp.bfloat16:
        raise ValueError(f"{name}: needs int32 words and bfloat16 scales, got {words.dtype} and {scale.dtype}")
