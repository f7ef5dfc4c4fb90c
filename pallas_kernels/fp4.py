"""FP4 weights as kernels read them: e2m1 codes in words, which become e4m3 values with the scales of FP8 blocks.

32 neighboring columns of a row are a *scale group*. Its codes times a power of two are e4m3 values, exactly, and blocks
of 128 x 128 values have a float32 scale, as FP8 weights have. So a product multiplies what an FP8 one does.

A word is uint32 and holds eight codes of a group: columns 4 l to 4 l + 3 and 16 more, for l in 0 to 3. That is what a
thread of the tensor core holds of a row's 32 e4m3 values. Words 2 l + i and 8 + 2 l + i of 128 columns are those of
groups i and 2 + i. Bits 4 v to 4 v + 2 of a word are the magnitude of its value v, and bit `SIGN_BITS[v]` is its sign:
four magnitudes of 16 bits select bytes of a table at once, and four signs lie where four bytes have theirs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.float8 import BLOCK, E4M3

GROUP = 32
"""Columns that share a power of two."""
VALUES_PER_WORD = 8
WORDS = BLOCK // VALUES_PER_WORD
"""Words of a row in a block. K is a multiple of a block's 128 columns."""
GROUPS = BLOCK // GROUP

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The value of each code: bit 3 is the sign."""
SIGN_BITS = (7, 15, 23, 31, 3, 11, 19, 27)

HEADROOM = 6
"""A block's scale is the largest power of its groups over two to this: 6 * 2**6 is 384, and e4m3 ends at 448."""
MAX_SPREAD = 11
"""How many binary places a group's power may lie below the largest of its block: 0.5 is then the least normal e4m3."""


def pack(codes: jax.Array) -> jax.Array:
    """Returns the words uint32 `[..., K / 8]` of codes, integers 0 to 15 `[..., K]`; 128 divides K."""
    *lead, K = codes.shape
    blocks = codes.astype(jnp.uint32).reshape(*lead, K // BLOCK, 2, 2, 2, 4, 4)  # groups are pairs; half, l, column
    n = len(lead)
    ordered = blocks.transpose(*range(n + 1), n + 1, n + 4, n + 2, n + 3, n + 5)
    values = ordered.reshape(*lead, K // VALUES_PER_WORD, VALUES_PER_WORD)
    signs = jnp.asarray(SIGN_BITS, jnp.uint32)
    bits = (values & 7) << (4 * jnp.arange(VALUES_PER_WORD, dtype=jnp.uint32)) | (values >> 3) << signs
    return bits.sum(-1, dtype=jnp.uint32)


def pack_powers(places: jax.Array) -> jax.Array:
    """Returns the powers of groups as kernels read them, uint32 `[..., K / 128, N]`: a byte per group of a block.

    A byte is eight times the place above `MAX_SPREAD` below the block's largest: what e4m3 bytes of 1.0 differ by.

    Args:
      places: integers `[..., N, K / 32]`, 0 to `MAX_SPREAD`: how many places a group's power lies below the largest.
    """
    steps = (8 * (MAX_SPREAD - places)).astype(jnp.uint32)
    blocks = steps.reshape(*places.shape[:-1], -1, GROUPS) << (8 * jnp.arange(GROUPS, dtype=jnp.uint32))
    return jnp.swapaxes(blocks.sum(-1, dtype=jnp.uint32), -1, -2)


def to_e4m3(words: jax.Array, powers: jax.Array) -> jax.Array:
    """Returns the values e4m3 `[..., N, K]` of words `[..., N, K / 8]` and powers `[..., K / 128, N]`, exactly."""
    *lead, N, width = words.shape
    blocks = width // WORDS
    places = jnp.arange(VALUES_PER_WORD, dtype=jnp.uint32)
    magnitude = words[..., None] >> (4 * places) & 7
    sign = (words[..., None] >> jnp.asarray(SIGN_BITS, jnp.uint32) & 1) << 7
    step = jnp.swapaxes(powers, -1, -2)[..., None] >> (8 * jnp.arange(GROUPS, dtype=jnp.uint32)) & 255
    by_word = step.reshape(*lead, N, blocks, 2, 1, 2, 1)  # as the words: groups 0 and 1, then 2 and 3
    magnitude = magnitude.reshape(*lead, N, blocks, 2, 4, 2, VALUES_PER_WORD)
    least = 4 * magnitude + jnp.where(magnitude == 1, 4, 8)
    value = jnp.where(magnitude > 0, least + by_word, 0) | sign.reshape(magnitude.shape)
    halves = value.astype(jnp.uint8).reshape(*lead, N, blocks, 2, 4, 2, 2, 4)
    n = len(lead) + 2
    ordered = halves.transpose(*range(n), n, n + 2, n + 3, n + 1, n + 4)
    return lax.bitcast_convert_type(ordered.reshape(*lead, N, width * VALUES_PER_WORD), E4M3)


def check_weight(name: str, words: jax.Array, powers: jax.Array, scale: jax.Array) -> None:
    """Raises ValueError unless the arrays are an FP4 weight: words, powers of groups and scales of blocks."""
    *lead, N, width = words.shape
    blocks, left = divmod(width, WORDS)
    wanted = ((*lead, blocks, N), (*lead, -(-N // BLOCK), blocks))
    if left or (powers.shape, scale.shape) != wanted:
        raise ValueError(
            f"{name}: needs words [..., N, K/8], powers [..., K/128, N] and scales [..., ceil(N/128), K/128] with K in "
            f"multiples of {BLOCK}, got {words.shape}, {powers.shape} and {scale.shape}"
        )
    if words.dtype != jnp.uint32 or powers.dtype != jnp.uint32 or scale.dtype != jnp.float32:
        raise ValueError(
            f"{name}: needs uint32 words and powers, and float32 scales, "
            f"got {words.dtype}, {powers.dtype} and {scale.dtype}"
        )
