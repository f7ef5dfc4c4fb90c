"""The C++ products against float64, for all remainders of shapes; a row's bits do not depend on other rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.align import align_groups, choose_tile_m
from pallas_kernels.backend import Backend
from pallas_kernels.dense import head_gemm, layer_gemm, plain_gemm
from pallas_kernels.fp8 import fp8_gemm, quantize_1x128
from pallas_kernels.grouped import (
    dequantize_int4,
    fp4_grouped_gemm_contiguous,
    fp8_grouped_gemm_contiguous,
    grouped_gemm_contiguous,
    int4_grouped_gemm_contiguous,
)
from tests.pallas_kernels import fp4_weights
from tests.pallas_kernels.numerics import activation, weight

pytestmark = pytest.mark.skipif(not native.library().targets, reason=native.library().reason)
NATIVE = Backend.NATIVE
DTYPES = (jnp.float32, jnp.bfloat16)
TOLERANCE = {jnp.float32: 1e-6, jnp.bfloat16: 1e-2}  # of the largest value; bfloat16 results are rounded to 8 bits
SHAPES = ((1, 64, 8), (2, 24, 10), (3, 192, 130), (4, 33, 7), (9, 7, 1), (native.MAX_ROWS, 70, 33))  # M, K, N


def random(seed, *shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def exact(equation, *operands):
    return np.einsum(equation, *(np.asarray(operand, np.float64) for operand in operands))


def assert_close(got, expected, dtype):
    assert np.abs(np.asarray(got, np.float64) - expected).max() <= TOLERANCE[dtype] * np.abs(expected).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_layer_product(m, k, n, dtype):
    x, w = random(0, m, k, dtype=dtype), random(1, 3, n, k, dtype=dtype)
    out = layer_gemm(x, w, 2, backend=NATIVE)
    assert out.dtype == dtype
    _, one, two = np.asarray(w)
    assert_close(out, exact("mk,nk->mn", x, two), dtype)
    assert_close(layer_gemm(x, w, 1, out_dtype=jnp.float32, backend=NATIVE), exact("mk,nk->mn", x, one), jnp.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_head_product(m, k, n, transposed, dtype):
    x, w = random(0, m, 3, k, dtype=dtype), random(1, 2, 3, n, k, dtype=dtype)
    stored = jnp.asarray(np.asarray(w).swapaxes(2, 3)) if transposed else w
    out = head_gemm(x, stored, 1, transposed=transposed, backend=NATIVE)
    assert_close(out, exact("mhk,hnk->mhn", x, np.asarray(w)[1]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile_m", [1, 4])
def test_grouped_product_and_rows_without_a_group(tile_m, dtype):
    ids = jnp.array([3, -1, 0, 3, 3, 3, 3, 1, 9])  # group 2 is empty; -1 and 9 are none
    x, w = random(0, 9, 40, dtype=dtype), random(1, 8, 18, 40, dtype=dtype)
    order = align_groups(ids, 4, tile_m)
    aligned = x.at[order.source_row].get(mode="fill", fill_value=0)
    product = jax.jit(lambda offset: grouped_gemm_contiguous(
        aligned, w, order.tile_group, tile_m=tile_m, group_offset=offset, backend=NATIVE))  # fmt: skip
    out = product(jnp.int32(4)).at[order.aligned_row].get(mode="fill", fill_value=0)
    expected = exact("mk,mnk->mn", x, w[4 + jnp.clip(ids, 0, 3)]) * ((ids >= 0) & (ids < 4))[:, None]
    assert_close(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(7, 256), (130, 512)])
def test_int4_products_have_the_bits_of_dequantized_weights(n, k, dtype):
    """Every code, experts without rows, tiles without a group, and scales of unused experts that are NaN."""
    random_bits = np.random.default_rng(0)
    words = jnp.asarray(random_bits.integers(0, 2**32, (6, n, k // 8), np.uint32).view(np.int32))
    scale = jnp.asarray(random_bits.uniform(0.5, 2, (6, k // 32, n)), jnp.bfloat16)
    tile_group, how = jnp.array([2, 2, -1, 0]), {"tile_m": 3, "group_offset": 3, "backend": NATIVE}
    x = random(1, 12, k, dtype=dtype)
    used = jnp.isin(jnp.arange(6), jnp.array([3, 5]))[:, None, None]
    out = int4_grouped_gemm_contiguous(x, words, jnp.where(used, scale, jnp.nan), tile_group, **how)
    dequantized = dequantize_int4(words, scale, dtype)
    np.testing.assert_array_equal(out, grouped_gemm_contiguous(x, dequantized, tile_group, **how))


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 7, 128), (3, 131, 384)])
def test_fp4_products_have_the_bits_of_fp8_ones(rows, n, k, out_dtype):
    """Every code at every place, experts without rows, tiles without a group, and unused experts that are NaN."""
    codes, places, scale = fp4_weights.random_weight(0, 6, n, k)
    tile_group, how = jnp.array([2, 2, -1, 0]), {"tile_m": rows, "group_offset": 3, "out_dtype": out_dtype}
    x, x_scale, _ = activation(1, 4 * rows, k)
    used = jnp.isin(jnp.arange(6), jnp.array([3, 5]))[:, None, None]
    weight = fp4_weights.words(codes), fp4_weights.powers(places), jnp.where(used, scale, jnp.nan)
    out = fp4_grouped_gemm_contiguous(x, x_scale, *weight, tile_group, **how, backend=NATIVE)
    values = fp4_weights.real(codes, places, np.ones_like(scale), np.float32).astype(jnp.float8_e4m3fn)
    wanted = fp8_grouped_gemm_contiguous(x, x_scale, values, scale, tile_group, **how, backend=NATIVE)
    np.testing.assert_array_equal(out, wanted)


def test_a_tile_without_a_group_reads_no_weight():
    w = jnp.stack([jnp.full((8, 8), jnp.nan), jnp.ones((8, 8))])
    out = grouped_gemm_contiguous(jnp.ones((6, 8)), w, jnp.array([-1, 1, -1]), tile_m=2, backend=NATIVE)
    np.testing.assert_array_equal(out[:, 0], [0, 0, 8, 8, 0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_other_rows(dtype):
    """So the text of a request does not depend on its batch."""
    x, w = random(0, 7, 203, dtype=dtype), random(1, 1, 1030, 203, dtype=dtype)  # several tasks, several threads
    together = layer_gemm(x, w, 0, backend=NATIVE)
    for row in range(7):
        np.testing.assert_array_equal(together[row], layer_gemm(x[row : row + 1], w, 0, backend=NATIVE)[0])
    heads = head_gemm(x[:, None], w[None], 0, backend=NATIVE)
    np.testing.assert_array_equal(heads[:, 0], together)


def test_bfloat16_results_are_rounded_to_the_nearest():
    ties = [[1, 2**-8], [1 + 2**-7, 2**-8], [-1, -(2**-8)], [3e38, 3e38], [jnp.inf, 1], [jnp.nan, 1]]
    x, w = jnp.asarray(ties, jnp.bfloat16), jnp.ones((1, 1, 2), jnp.bfloat16)
    expected = x.astype(jnp.float32).sum(axis=1).astype(jnp.bfloat16)
    found = layer_gemm(x, w, 0, backend=NATIVE)[:, 0]
    np.testing.assert_array_equal(*(np.asarray(each, np.float32) for each in (found, expected)))


def test_gradients_are_the_reference_s():
    x, w = random(0, 3, 20, dtype=jnp.float32), random(1, 2, 9, 20, dtype=jnp.float32)

    def gradients(backend):
        return jax.grad(lambda x, w: jnp.sum(jnp.tanh(layer_gemm(x, w, 1, backend=backend))), (0, 1))(x, w)

    for ours, theirs in zip(gradients(NATIVE), gradients(Backend.REFERENCE), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_weight_outside_of_a_stack():
    x, w = random(0, 2, 3, 24, dtype=jnp.bfloat16), random(1, 50, 24, dtype=jnp.bfloat16)
    out = plain_gemm(x, w, out_dtype=jnp.float32, backend=NATIVE)
    assert out.dtype == jnp.float32
    assert_close(out, exact("bsk,nk->bsn", x, w), jnp.float32)


def test_unsupported_operands_use_xla():
    def lowered(rows, dtype):
        x, w = jnp.zeros((rows, 8), dtype), jnp.zeros((2, 8, 8), dtype)
        return jax.jit(lambda x, w: layer_gemm(x, w, 1, backend=NATIVE)).lower(x, w).as_text()

    assert "LayerProduct" in lowered(native.MAX_ROWS, jnp.float32)
    assert "LayerProduct" not in lowered(native.MAX_ROWS + 1, jnp.float32)
    assert "LayerProduct" not in lowered(1, jnp.float16)
    assert choose_tile_m(8 * 16, 16, backend=NATIVE) == 1
    assert choose_tile_m(8 * 16, 16, dtype=jnp.float8_e4m3fn, backend=NATIVE) == 1
    assert choose_tile_m(8 * 16, 16, dtype=jnp.float16, backend=NATIVE) == 16


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize(("k", "n"), [(256, 130), (200, 7), (24, 300)])
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_fp8_products(m, k, n, out_dtype):
    x, x_scale, x_true = activation(0, m, k)
    w, w_scale, w_true = weight(1, 3, n, k)
    out = fp8_gemm(x, x_scale, w, w_scale, layer=2, out_dtype=out_dtype, backend=NATIVE)
    assert out.dtype == out_dtype
    assert_close(out, x_true @ w_true[2].T, out_dtype)
    alone = fp8_gemm(x, x_scale, w[1], w_scale[1], out_dtype=out_dtype, backend=NATIVE)
    assert_close(alone, x_true @ w_true[1].T, out_dtype)


def test_fp8_products_by_group():
    x, x_scale, x_true = activation(0, 6, 200)
    w, w_scale, w_true = weight(1, 4, 136, 200)
    tiles = jnp.array([1, 1, -1, 0, 0, 1])
    out = fp8_grouped_gemm_contiguous(
        x, x_scale, w, w_scale, tiles, tile_m=1, group_offset=2, out_dtype=jnp.float32, backend=NATIVE
    )
    expected = np.einsum("mk,mnk->mn", x_true, w_true[2 + np.maximum(tiles, 0)]) * (tiles >= 0)[:, None]
    assert_close(out, expected, jnp.float32)


def test_every_value_of_e4m3():
    """Subnormal ones too: XLA's threads flush denormal numbers to zero."""
    values = jnp.asarray(np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn))
    w = values[jnp.isfinite(values.astype(jnp.float32))][:, None]  # all but NaN: [254, 1]
    one = jnp.ones((1, 1), jnp.float8_e4m3fn), jnp.ones((1, 1), jnp.float32)
    out = fp8_gemm(*one, w, jnp.ones((2, 1), jnp.float32), out_dtype=jnp.float32, backend=NATIVE)
    np.testing.assert_array_equal(out[0], w[:, 0].astype(jnp.float32))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_rows_are_rounded_to_e4m3_like_the_reference(ue8m0):
    spread = np.exp2(np.random.default_rng(0).uniform(-16, 2, (2, 3, 200)))  # down to e4m3's subnormal values
    x = random(1, 2, 3, 200, dtype=jnp.bfloat16) * spread.astype(jnp.bfloat16)
    x = x.at[0, 0].set(0).at[1, 2, 5].set(3e30)
    (values, scale), (expected, true_scale) = (
        jax.jit(functools.partial(quantize_1x128, ue8m0=ue8m0, backend=backend))(x)
        for backend in (NATIVE, Backend.REFERENCE)
    )
    np.testing.assert_allclose(scale, true_scale, rtol=3e-7)
    got, expected = (np.asarray(each, np.float32) for each in (values, expected))
    assert (got == expected).mean() > 0.99  # a scale that differs in its last bit may move a tie
    np.testing.assert_allclose(got, expected, rtol=1 / 8, atol=2**-9)


def test_a_block_with_nan_has_no_scale():
    _, scale = quantize_1x128(jnp.ones((2, 256)).at[1, 200].set(jnp.nan), backend=NATIVE)
    assert np.isnan(scale).tolist() == [[False, False], [False, True]]
