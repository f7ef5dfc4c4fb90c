"""Residual streams in Triton's interpreter: what a block reads of them, and what it writes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpus
from pallas_kernels.backend import Backend
from pallas_kernels.fp8 import quantize_1x128
from pallas_kernels.mixing import read_streams, write_streams
from pallas_kernels.triton.resources import kernel_resources

HOW: dict[str, Any] = {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-6}
BOTH = (Backend.TRITON, Backend.REFERENCE)


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(len(shapes))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def read_operands(tokens: int, n: int, width: int) -> list[np.ndarray]:
    outputs = n * (n + 2)
    return drawn((tokens, n, width), (3, outputs, n * width), (3, outputs), (3, 3), (3, width))


@pytest.mark.parametrize(("tokens", "n", "width", "iterations"), [(1, 4, 40, 20), (19, 4, 1100, 3), (5, 2, 24, 1)])
@pytest.mark.usefixtures("interpreted")
def test_what_is_read_is_the_references(tokens: int, n: int, width: int, iterations: int) -> None:
    """Also with large logits, of which a softmax takes the largest away."""
    streams, weight, base, scale, norm = read_operands(tokens, n, width)
    weight[1] *= 3 * (n * width) ** -0.5
    weight[::2] = norm[::2] = np.nan
    how = HOW | {"iterations": iterations}
    arrays = streams, weight, base, scale, norm
    found, wanted = (jax.jit(lambda *a, b=b: read_streams(*a, 1, **how, backend=b))(*arrays) for b in BOTH)
    for mine, reference in zip(found[:3], wanted[:3], strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("number", [86, 89])
@pytest.mark.usefixtures("interpreted")
def test_what_is_read_is_quantized_as_by_itself(number: int, ue8m0: bool) -> None:
    """The kernel quantizes where a GPU converts e4m3; elsewhere another one does, behind it."""
    streams, *rest = read_operands(3, 4, 384)
    with gpus.compiling_for(gpus.by_number(number)):
        streams = jnp.asarray(streams, jnp.bfloat16)
        found = read_streams(streams, *rest, 1, **HOW, ue8m0=ue8m0, backend=Backend.TRITON)
    values, scale = quantize_1x128(found.normed, ue8m0=ue8m0, backend=Backend.REFERENCE)
    assert found.quantized is not None and found.quantized[0].dtype == values.dtype
    assert jnp.mean(found.quantized[0] != values) < (1e-6 if ue8m0 else 1e-2), "only halfway, and without powers of two"
    np.testing.assert_allclose(found.quantized[1], scale, rtol=1e-6)


@pytest.mark.parametrize(("tokens", "n", "width", "parts"), [(1, 4, 40, 1), (3, 4, 1100, 2), (2, 2, 24, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.usefixtures("interpreted")
def test_what_is_written_is_the_references(tokens: int, n: int, width: int, parts: int, dtype: Any) -> None:
    """Three parts have no kernel."""
    streams, post, between, *results = drawn(
        (tokens, n, width), (tokens, n), (tokens, n, n), *[(tokens, width)] * parts
    )
    rounded = [jnp.asarray(a, dtype) for a in (streams, *results)]
    arrays = rounded[0], post, between, *rounded[1:]
    found, wanted = (jax.jit(functools.partial(write_streams, backend=backend))(*arrays) for backend in BOTH)
    assert found.dtype == dtype
    error = {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 2**-7, "atol": 1e-5}
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), **error)


@pytest.mark.usefixtures("interpreted")
def test_the_gradient_is_the_references() -> None:
    streams, weight, base, scale, norm = read_operands(2, 4, 8)

    def gradient(backend: Backend) -> Any:
        def loss(streams: jax.Array, weight: jax.Array) -> jax.Array:
            read = read_streams(streams, weight, base, scale, norm, 1, **HOW, backend=backend)
            out = write_streams(streams, read.post, read.between, read.normed, backend=backend)
            return jnp.sin(out).sum()

        return jax.jit(jax.grad(loss, (0, 1)))(streams, weight * np.float32(0.2))

    for mine, reference in zip(*map(gradient, BOTH), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-3, atol=1e-4)


@pytest.mark.aot
@pytest.mark.parametrize("number", [80, 90, 120])
def test_the_kernels_fit(number: int) -> None:
    gpu = gpus.by_number(number)
    streams, *read = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in read_operands(64, 4, 4096))
    streams = jax.ShapeDtypeStruct((2048, 4, 4096), jnp.bfloat16)
    call = functools.partial(read_streams, layer=1, **HOW, ue8m0=True if gpu.fp8 else None, backend=Backend.TRITON)
    post, between, y = (jax.ShapeDtypeStruct((2048, *shape), jnp.float32) for shape in ((4,), (4, 4), (4096,)))
    write = functools.partial(write_streams, backend=Backend.TRITON)
    kernels = (
        *kernel_resources(call, streams, *read, gpu=gpu),
        *kernel_resources(write, streams, post, between, y, gpu=gpu),
    )
    for kernel in kernels:
        assert kernel.spilled_bytes == 0 and kernel.shared_memory <= gpu.shared_memory
    assert [kernel.name for kernel in kernels] == ["product", "read", "write"]
