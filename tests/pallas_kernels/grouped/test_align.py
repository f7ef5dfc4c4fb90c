"""Alignment of rows to groups: invariants for any routing."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import native
from pallas_kernels.align import align_groups, aligned_rows, choose_tile_m
from pallas_kernels.backend import Backend

BACKENDS = [Backend.REFERENCE, *([Backend.NATIVE] if native.library().targets else [])]


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(-2, 7), min_size=12, max_size=12),
    num_groups=st.sampled_from([1, 3, 6]),
    tile_m=st.sampled_from([1, 4, 8]),
    backend=st.sampled_from(BACKENDS),
)
def test_every_row_is_once_in_a_tile_of_its_group(ids, num_groups, tile_m, backend):
    ids = np.array(ids)
    aligned = align_groups(jnp.asarray(ids), num_groups, tile_m, backend=backend)
    A = aligned_rows(len(ids), num_groups, tile_m)
    source_row, aligned_row, tile_group = (np.asarray(v) for v in aligned[:3])
    assert source_row.shape == (A,) and tile_group.shape == (A // tile_m,)
    kept = (ids >= 0) & (ids < num_groups)
    np.testing.assert_array_equal(aligned.counts, np.bincount(ids[kept], minlength=num_groups))
    assert (aligned_row[~kept] == A).all()
    np.testing.assert_array_equal(source_row[aligned_row[kept]], np.flatnonzero(kept))
    np.testing.assert_array_equal(tile_group[aligned_row[kept] // tile_m], ids[kept])
    assert (source_row < len(ids)).sum() == kept.sum()
    used = tile_group >= 0
    assert aligned.tile_m == tile_m and int(aligned.needed) == used.sum() * tile_m
    assert used[: used.sum()].all() and (np.diff(tile_group[used]) >= 0).all()
    assert used.sum() == sum(-(-c // tile_m) for c in np.asarray(aligned.counts))
    for group in range(num_groups):  # stable: rows of a group keep their order, without gaps
        at = aligned_row[ids == group]
        assert (np.diff(at) == 1).all() and (len(at) == 0 or at[0] % tile_m == 0)


@settings(max_examples=20, deadline=None)
@given(ids=st.lists(st.integers(-2, 7), min_size=12, max_size=12), backend=st.sampled_from(BACKENDS))
def test_needed_reports_rows_beyond_the_capacity(ids, backend):
    """Up to `max_rows` rows always fit. More either all fit, or `needed` exceeds the aligned rows."""
    ids = np.array(ids)
    whole, aligned = (align_groups(jnp.asarray(ids), 6, 4, max_rows=most, backend=backend) for most in (None, 5))
    A, has_group = aligned_rows(5, 6, 4), (ids >= 0) & (ids < 6)
    assert aligned.source_row.shape == (A,) and int(aligned.needed) == int(whole.needed)
    fits = int(aligned.needed) <= A
    assert int(aligned.overflow) == (not fits) and not int(whole.overflow)
    assert fits or has_group.sum() > 5
    at = np.asarray(aligned.aligned_row)[has_group]
    assert fits == bool((at < A).all())
    np.testing.assert_array_equal(np.asarray(aligned.source_row)[at[at < A]], np.flatnonzero(has_group)[at < A])


@pytest.mark.parametrize("backend", BACKENDS)
def test_scatter_and_back(backend):
    ids = jnp.array([2, 0, -1, 2, 1])
    x = jnp.arange(10.0).reshape(5, 2)
    aligned = align_groups(ids, 3, 4, backend=backend)
    padded = x.at[aligned.source_row].get(mode="fill", fill_value=0)
    back = padded.at[aligned.aligned_row].get(mode="fill", fill_value=0)
    np.testing.assert_array_equal(back, x * (ids >= 0)[:, None])


def test_choose_tile_m():
    assert choose_tile_m(8, 16, backend=Backend.REFERENCE) == 1
    assert choose_tile_m(128, 16, backend=Backend.REFERENCE) == 16
    assert choose_tile_m(100_000, 16, backend=Backend.REFERENCE) == 64
    assert choose_tile_m(8, 16, backend=Backend.MOSAIC) == 8
    assert choose_tile_m(100_000, 16, backend=Backend.MOSAIC) == 128


def test_bad_input():
    with pytest.raises(ValueError, match="float32"):
        align_groups(jnp.zeros(3), 2, 4)
    with pytest.raises(ValueError, match="0, 4, None"):
        align_groups(jnp.zeros(3, jnp.int32), 0, 4)
    with pytest.raises(ValueError, match="2, 4, 0"):
        align_groups(jnp.zeros(3, jnp.int32), 2, 4, max_rows=0)
    with pytest.raises(ValueError, match="0 and 2"):
        choose_tile_m(0, 2)
