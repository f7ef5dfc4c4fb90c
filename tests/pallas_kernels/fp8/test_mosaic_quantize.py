"""The quantization kernel in the interpreter against the reference: edges, SwiGLU, powers of two, skipped rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backend
from pallas_kernels.fp8 import quantize_1x128, swiglu_quantize
from tests.pallas_kernels.gemm.interpreted import interpret, untouched


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(
    "quantize",
    [quantize_1x128, swiglu_quantize, functools.partial(swiglu_quantize, limit=0.3)],
    ids=["rows", "swiglu", "limited"],
)
def test_equals_reference(quantize, ue8m0):
    x = jax.random.normal(jax.random.key(0), (70, 320), jnp.bfloat16)  # partial tile of rows, partial last block
    q, scale = interpret(lambda x: quantize(x, ue8m0=ue8m0, backend=Backend.MOSAIC), x)
    q_expected, scale_expected = jax.jit(functools.partial(quantize, ue8m0=ue8m0, backend=Backend.REFERENCE))(x)
    assert q.shape == q_expected.shape and scale.shape == scale_expected.shape
    np.testing.assert_allclose(scale, scale_expected, rtol=1e-6)
    assert jnp.mean(q != q_expected) < 1e-2  # exp may round differently


@pytest.mark.parametrize("used", [0, 9, 64, 65])
def test_tiles_past_the_used_rows_are_skipped(used):
    x = jax.random.normal(jax.random.key(1), (136, 256), jnp.bfloat16)
    q, scale = interpret(lambda x, n: swiglu_quantize(x, used_rows=n, backend=Backend.MOSAIC), x, jnp.int32(used))
    quantize = jax.jit(functools.partial(swiglu_quantize, backend=Backend.REFERENCE))
    q_expected, scale_expected = quantize(x, used_rows=jnp.int32(used))
    np.testing.assert_allclose(scale[:, :used], scale_expected[:, :used], rtol=1e-6)
    assert used == 0 or jnp.mean(q[:used] != q_expected[:used]) < 1e-2
    assert untouched(scale[:, -(-used // 64) * 64 :])


def test_other_inputs_take_the_reference_on_every_device():
    x = jax.random.normal(jax.random.key(2), (3, 130), jnp.bfloat16)  # rows of 260 bytes: not for TMA
    q, _ = quantize_1x128(x, backend=Backend.MOSAIC)
    assert jnp.array_equal(q, quantize_1x128(x, backend=Backend.REFERENCE)[0])


def test_used_rows_are_one_number():
    with pytest.raises(ValueError, match="scalar"):
        swiglu_quantize(jnp.zeros((4, 256)), used_rows=jnp.zeros(3, jnp.int32))
