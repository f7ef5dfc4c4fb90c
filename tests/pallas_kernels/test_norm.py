"""The norm by the mean square: C++ against the reference, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.backend import Backend
from pallas_kernels.norm import rms_norm

BACKENDS = [Backend.REFERENCE, *([Backend.NATIVE] if native.library().targets else [])]


def operands(shape: tuple[int, ...], dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(each, np.float32) for each in (shape, (3, shape[-1])))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 192), (5, 7), (2, 3, 33), (400, 130)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_are_divided_by_the_root_of_their_mean_square(shape, dtype, backend) -> None:
    x, w = operands(shape, dtype)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-3) * np.asarray(w[2], np.float64)
    found = rms_norm(x, w, 2, 1e-3, backend=backend)
    assert found.dtype == dtype and found.shape == shape
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol={4: 1e-5, 2: 1e-2}[found.dtype.itemsize])


@pytest.mark.skipif(len(BACKENDS) == 1, reason=native.library().reason)
def test_the_gradient_is_the_references() -> None:
    x, w = operands((4, 24), jnp.float32)

    def loss(backend: Backend):
        return jax.grad(lambda x, w: jnp.sin(rms_norm(x, w, jnp.int32(1), 1e-6, backend=backend)).sum(), (0, 1))(x, w)

    for expected, found in zip(*map(loss, BACKENDS), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not np.asarray(loss(Backend.NATIVE)[1])[[0, 2]].any()


def test_rows_of_other_types_and_no_rows_take_the_reference() -> None:
    x, w = operands((2, 8), jnp.float16)
    np.testing.assert_array_equal(rms_norm(x, w, 0, 1e-6), rms_norm(x, w, 0, 1e-6, backend=Backend.REFERENCE))
    assert rms_norm(jnp.zeros((0, 8)), jnp.ones((1, 8)), 0, 1e-6).shape == (0, 8)
