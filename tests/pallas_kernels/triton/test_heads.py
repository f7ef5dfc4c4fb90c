"""Heads over their root mean square, rotated, in Triton's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpus
from pallas_kernels.backend import Backend
from pallas_kernels.heads import unit_rotated_heads
from pallas_kernels.triton.resources import kernel_resources


@pytest.mark.parametrize(("width", "rotated"), [(40, 8), (33, 16), (16, 16)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.usefixtures("interpreted")
def test_heads_are_the_references(width: int, rotated: int, dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(width)
    x, angles = jnp.asarray(rng.normal(size=(3, 2, width)) * 9, dtype), rng.uniform(-9, 9, (3, rotated // 2))
    cos, sin = (jnp.asarray(of(angles), jnp.float32) for of in (np.cos, np.sin))
    found, wanted = (
        np.asarray(unit_rotated_heads(x, cos, sin, 1e-6, backend=backend), np.float32)
        for backend in (Backend.TRITON, Backend.REFERENCE)
    )
    error = 1e-6 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(found, wanted, rtol=error, atol=error)


@pytest.mark.aot
def test_the_kernel_fits() -> None:
    x, angles = jax.ShapeDtypeStruct((64, 64, 512), jnp.bfloat16), jax.ShapeDtypeStruct((64, 32), jnp.float32)
    call = functools.partial(unit_rotated_heads, eps=1e-6, backend=Backend.TRITON)
    (kernel,) = kernel_resources(call, x, angles, angles, gpu=gpus.by_number(90))
    assert kernel.spilled_bytes == 0
