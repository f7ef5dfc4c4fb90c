"""What the checksum of a block must notice."""

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dsv3.checkpoint.checksum import ROW_BYTES, checksum

SIZES = st.sampled_from([1, 7, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, 3 * ROW_BYTES, 5 * ROW_BYTES + 13])


def random_bytes(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@given(size=SIZES, seed=st.integers(0, 9), at=st.integers(0, 6 * ROW_BYTES), change=st.integers(1, 255))
@settings(deadline=None)
def test_one_wrong_byte(size, seed, at, change):
    data = random_bytes(size, seed)
    damaged = data.copy()
    damaged[at % size] ^= change
    assert checksum(damaged) != checksum(data)


@given(seed=st.integers(0, 99), start=st.integers(0, 5 * ROW_BYTES), length=st.integers(1, 5 * ROW_BYTES))
@settings(deadline=None)
def test_a_lost_or_displaced_part(seed, start, length):
    """Bytes overwritten by zeros, or by those eight places before them."""
    data = random_bytes(5 * ROW_BYTES + 24, seed)
    for damaged in (data.copy(), data.copy()):
        damaged[start : start + length] = 0
        assert np.array_equal(damaged, data) == (checksum(damaged) == checksum(data))
        damaged[start : start + length] = np.roll(data, 8)[start : start + length]
        assert np.array_equal(damaged, data) == (checksum(damaged) == checksum(data))


@given(seed=st.integers(0, 99), a=st.integers(0, 4), b=st.integers(0, 4))
@settings(deadline=None)
def test_pages_in_another_order(seed, a, b):
    assume(a != b)
    pages = random_bytes(5 * ROW_BYTES, seed).reshape(5, ROW_BYTES)
    swapped = pages.copy()
    swapped[[a, b]] = pages[[b, a]]
    assert checksum(swapped.reshape(-1)) != checksum(pages.reshape(-1))


def test_it_depends_on_the_bytes_alone():
    """Not on where in memory they lie. The value was computed by the definition in plain Python."""
    data = np.arange(2 * ROW_BYTES + 5, dtype=np.uint8)
    shifted = np.empty(data.size + 3, np.uint8)[3:]
    shifted[:] = data
    assert checksum(data) == checksum(shifted) == 1_981_542_613
