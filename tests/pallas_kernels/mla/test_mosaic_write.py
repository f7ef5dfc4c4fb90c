"""The write kernels in the Mosaic interpreter, with race detection, against the scatter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla import mosaic_write, mosaic_write_fused, write
from pallas_kernels.mosaic import interpret_params


@pytest.mark.parametrize(("dtype", "width"), [(jnp.bfloat16, 576), (jnp.uint8, 656)])
def test_like_the_scatter(dtype, width):
    rng = np.random.default_rng(0)
    T, pages = 11, 4
    places = rng.permutation(pages * 64)[:T]
    targets = np.where(np.arange(T) % 4 == 1, write.DROPPED, places // 64).astype(np.int32)
    offsets = (places % 64).astype(np.int32)
    pool = jnp.asarray(rng.integers(0, 100, (pages, 64, width)), dtype)
    rows = jnp.asarray(rng.integers(100, 200, (T, width)), dtype)
    kernel = jax.jit(functools.partial(mosaic_write.write_rows, interpret=interpret_params()))
    np.testing.assert_array_equal(
        np.asarray(kernel(pool, rows, targets, offsets), np.float32),
        np.asarray(write.write_rows(pool, rows, targets, offsets), np.float32),
    )


def test_norm_and_rotation_on_the_way():
    rng = np.random.default_rng(0)
    T = 6
    targets = jnp.asarray([1, 0, write.DROPPED, 1, 2, write.DROPPED], jnp.int32)
    offsets = jnp.asarray([0, 63, 5, 1, 17, 2], jnp.int32)
    raw = jnp.asarray(rng.standard_normal((T, 576)) * 10.0 ** rng.integers(-3, 3, (T, 1)), jnp.bfloat16)
    raw = raw.at[2].set(jnp.nan)
    weight = jnp.asarray(rng.standard_normal(512), jnp.bfloat16)
    angles = rng.uniform(0, 6, (T, 32)).astype(np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    pool = jnp.asarray(rng.standard_normal((3, 64, 576)), jnp.bfloat16)
    kernel = jax.jit(
        functools.partial(mosaic_write_fused.write_new_latents, epsilon=1e-6, interpret=interpret_params())
    )
    got = np.asarray(kernel(pool, raw, weight, cos, sin, targets, offsets), np.float32)
    rows = write.cache_rows(raw, weight, cos, sin, epsilon=1e-6, value_width=512)
    expected = np.asarray(write.write_rows(pool, rows, targets, offsets), np.float32)
    written = expected != np.asarray(pool, np.float32)
    np.testing.assert_array_equal(got[~written], expected[~written])
    # The order of the sum differs, and so may the last bit of the norm, which is rounded twice.
    np.testing.assert_allclose(got[written], expected[written], rtol=2**-7)
