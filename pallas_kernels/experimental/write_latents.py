"""RMSNorm of the latent, RoPE of the key and the write into the page pool as one kernel.

Two bfloat16 values are one 32-bit word here: a pair to rotate, and what is loaded and stored. A warpgroup takes the
latent of a token; the rotated keys of a block's four tokens, 32 words each, fill the first one together.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.lazily import plgpu
from pallas_kernels.mla.write import DROPPED

_ROWS = 4  # of a thread block, a warpgroup for each
_LATENT_WORDS, _ROPE_WORDS = 256, 32
_HIGH = -(1 << 16)  # the upper half of a word, the odd value of a pair


def write_new_latents(
    pages: jax.Array,
    raw: jax.Array,
    weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    targets: jax.Array,
    offsets: jax.Array,
    *,
    epsilon: float,
    interpret: Any = None,
) -> jax.Array:
    """Writes `cache_rows(raw, ...)` to their places, in place where `pages` is donated.

    Args:
      pages: [pages of all layers, 64, 576] bfloat16.
      raw: [T, 576] bfloat16, the latent before its norm and the key before its rotation (interleaved pairs).
      weight: [512] bfloat16, of the norm.
      cos, sin: [T, 32] float32, of each token's angles.
      targets: [T] int32, pages of the pool; DROPPED for a row that is not written.
      offsets: [T] int32, index within the page.
      epsilon: added to the mean square.
      interpret: settings of the interpreter, for tests.

    Raises:
      ValueError: the pool is not of bfloat16 rows of 512 and 64 values.
    """
    if pages.dtype != jnp.bfloat16 or pages.shape[2] != 2 * (_LATENT_WORDS + _ROPE_WORDS):
        raise ValueError(f"write_new_latents: pages must be bfloat16 [.., 64, 576], got {pages.dtype} {pages.shape}")
    padding = -raw.shape[0] % _ROWS
    raw, cos, sin = (jnp.pad(x, ((0, padding), (0, 0))) for x in (raw, cos, sin))
    targets = jnp.pad(targets, (0, padding), constant_values=DROPPED)
    offsets = jnp.pad(offsets, (0, padding))
    words, pool = _words(raw), jax.new_ref(_words(pages))
    kernel = plgpu.kernel(
        functools.partial(_body, epsilon),
        out_type=(),
        grid=(raw.shape[0] // _ROWS,),
        grid_names=("block",),
        num_threads=_ROWS,
        thread_name="row",
        scratch_types={"rotated": plgpu.SMEM((_ROWS * _ROPE_WORDS,), jnp.int32)},
        kernel_name="mla_write_fused",
        interpret=interpret,
    )
    latents, keys = words[:, :_LATENT_WORDS], words[:, _LATENT_WORDS:].reshape(-1)
    kernel(latents, keys, _words(weight), cos.reshape(-1), sin.reshape(-1), targets, offsets, pool)
    return lax.bitcast_convert_type(jax.freeze(pool), pages.dtype).reshape(pages.shape)


def cache_rows(
    raw: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array, *, epsilon: float, value_width: int
) -> jax.Array:
    """Returns the rows `[T, R + P]` to cache of raw projections `[T, R + P]`: RMSNorm of the latent, RoPE of the key.

    Both in float32, rounded to the dtype of `raw`.
    """
    latent, pairs = (x.astype(jnp.float32) for x in (raw[:, :value_width], raw[:, value_width:]))
    normed = latent * lax.rsqrt(jnp.mean(latent * latent, axis=-1, keepdims=True) + epsilon)
    even, odd = pairs[:, ::2], pairs[:, 1::2]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(pairs.shape)
    return jnp.concatenate([weight * normed.astype(raw.dtype), turned.astype(raw.dtype)], axis=-1)


def _words(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.int32)


def _body(epsilon: float, latents, keys, weight, cos, sin, targets, offsets, pool, *, rotated):
    row = lax.axis_index("row")
    token = lax.axis_index("block") * _ROWS + row
    target = targets[token]

    @pl.when(target != DROPPED)
    def _():
        layout = plgpu.Layout.WG_STRIDED((_LATENT_WORDS,), vec_size=2)
        even, odd = _unpack(plgpu.load(latents.at[token], layout=layout))
        factor = lax.rsqrt((even * even + odd * odd).sum() / (2 * _LATENT_WORDS) + epsilon)
        weight_even, weight_odd = _unpack(plgpu.load(weight, layout=layout))
        normed = _pack(_rounded(even * factor) * weight_even, _rounded(odd * factor) * weight_odd)
        pool[target, offsets[token], pl.ds(0, _LATENT_WORDS)] = normed

    @pl.when(row == 0)
    def _():
        count = _ROWS * _ROPE_WORDS
        layout, here = plgpu.Layout.WG_STRIDED((count,), vec_size=1), pl.ds(token * _ROPE_WORDS, count)
        even, odd = _unpack(plgpu.load(keys.at[here], layout=layout))
        turn_cos, turn_sin = (plgpu.load(angles.at[here], layout=layout) for angles in (cos, sin))
        rotated[...] = _pack(even * turn_cos - odd * turn_sin, odd * turn_cos + even * turn_sin)
        plgpu.commit_smem()
        for other in range(_ROWS):

            @pl.when(targets[token + other] != DROPPED)
            def _(other=other):
                place = pool.at[targets[token + other], offsets[token + other], pl.ds(_LATENT_WORDS, _ROPE_WORDS)]
                plgpu.copy_smem_to_gmem(rotated.at[pl.ds(other * _ROPE_WORDS, _ROPE_WORDS)], place)

        plgpu.wait_smem_to_gmem(0)


def _unpack(words):
    """Unpacks the two bfloat16 values of each word, as float32: the upper half of a float32 is a bfloat16."""
    return _as_float(lax.shift_left(words, 16)), _as_float(words & _HIGH)


def _pack(even, odd):
    return lax.shift_right_logical(_as_int(_rounded(even)), 16) | _as_int(_rounded(odd))


def _rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _as_float(x):
    return lax.bitcast_convert_type(x, jnp.float32)


def _as_int(x):
    return lax.bitcast_convert_type(x, jnp.int32)
