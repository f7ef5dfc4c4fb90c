"""The write kernels in the Mosaic interpreter, with race detection, against the scatter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla import write
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
    kernel = jax.jit(functools.partial(write.write_rows_mosaic, interpret=interpret_params()))
    np.testing.assert_array_equal(
        np.asarray(kernel(pool, rows, targets, offsets), np.float32),
        np.asarray(write.write_rows(pool, rows, targets, offsets), np.float32),
    )
