"""FP4 weights: grouped products on any device, against plain arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped import dequantize_four_bit, fp4_grouped_gemm_contiguous
from pallas_kernels.int4 import FP4_VALUES
from tests.pallas_kernels import fp4_weights
from tests.pallas_kernels.numerics import calc_diff

GROUPS, N, K, TILE = 4, 24, 512, 4


def test_codes_are_those_of_ml_dtypes() -> None:
    assert np.array_equal(FP4_VALUES, fp4_weights.VALUES)
    assert np.array_equal(np.signbit(FP4_VALUES), np.signbit(fp4_weights.VALUES))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_value_is_rounded(dtype) -> None:
    codes, scale = fp4_weights.random_weight(0, 3, N, K)
    found = dequantize_four_bit(jnp.asarray(fp4_weights.words(codes)), jnp.asarray(scale).swapaxes(1, 2), dtype)
    np.testing.assert_array_equal(np.asarray(found.astype(jnp.float32)), fp4_weights.real(codes, scale, np.float32))


@jax.jit
def product(x, words, scale, tile_group, offset):
    return fp4_grouped_gemm_contiguous(x, words, scale, tile_group, tile_m=TILE, group_offset=offset)


@settings(deadline=None, max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    tile_group=st.lists(st.integers(-1, GROUPS // 2 - 1), min_size=3, max_size=3),
    offset=st.sampled_from([0, GROUPS // 2]),
)
def test_products_against_float64(seed: int, tile_group: list[int], offset: int) -> None:
    """Empty groups, skipped tiles, the second layer of a stack."""
    codes, scale = fp4_weights.random_weight(seed, GROUPS, N, K)
    x = jax.random.normal(jax.random.key(seed), (3 * TILE, K), jnp.bfloat16)
    scales = jnp.asarray(scale).swapaxes(1, 2)
    y = product(x, fp4_weights.words(codes), scales, jnp.array(tile_group), jnp.int32(offset))
    assert y.shape == (3 * TILE, N) and y.dtype == jnp.bfloat16
    weight = fp4_weights.real(codes, scale)
    for tile, group in enumerate(tile_group):
        rows = slice(tile * TILE, (tile + 1) * TILE)
        if group < 0:
            assert not jnp.any(y[rows])
        else:
            wanted = np.asarray(x[rows].astype(jnp.float32), np.float64) @ weight[offset + group].T
            assert calc_diff(y[rows], wanted) < 1e-5


def test_words_of_int4_are_refused() -> None:
    x, words = np.zeros((8, 256), np.float32), np.zeros((2, 8, 32), np.int32)
    with pytest.raises(ValueError, match="needs uint32 words and bfloat16 scales, got int32"):
        fp4_grouped_gemm_contiguous(x, words, np.zeros((2, 8, 8), jnp.bfloat16), jnp.zeros(2, jnp.int32), tile_m=4)
