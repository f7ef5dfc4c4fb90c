"""The e4m3 values that training's products are made of: tiles along the channels, tiles along the tokens, blocks.

Follows section 3.3 of the DeepSeek-V3 report (arXiv:2412.19437). Scales of activations and of their gradients are
powers of two: an activation that is kept as 1x128 tiles is cut anew along the tokens for the weight gradient, and a
power of two changes no digit then. The report rounds the scales so where tiles are cut anew or sent. Scales of weights
are float32, as in its checkpoints.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend
from pallas_kernels.float8 import BLOCK
from pallas_kernels.fp8.quantize import quantize_1x128, quantize_128x128

Quantized = tuple[jax.Array, jax.Array]
"""e4m3 values and their float32 scales."""


def activation_tiles(x: jax.Array, backend: Backend | None) -> Quantized:
    """Returns x `[T, C]` in tiles of one token by 128 channels: values `[T, C]`, scales `[ceil(C/128), T]`."""
    return quantize_1x128(x, ue8m0=True, backend=backend)


def weight_blocks(w: jax.Array, backend: Backend | None) -> Quantized:
    """Returns w `[..., N, K]` in blocks of 128 by 128: values, and scales `[..., ceil(N/128), ceil(K/128)]`."""
    return quantize_128x128(w, backend=backend)


def transposed(blocks: Quantized) -> Quantized:
    """Returns blocks `[..., N, K]` as those of `[..., K, N]`: the same values under the same scales."""
    values, scale = blocks
    return jnp.swapaxes(values, -1, -2), jnp.swapaxes(scale, -1, -2)


def along_tokens(x: jax.Array, backend: Backend | None) -> jax.Array:
    """Returns x `[T, C]` rounded to e4m3 in tiles of 128 tokens by one channel, exact in bfloat16.

    The last tile may have fewer tokens.
    """
    return dequantized(quantize_1x128(x.T, ue8m0=True, backend=backend)).T


def dequantized(tiles: Quantized) -> jax.Array:
    """Returns what tiles with scales of powers of two stand for, bfloat16 `[M, K]`: nothing is rounded.

    `tiles` are values `[M, K]` and scales `[ceil(K/128), M]`.
    """
    values, scale = tiles
    columns = jnp.repeat(scale.T, BLOCK, axis=1, total_repeat_length=scale.shape[0] * BLOCK)
    return (values.astype(jnp.float32) * columns[:, : values.shape[1]]).astype(jnp.bfloat16)
