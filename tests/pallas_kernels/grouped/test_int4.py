"""INT4 weights: the order of words, their values, and grouped products on any device, against plain arithmetic."""

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.backend import Backend
from pallas_kernels.grouped import dequantize_int4, int4_grouped_gemm_contiguous
from pallas_kernels.int4 import interleave
from tests.pallas_kernels import int4_weights
from tests.pallas_kernels.numerics import calc_diff

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "int4.npz"


def test_words_of_compressed_tensors_dequantize_to_its_values() -> None:
    """`tests/golden/make_int4.py` made the data with the package itself."""
    with np.load(GOLDEN) as file:
        golden = dict(file)
    assert golden["packed"].dtype == np.int32 and golden["packed"].shape == (6, 64)
    scale = golden["scale"].view(ml_dtypes.bfloat16)
    weight = dequantize_int4(interleave(golden["packed"]), jnp.asarray(scale.T), jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(weight).view(np.uint16), golden["weight"])
    values, scales = int4_weights.quantize(golden["original"])
    np.testing.assert_array_equal(int4_weights.pack(values), golden["packed"])
    np.testing.assert_array_equal(scales.view(np.uint16), golden["scale"])


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 3), runs=st.integers(1, 3))
def test_four_bits_of_32_words_are_a_scale_group(seed: int, rows: int, runs: int) -> None:
    values, _ = int4_weights.random_weight(seed, rows, 256 * runs)
    words = interleave(int4_weights.pack(values)).view(np.uint32).reshape(rows, runs, 32)
    for column in range(256):
        found = (words[:, :, column % 32] >> np.uint32(4 * (column // 32))) & np.uint32(15)
        np.testing.assert_array_equal(found.astype(np.int8) - 8, values.reshape(rows, runs, 256)[:, :, column])


@pytest.mark.parametrize("words", [np.zeros((2, 33), np.int32), np.zeros((2, 32), np.uint32)])
def test_words_come_32_at_a_time(words: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"int32 words, 32 at a time; got u?int32\[2, 3[23]\]"):
        interleave(words)


GROUPS, N, K, TILE = 4, 24, 512, 4


@jax.jit
def product(x, words, scale, tile_group, offset):
    return int4_grouped_gemm_contiguous(x, words, scale, tile_group, tile_m=TILE, group_offset=offset)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    tile_group=st.lists(st.integers(-1, GROUPS // 2 - 1), min_size=3, max_size=3),
    offset=st.sampled_from([0, GROUPS // 2]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_products_against_float64(seed: int, tile_group: list[int], offset: int, dtype) -> None:
    """Empty groups, skipped tiles, the second layer of a stack; in bfloat16 weights and result are rounded once."""
    values, scale = int4_weights.random_weight(seed, GROUPS, N, K)
    x = jax.random.normal(jax.random.key(seed), (3 * TILE, K), dtype)
    words = interleave(int4_weights.pack(values))
    y = product(x, words, jnp.asarray(scale).swapaxes(1, 2), jnp.array(tile_group), jnp.int32(offset))
    assert y.shape == (3 * TILE, N) and y.dtype == dtype
    weight = int4_weights.real(values, scale)
    for tile, group in enumerate(tile_group):
        rows = slice(tile * TILE, (tile + 1) * TILE)
        if group < 0:
            assert not jnp.any(y[rows])
        else:
            wanted = np.asarray(x[rows].astype(jnp.float32), np.float64) @ weight[offset + group].T
            assert calc_diff(y[rows], wanted) < (1e-12 if dtype == jnp.float32 else 2e-5)


# In numpy: jax would compile programs for these during collection.
X, W, SCALE = np.zeros((8, 256), np.float32), np.zeros((2, 8, 32), np.int32), np.zeros((2, 8, 8), jnp.bfloat16)


@pytest.mark.parametrize(
    ("x", "w", "scale", "options", "message"),
    [
        (X[:, :128], W, SCALE, {}, r"one K, got \(8, 128\) and \(2, 8, 32\)"),
        (X, W[..., :16], SCALE[:, :4], {}, r"multiples of 256, got \(2, 8, 16\)"),
        (X, W, SCALE[..., :4], {}, r"and \(2, 8, 4\)"),
        (X, W.astype(jnp.uint32), SCALE, {}, "got uint32 and bfloat16"),
        (X, W, SCALE.astype(jnp.float32), {}, "got int32 and float32"),
        (X.astype(jnp.float16), W, SCALE, {}, "must be bfloat16 or float32, got float16"),
        (X, W, SCALE, {"tile_m": 3}, "8 rows in tiles of 3"),
        (X, W, SCALE, {"backend": Backend.MOSAIC}, "takes bfloat16 or float16, got float32"),
        (X.astype(jnp.bfloat16), W, SCALE, {"backend": Backend.MOSAIC}, r"got tile_m=4 and N=8"),
    ],
)
def test_bad_input(x, w, scale, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        int4_grouped_gemm_contiguous(x, w, scale, jnp.zeros(2, jnp.int32), **{"tile_m": 4, **options})
