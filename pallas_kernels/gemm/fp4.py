"""The FP4 kernel: the INT4 kernel, with other values of four bits."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gemm.int4 import Int4Kernel
from pallas_kernels.gemm.kernel import Refs

_FACTOR = 4.0
"""What scales are multiplied with, because `group_values` gives a quarter of the values."""


def group_values(words: jax.Array, group: int) -> jax.Array:
    """Returns a quarter of the values of a scale group, as float32, from the words of its run: uint32 of any shape.

    No integer is converted and nothing is looked up. A code has two bits of exponent, e, and one of mantissa, m. In
    their places of a float32 whose exponent begins with 124, they give f = 2 ** (e - 3) * (1 + m / 2): a quarter of
    the value, except for e = 0, where a quarter is m / 8 and f is 1 / 8 or 3 / 16. The smaller of f and 2 f - 1 / 4 is
    right for every code.
    """
    up = 22 - 4 * group
    placed = words << up if up >= 0 else lax.shift_right_logical(words, jnp.uint32(-up))
    f = lax.bitcast_convert_type((placed & jnp.uint32(7 << 22)) | jnp.uint32(124 << 23), jnp.float32)
    magnitude = lax.bitcast_convert_type(jnp.minimum(f, 2 * f - 0.25), jnp.uint32)
    sign = (words << (28 - 4 * group)) & jnp.uint32(1 << 31)
    return lax.bitcast_convert_type(magnitude | sign, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Fp4Kernel(Int4Kernel):
    """[1, M, K] bfloat16 x [Gw, N, K / 8] uint32 with [Gw, K / 32, N] bfloat16 -> [1, M, N] bfloat16."""

    @property
    def name(self) -> str:
        return f"fp4_contiguous_{self.tile_m}x{self.tile_n}"

    @property
    def word(self) -> jnp.dtype:
        return jnp.dtype(jnp.uint32)

    def group_values(self, words: jax.Array, group: int) -> jax.Array:
        return group_values(words, group)

    def load_scale(self, refs: Refs, stage, rows, group: int) -> jax.Array:
        return super().load_scale(refs, stage, rows, group) * jnp.bfloat16(_FACTOR)
