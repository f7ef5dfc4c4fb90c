"""`fp8_gemm` through the reference: against float64, stacks, partial blocks, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8 import fp8_gemm
from tests.pallas_kernels.numerics import activation, calc_diff, normal, weight


@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (5, 576, 384), (40, 200, 200), (129, 130, 1000)])
def test_against_float64(m, n, k):
    a, a_scale, a_true = activation(0, m, k)
    b, b_scale, b_true = weight(1, n, k)
    out = fp8_gemm(a, a_scale, b, b_scale)
    assert out.shape == (m, n) and out.dtype == jnp.bfloat16
    assert calc_diff(out, a_true @ b_true.T) < 1e-5
    exact = fp8_gemm(a, a_scale, b, b_scale, out_dtype=jnp.float32)
    np.testing.assert_allclose(exact, a_true @ b_true.T, rtol=1e-4, atol=1e-3)


def test_error_of_quantization_itself():
    x, w = normal(2, 32, 512), normal(3, 256, 512)
    a, a_scale, _ = activation(2, 32, 512)
    b, b_scale, _ = weight(3, 256, 512)
    assert calc_diff(fp8_gemm(a, a_scale, b, b_scale), x @ w.T) < 1e-3


def test_layer_of_a_stack_is_traced():
    a, a_scale, a_true = activation(4, 8, 256)
    b, b_scale, b_true = weight(5, 3, 192, 256)
    product = jax.jit(lambda layer: fp8_gemm(a, a_scale, b, b_scale, layer=layer))
    for layer in range(3):
        assert calc_diff(product(layer), a_true @ b_true[layer].T) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": np.zeros((8, 128), jnp.float8_e4m3fn)}, r"\(8, 128\)"),
        ({"a_scale": np.ones((8, 2), np.float32)}, r"\(2, 8\)"),
        ({"b_scale": np.ones((2, 2), np.float32)}, r"\(1, 2\)"),
        ({"a": np.zeros((8, 256), jnp.bfloat16)}, "bfloat16"),
        ({"layer": 0}, "stack"),
        ({"b": np.zeros((2, 128, 256), jnp.float8_e4m3fn), "b_scale": np.ones((2, 1, 2), np.float32)}, "layer=None"),
        ({"out_dtype": jnp.float16}, "float16"),
    ],
)
def test_bad_input(change, message):
    good = {
        "a": jnp.zeros((8, 256), jnp.float8_e4m3fn),
        "a_scale": jnp.ones((2, 8)),
        "b": jnp.zeros((128, 256), jnp.float8_e4m3fn),
        "b_scale": jnp.ones((1, 2)),
    }
    with pytest.raises(ValueError, match=message):
        fp8_gemm(**(good | change))
