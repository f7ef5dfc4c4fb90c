"""FP4 weights: each code is decoded, and turned into FP8 without loss or reported."""

import jax
import ml_dtypes
import numpy as np
import pytest

from dsv3.checkpoint.fp4 import MAX_SPREAD, Fp4Mode, decode, to_fp8, to_words
from pallas_kernels.fp4 import VALUES, to_e4m3

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def packed(codes: np.ndarray) -> np.ndarray:
    """Codes `[N, K]`, the even columns in the low four bits."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8)


def scales(exponents: np.ndarray) -> np.ndarray:
    return (np.asarray(exponents) + 127).astype(np.uint8).view(E8M0)


def multiplied(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Values from the definition, one by one."""
    e2m1 = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}
    values = np.array([[(-1) ** (code >> 3) * e2m1[code & 7] for code in row] for row in codes.tolist()])
    return values * 2.0 ** np.repeat(exponents, 32, axis=1)


def of_blocks(data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    N, K = data.shape
    return data.astype(np.float64) * np.repeat(np.repeat(scale, 128, 0), 128, 1)[:N, :K]


def test_codes_are_those_of_ml_dtypes() -> None:
    expected = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(VALUES, expected) and np.array_equal(np.signbit(VALUES), np.signbit(expected))


def test_the_low_half_of_a_byte_is_the_even_column() -> None:
    row = np.zeros((1, 16), np.int8)
    row[0, 0] = 0x21
    assert np.asarray(decode(row, scales(np.array([[3]]))))[0, :3].tolist() == [4.0, 8.0, 0.0]


def fp8(codes: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Data, block scales and distances of `to_fp8`."""
    made, spread = jax.jit(to_fp8)(packed(codes), scales(exponents))
    return np.asarray(made.data), np.asarray(made.scale), np.asarray(spread)


def words(codes: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of `to_words`, whose words become values again."""
    made, spread = jax.jit(to_words)(packed(codes), scales(exponents))
    return np.asarray(jax.jit(to_e4m3)(made.data, made.powers)), np.asarray(made.scale), np.asarray(spread)


MODES = {"fp8": fp8, "keep": words}


def test_every_byte_under_every_scale() -> None:
    """Float32 on a device has no numbers below 2**-126, and e8m0 reaches 6 * 2**127."""
    codes = np.arange(256)[:, None] >> np.array([0, 4] * 16)[None] & 15
    exponents = np.tile(np.arange(-125, 126), (256, 1))
    found = np.asarray(decode(packed(np.tile(codes, 251)), scales(exponents))).astype(np.float64)
    assert np.array_equal(found, multiplied(np.tile(codes, 251), exponents))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("largest", [-100, -7, 0, 5, 125])
def test_every_code_at_every_distance_that_a_block_has_room_for(largest: int, mode: Fp4Mode) -> None:
    distances = MAX_SPREAD[mode] + 1
    codes = np.tile(np.arange(16), (distances, 8))  # a row per distance; the block's other columns are the largest
    exponents = np.full((distances, 4), largest)
    exponents[:, 1] = largest - np.arange(distances)
    data, scale, spread = MODES[mode](codes, exponents)
    assert np.array_equal(spread, largest - exponents)
    assert np.array_equal(of_blocks(data, scale), multiplied(codes, exponents))
    assert np.array_equal(np.signbit(data.astype(np.float32)), codes > 7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("code", range(16))
def test_one_place_more_is_reported_unless_it_holds_zeros(code: int, mode: Fp4Mode) -> None:
    codes = np.full((3, 128), 1)
    codes[2, 32:64] = code
    exponents = np.zeros((3, 4), np.int64)
    exponents[2, 1] = -MAX_SPREAD[mode] - 1
    data, scale, spread = MODES[mode](codes, exponents)
    assert spread[2, 1] == (MAX_SPREAD[mode] + 1 if code & 7 else 0) and not spread[:2].any()
    if not code & 7:
        assert not of_blocks(data, scale)[2, 32:64].any()


def test_blocks_at_the_edges_have_scales_of_their_own() -> None:
    rng = np.random.default_rng(0)
    codes, exponents = rng.integers(0, 16, (300, 416)), rng.integers(-6, 7, (300, 13))
    exponents[:, 12] -= 40  # the last columns are a block apart
    exponents[256:] += 60
    data, scale, spread = fp8(codes, exponents)
    assert scale.shape == (3, 4) and np.array_equal(np.log2(scale), np.round(np.log2(scale)))
    assert spread.max() <= 12 and np.array_equal(of_blocks(data, scale), multiplied(codes, exponents))


@pytest.mark.parametrize("exponent", [-127, 0, 127])
def test_the_scale_of_zeros_says_nothing(exponent: int) -> None:
    data, scale, spread = fp8(np.full((4, 32), 8), np.full((4, 1), exponent))
    assert not data.astype(np.float32).any() and np.isfinite(scale).all() and (scale > 0).all() and not spread.any()
