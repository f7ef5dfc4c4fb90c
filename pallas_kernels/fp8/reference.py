"""The block-scaled product in jax.numpy: oracle of the kernels, and the path of devices without them."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.float8 import BLOCK

_MIN_ROWS = 8
"""Rows are padded to this many: XLA:CPU multiplies bfloat16 natively from here on, and is slower for one row."""


def scaled_matmul(a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array) -> jax.Array:
    """Computes `(a * a_scale) @ (b * b_scale).T` as Hopper does: float32 sums of 128 exact products, scaled, added.

    Args:
      a: [M, K] e4m3; a_scale: [ceil(K/128), M] float32.
      b: [N, K] e4m3; b_scale: [ceil(N/128), ceil(K/128)] float32.

    Returns:
      [M, N] float32.
    """
    m, n = a.shape[0], b.shape[0]
    a, b = _pad(a, max(m, _MIN_ROWS), BLOCK), _pad(b, n, BLOCK)
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
