"""Operations on rows: C++ against the reference and float64, and the gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot, native
from pallas_kernels.backend import Backend
from pallas_kernels.rows import latent_rows, rms_norm, rotate_heads, swiglu

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
        total = lambda x, w: jnp.sin(rms_norm(x, w, jnp.int32(1), 1e-6, backend=backend)).sum()  # noqa: E731
        return jax.jit(jax.grad(total, (0, 1)))(x, w)

    for expected, found in zip(*map(loss, BACKENDS), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not np.asarray(loss(Backend.NATIVE)[1])[[0, 2]].any()


def test_other_types_and_empty_arrays_use_the_reference() -> None:
    x, w = operands((2, 8), jnp.float16)
    np.testing.assert_array_equal(rms_norm(x, w, 0, 1e-6), rms_norm(x, w, 0, 1e-6, backend=Backend.REFERENCE))
    assert rms_norm(jnp.zeros((0, 8)), jnp.ones((1, 8)), 0, 1e-6).shape == (0, 8)


@pytest.mark.skipif(len(BACKENDS) == 1, reason=native.library().reason)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kernels_equal_the_references(dtype) -> None:
    rng, tolerance = np.random.default_rng(0), {"rtol": 1e-6 if dtype == jnp.float32 else 2e-2, "atol": 1e-6}
    wide, heads = (jnp.asarray(rng.standard_normal(shape) * 4, dtype) for shape in ((5, 74), (5, 3, 20)))
    angle = rng.uniform(-9, 9, (5, 4)).astype(np.float32)
    w = jnp.asarray(rng.standard_normal((3, 33)), dtype)

    def made(backend: Backend) -> list[jax.Array]:
        return [
            swiglu(wide, backend=backend),
            rms_norm(wide, w, 1, 1e-6, backend=backend),
            rotate_heads(heads, jnp.cos(angle), jnp.sin(angle), backend=backend),
            latent_rows(wide, w, 1, jnp.cos(angle), jnp.sin(angle), 1e-6, backend=backend),
        ]

    for expected, found in zip(*(jax.jit(functools.partial(made, backend))() for backend in BACKENDS), strict=True):
        assert found.dtype == expected.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(expected, np.float64), **tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_gates_neither_overflow_nor_lose_their_sign(backend) -> None:
    gate = jnp.asarray([[-200.0, -80.0, 80.0, 200.0, jnp.inf]])
    found = swiglu(jnp.concatenate([gate, jnp.full((1, 5), 2.0)], axis=1), backend=backend)
    np.testing.assert_allclose(found, [[0, 0, 160, 400, jnp.inf]], atol=1e-30)


@pytest.mark.aot
def test_a_gpu_rotates_many_rows_in_one_kernel() -> None:
    """No product of sines and signs is written to memory first, so pairs need not lie apart in the weights."""
    heads, angles = jax.ShapeDtypeStruct((4096, 16, 192), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 32), jnp.float32)
    compiled = aot.compile_for(functools.partial(rotate_heads, backend=Backend.MOSAIC), heads, angles, angles)
    assert compiled.memory_analysis().temp_size_in_bytes == 0
    assert compiled.as_text().count(" fusion(") == 1
