"""Queries and latents of DeepSeek-V4 in Triton's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpus
from pallas_kernels.backend import Backend
from pallas_kernels.entries import encode_rows
from pallas_kernels.fp8 import quantize_1x128
from pallas_kernels.heads import normed_latents, unit_rotated_heads
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.usefixtures("interpreted")
def test_latents_are_the_references(dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    down, *norms = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((3, 64), (2, 40), (2, 24)))
    angles = rng.uniform(-9, 9, (3, 4))
    cos, sin = (jnp.asarray(of(angles), jnp.float32) for of in (np.cos, np.sin))
    found, wanted = (
        normed_latents(down, *norms, 1, cos, sin, 1e-6, backend=backend)
        for backend in (Backend.TRITON, Backend.REFERENCE)
    )
    error = 1e-6 if dtype == jnp.float32 else 2**-6
    for mine, reference in zip(found[:2], wanted[:2], strict=True):
        arrays = (np.asarray(each, np.float32) for each in (mine, reference))
        np.testing.assert_allclose(*arrays, rtol=error, atol=error)


@pytest.mark.usefixtures("interpreted")
def test_query_latents_are_quantized_as_by_themselves() -> None:
    rng = np.random.default_rng(0)
    down, *norms = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((3, 408), (2, 384), (2, 24)))
    cos, sin = (jnp.asarray(rng.uniform(-1, 1, (3, 4)), jnp.float32) for _ in range(2))
    with gpus.compiling_for(gpus.by_number(89)):
        found = normed_latents(down, *norms, 1, cos, sin, 1e-6, ue8m0=True, backend=Backend.TRITON)
    values, scale = quantize_1x128(found.query, ue8m0=True, backend=Backend.REFERENCE)
    assert found.quantized is not None and found.quantized[0].dtype == values.dtype
    np.testing.assert_array_equal(found.quantized[0].astype(jnp.float32), values.astype(jnp.float32))
    np.testing.assert_array_equal(found.quantized[1], scale)


@pytest.mark.parametrize(("width", "plain"), [(128, 64), (512, 448)])
@pytest.mark.usefixtures("interpreted")
def test_fp8_rows_are_the_references(width: int, plain: int) -> None:
    """Also where the largest of a group is a power of two times what e4m3 has, and in a group of zeros."""
    rows = np.random.default_rng(0).normal(size=(4, width)).astype(np.float32)
    rows[1, :64], rows[2, 5] = 0, 448 * 2.0**-3
    found, wanted = (
        encode_rows(jnp.asarray(rows, jnp.bfloat16), plain, jnp.uint8, backend=backend)
        for backend in (Backend.TRITON, Backend.REFERENCE)
    )
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.aot
def test_the_kernel_fits() -> None:
    x, angles = jax.ShapeDtypeStruct((64, 64, 512), jnp.bfloat16), jax.ShapeDtypeStruct((64, 32), jnp.float32)
    call = functools.partial(unit_rotated_heads, eps=1e-6, backend=Backend.TRITON)
    (kernel,) = kernel_resources(call, x, angles, angles, gpu=gpus.by_number(90))
    assert kernel.spilled_bytes == 0
    down, query, norm = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 1536), (43, 1024), (43, 512)))
    latents = functools.partial(normed_latents, layer=1, eps=1e-6, ue8m0=True, backend=Backend.TRITON)
    encode = functools.partial(encode_rows, plain=448, dtype=jnp.uint8, backend=Backend.TRITON)
    for kernels in (
        kernel_resources(
            lambda d, q, n, c, s: latents(d, q, n, cos=c, sin=s),
            down,
            query,
            norm,
            angles,
            angles,
            gpu=gpus.by_number(90),
        ),
        kernel_resources(encode, jax.ShapeDtypeStruct((64, 512), jnp.bfloat16), gpu=gpus.by_number(90)),
    ):
        assert [kernel.spilled_bytes for kernel in kernels] == [0]
