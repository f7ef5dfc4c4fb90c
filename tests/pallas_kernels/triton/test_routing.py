"""The choice of experts in Triton's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.deepseek_v4 import DEEPSEEK_V4_FLASH
from configs.kimi import KIMI_K2
from dsv3.model.layers.router import route
from pallas_kernels import gpus
from pallas_kernels.backend import Backend
from pallas_kernels.triton.resources import kernel_resources


@pytest.mark.parametrize("cfg", [DEEPSEEK_V4_FLASH, KIMI_K2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.usefixtures("interpreted")
def test_experts_and_weights_are_the_references(cfg, biased: bool) -> None:
    """Also of small scores, of equal ones, of which the first win, of NaN, of which no expert comes twice, and none."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 40)).astype(np.float32)
    logits[1] = -np.arange(40) - 3
    logits[2] = rng.integers(-1, 1, 40)
    bias = jnp.asarray([[np.nan] * 40, rng.permutation(40) / 80], jnp.float32) if biased else None
    found, wanted = (
        route(cfg, jnp.asarray(logits), bias, backend, 2, 1, jnp.arange(5) < 4)
        for backend in (Backend.TRITON, Backend.REFERENCE)
    )
    assert (found.ids[4] == -1).all()
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_allclose(found.weights, wanted.weights, rtol=2e-5)
    ids = np.asarray(route(cfg, jnp.full((1, 40), jnp.nan), bias, Backend.TRITON, 2, 1).ids[0])
    assert len(set(ids.tolist())) == cfg.num_experts_per_tok and ids.max() < 40


@pytest.mark.usefixtures("interpreted")
def test_the_gradient_is_the_references() -> None:
    def gradient(backend: Backend) -> jax.Array:
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 40)), jnp.float32)
        return jax.grad(lambda x: jnp.sin(route(DEEPSEEK_V4_FLASH, x, None, backend).weights).sum())(logits)

    np.testing.assert_allclose(*map(gradient, (Backend.TRITON, Backend.REFERENCE)), rtol=1e-4, atol=1e-7)


@pytest.mark.aot
def test_the_kernel_fits() -> None:
    logits, bias = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 256), (43, 256)))
    call = functools.partial(route, DEEPSEEK_V4_FLASH, backend=Backend.TRITON, layer=1)
    (kernel,) = kernel_resources(call, logits, bias, gpu=gpus.by_number(90))
    assert kernel.spilled_bytes == 0
