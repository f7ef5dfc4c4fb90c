"""FP4 weights: their order, and grouped products on any device, against plain arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import fp4
from pallas_kernels.grouped import fp4_grouped_gemm_contiguous, fp8_grouped_gemm_contiguous
from tests.pallas_kernels import fp4_weights
from tests.pallas_kernels.numerics import activation, calc_diff

GROUPS, N, K, TILE = 4, 136, 256, 4


def test_codes_are_those_of_ml_dtypes() -> None:
    assert np.array_equal(fp4.VALUES, fp4_weights.VALUES)
    assert np.array_equal(np.signbit(fp4.VALUES), np.signbit(fp4_weights.VALUES))


def test_words_and_powers_are_those_of_the_definition() -> None:
    codes, places, _ = fp4_weights.random_weight(0, 3, N, K)
    np.testing.assert_array_equal(jax.jit(fp4.pack)(codes), fp4_weights.words(codes))
    np.testing.assert_array_equal(jax.jit(fp4.pack_powers)(places), fp4_weights.powers(places))


def test_each_code_at_each_place_is_an_e4m3_value() -> None:
    places = np.tile(np.arange(fp4.MAX_SPREAD + 1)[:, None], (1, 4))
    codes = np.tile(np.arange(16), (fp4.MAX_SPREAD + 1, 8))
    found = jax.jit(fp4.to_e4m3)(fp4_weights.words(codes), fp4_weights.powers(places))
    wanted = fp4_weights.real(codes, places, np.ones((1, 1)))
    np.testing.assert_array_equal(np.asarray(found).astype(np.float64), wanted)
    np.testing.assert_array_equal(np.signbit(np.asarray(found).astype(np.float32)), codes > 7)


@jax.jit
def products(x, weight, values, tile_group, offset):
    where = {"tile_group": tile_group, "tile_m": TILE, "group_offset": offset}
    return (
        fp4_grouped_gemm_contiguous(*x, *weight, **where),
        fp8_grouped_gemm_contiguous(*x, values, weight[-1], **where),
    )


@settings(deadline=None, max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    tile_group=st.lists(st.integers(-1, GROUPS // 2 - 1), min_size=3, max_size=3),
    offset=st.sampled_from([0, GROUPS // 2]),
)
def test_products_have_the_bits_of_fp8_ones(seed: int, tile_group: list[int], offset: int) -> None:
    """Empty groups, skipped tiles, the second layer of a stack."""
    codes, places, scale = fp4_weights.random_weight(seed, GROUPS, N, K)
    *x, x_true = activation(seed, 3 * TILE, K)
    weight = fp4_weights.words(codes), fp4_weights.powers(places), scale
    values = fp4_weights.real(codes, places, np.ones_like(scale), np.float32).astype(jnp.float8_e4m3fn)
    y, in_fp8 = products(x, weight, values, jnp.array(tile_group), jnp.int32(offset))
    assert y.shape == (3 * TILE, N) and y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(in_fp8, np.float32))
    true = fp4_weights.real(codes, places, scale)
    for tile, group in enumerate(tile_group):
        rows = slice(tile * TILE, (tile + 1) * TILE)
        if group < 0:
            assert not jnp.any(y[rows])
        else:
            assert calc_diff(y[rows], x_true[rows] @ true[offset + group].T) < 1e-5


@pytest.mark.parametrize(
    ("words", "powers", "match"),
    [
        (
            ((2, 8, 32), np.int32),
            ((2, 2, 8), np.uint32),
            "needs uint32 words and powers, and float32 scales, got int32",
        ),
        (((2, 8, 32), np.uint32), ((2, 8, 8), np.uint32), r"powers \[..., K/128, N\].*got \(2, 8, 32\), \(2, 8, 8\)"),
        (((2, 8, 24), np.uint32), ((2, 1, 8), np.uint32), "with K in multiples of 128"),
    ],
)
def test_weights_of_another_form_are_refused(words, powers, match) -> None:
    x = np.zeros((8, 256), jnp.float8_e4m3fn), np.zeros((2, 8), np.float32)
    weight = np.zeros(*words), np.zeros(*powers), np.zeros((2, 1, 2), np.float32)
    with pytest.raises(ValueError, match=match):
        fp4_grouped_gemm_contiguous(*x, *weight, jnp.zeros(2, jnp.int32), tile_m=4)
