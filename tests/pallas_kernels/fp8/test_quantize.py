"""Block quantization: scales, error bounds, partial blocks, powers of two, SwiGLU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import fp8

quantize_1x128, quantize_128x128 = (
    jax.jit(function, static_argnames="ue8m0") for function in (fp8.quantize_1x128, fp8.quantize_128x128)
)
HALF_STEP = 2.0**-4  # e4m3 has 3 mantissa bits: rounding moves a normal value by at most 1/16


def test_1x128_scales_are_m_major_amax_over_448():
    x = jax.random.normal(jax.random.key(0), (3, 5, 256)) * jnp.array([1e-6, 1.0, 1e4])[:, None, None]
    q, scale = quantize_1x128(x)
    assert q.shape == x.shape and q.dtype == jnp.float8_e4m3fn
    assert scale.shape == (3, 2, 5) and scale.dtype == jnp.float32
    amax = np.abs(np.asarray(x)).reshape(3, 5, 2, 128).max(-1)
    np.testing.assert_allclose(scale, np.swapaxes(np.maximum(amax, 1e-4) / 448, -1, -2), rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10), exponent=st.integers(-3, 20), ue8m0=st.booleans())
def test_1x128_error_is_within_half_a_step(seed, exponent, ue8m0):
    x = np.random.default_rng(seed).normal(size=(4, 256)).astype(np.float32) * np.float32(2.0**exponent)
    q, scale = map(np.asarray, quantize_1x128(x, ue8m0=ue8m0))
    per_value = np.repeat(scale.T, 128, axis=1)
    error = np.abs(q.astype(np.float32) * per_value - x)
    # Below e4m3's smallest normal, 2^-6, the spacing is 2^-9 of a scale.
    assert np.all(error <= np.maximum(np.abs(x) * HALF_STEP, per_value * 2.0**-10) * 1.001)
    assert np.all(np.isfinite(q.astype(np.float32)))
    if ue8m0:
        mantissa, _ = np.frexp(scale)
        assert (mantissa == 0.5).all()
        plain = np.asarray(quantize_1x128(x)[1])
        assert np.all((scale >= plain) & (scale < 2 * plain))


def test_128x128_partial_blocks_are_counted_from_the_start():
    n, k = 576, 200  # kv_a_proj_with_mqa's rows: four blocks and a half
    block_n, block_k = jnp.arange(n) // 128, jnp.arange(k) // 128
    w = 10.0 ** (block_n[:, None] - 2 * block_k[None, :]) * (1 + jnp.arange(k) / k)
    q, scale = quantize_128x128(w)
    assert q.shape == (n, k) and scale.shape == (5, 2)
    for i in range(5):
        for j in range(2):
            block = np.asarray(w)[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            np.testing.assert_allclose(scale[i, j], np.abs(block).max() / 448, rtol=1e-6)
    np.testing.assert_allclose(fp8.dequantize_128x128(q, scale, jnp.float32), w, rtol=HALF_STEP)


def test_partial_last_channels():
    x = jax.random.normal(jax.random.key(1), (3, 200))
    q, scale = quantize_1x128(x)
    assert q.shape == (3, 200) and scale.shape == (2, 3)
    np.testing.assert_allclose(scale[1], jnp.abs(x[:, 128:]).max(1) / 448, rtol=1e-6)


def test_stacks_quantize_like_their_members():
    w = jax.random.normal(jax.random.key(2), (3, 130, 140))
    q, scale = quantize_128x128(w, ue8m0=True)
    for i in range(3):
        q_i, scale_i = quantize_128x128(w[i], ue8m0=True)
        assert jnp.array_equal(q[i], q_i) and jnp.array_equal(scale[i], scale_i)


def test_zeros_and_huge_values_stay_finite():
    x = jnp.stack([jnp.zeros(128), jnp.full(128, 3e38), jnp.full(128, -1e-30)])
    q, scale = quantize_1x128(x)
    assert jnp.all(jnp.isfinite(q.astype(jnp.float32))) and jnp.all(jnp.isfinite(scale))
    np.testing.assert_allclose(q[1].astype(jnp.float32) * scale[0, 1], x[1], rtol=1e-6)


def test_swiglu_is_fused_in_float32():
    gate_up = jax.random.normal(jax.random.key(3), (6, 512), jnp.bfloat16)
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    expected = quantize_1x128(gate * jax.nn.sigmoid(gate) * up)
    q, scale = jax.jit(fp8.swiglu_quantize)(gate_up)
    np.testing.assert_allclose(scale, expected[1], rtol=1e-6)
    assert jnp.mean(q != expected[0]) < 1e-2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp8.quantize_1x128(jnp.zeros(128)), "2 or more axes"),
        (lambda: fp8.quantize_1x128(jnp.zeros((2, 128), jnp.int32)), "int32"),
        (lambda: fp8.swiglu_quantize(jnp.zeros((2, 127))), "odd"),
        (lambda: fp8.dequantize_128x128(jnp.zeros((576, 256)), jnp.ones((4, 2))), r"\(5, 2\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
