"""The quantisation kernel in the interpreter against the reference: edges, SwiGLU, powers of two, skipped rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backend
from pallas_kernels.fp8 import quantize_1x128, swiglu_quantize
from tests.pallas_kernels.gemm.interpreted import interpret, untouched


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("quantize", [quantize_1x128, swiglu_quantize])
def test_equals_reference(quantize, ue8m0):
    x = jax.random.normal(jax.random.key(0), (70, 288), jnp.bfloat16)  # partial tile of rows, partial last block
    q, scale = interpret(lambda x: quantize(x, ue8m0=ue8m0, backend=Backend.MOSAIC), x)
    q_expected, scale_expected = quantize(x, ue8m0=ue8m0, backend=Backend.REFERENCE)
    assert q.shape == q_expected.shape and scale.shape == scale_expected.shape
    np.testing.assert_allclose(scale, scale_expected, rtol=1e-6)
    assert jnp.mean(q != q_expected) < 1e-2  # exp may round differently


def test_counts_skip_tiles_of_rows():
    x = jax.random.normal(jax.random.key(1), (3, 72, 128), jnp.bfloat16)
    q, scale = interpret(lambda x, c: quantize_1x128(x, counts=c, backend=Backend.MOSAIC), x, jnp.array([72, 0, 9]))
    q_expected, scale_expected = quantize_1x128(x, backend=Backend.REFERENCE)
    for group, count in enumerate([72, 0, 9]):
        np.testing.assert_array_equal(scale[group, :, :count], scale_expected[group, :, :count])
        assert jnp.array_equal(q[group, :count], q_expected[group, :count])
    assert untouched(scale[1]) and untouched(scale[2, :, 64:])


def test_other_inputs_take_the_reference_on_every_device():
    x = jax.random.normal(jax.random.key(2), (3, 130), jnp.bfloat16)  # rows of 260 bytes: not for TMA
    q, _ = quantize_1x128(x, backend=Backend.MOSAIC)
    assert jnp.array_equal(q, quantize_1x128(x, backend=Backend.REFERENCE)[0])


def test_counts_must_fit():
    with pytest.raises(ValueError, match="counts"):
        quantize_1x128(jnp.zeros((2, 4, 128)), counts=jnp.zeros(3, jnp.int32))
