"""Tile selection: always a valid kernel, with fewer idle multiprocessors where widths allow."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm import plan as planning
from pallas_kernels.gemm.dispatch import kernel_of_plan
from pallas_kernels.gemm.narrow import SplitKernel
from pallas_kernels.gemm.plan import TilePlan, plan_contiguous, plan_dense
from pallas_kernels.gemm.schedule import Contiguous, ContiguousPairs, Dense, own_place
from pallas_kernels.gemm.shapes import DENSE_M, DENSE_NK
from pallas_kernels.mosaic import NUM_SMS


def kernel_of(plan, n, k, dtype=jnp.float8_e4m3fn):
    """Builds the kernel, which rejects tiles that do not fit shared memory or span three scales."""
    w = jax.ShapeDtypeStruct((1, n, k), dtype)
    return kernel_of_plan(plan, Dense(8, plan.tile_m, plan.splits), w, w, ((1, 8, n), jnp.bfloat16))


@settings(max_examples=80, deadline=None)
@given(m=st.integers(1, 9000), n=st.integers(1, 40000), k=st.integers(1, 20000))
def test_every_dense_product_has_a_kernel(m, n, k):
    plan = plan_dense(m, n, k, 1)
    assert kernel_of(plan, n, k).depth >= 2
    assert plan.wide or plan.tile_m >= min(m, 128)


def candidates(itemsize):
    """The plans of many rows, and the narrow ones."""
    return [*planning.dense_plans(8192, itemsize), *(TilePlan(False, tile, 128) for tile in planning.NARROW_TILES_M)]


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16])
def test_every_candidate_is_a_kernel(dtype):
    for plan in candidates(jnp.dtype(dtype).itemsize):
        assert kernel_of(plan, 4096, 7168, dtype).depth >= 2, plan


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16])
def test_shared_memory_slices_keep_the_alignment_of_tma(dtype):
    """128 bytes between stages and warpgroups; 1,024 where rows are swizzled. The interpreter does not check it."""
    for plan in candidates(jnp.dtype(dtype).itemsize):
        for name, buffer in kernel_of(plan, 4096, 7168, dtype).scratch().items():
            if name not in ("full", "second", "empty"):
                slice_bytes = math.prod(buffer.shape[1:]) * jnp.dtype(buffer.dtype).itemsize
                assert slice_bytes % (1024 if name in ("x_s", "w_s", "o_s") else 128) == 0, (plan, name)


def waves(plan, m, n):
    return math.ceil(math.ceil(m / plan.tile_m) * math.ceil(n / plan.tile_n) * plan.splits / NUM_SMS)


def test_few_rows_split_k_until_the_multiprocessors_are_busy():
    for n, k in DENSE_NK:
        plan = plan_dense(1, n, k, 1)
        tiles = math.ceil(n / plan.tile_n) * plan.splits
        assert not plan.wide and plan.tile_m == 8
        assert waves(plan, 1, n) == 1 or plan.splits == 1
        # If K is long enough to be split, most multiprocessors have work.
        assert tiles > NUM_SMS / 2 or k < 4096


@pytest.mark.parametrize(("n", "k"), [(256, 7168), (384, 7168), (160, 5120), (64, 2048)])
def test_the_routers_of_the_family_are_read_by_many_multiprocessors(n, k):
    """Few rows have only one to three column tiles, which alone would leave most memory bandwidth unused."""
    for m in (1, 33, 64, 130):
        plan = plan_dense(m, n, k, 2, float32=True)
        steps = k // 64
        busy = math.ceil(m / plan.tile_m) * math.ceil(n / plan.tile_n) * plan.splits
        assert NUM_SMS >= busy >= min(40, steps / 2), plan
        assert plan.splits <= steps, plan


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 20000), n=st.integers(1, 40000), k=st.integers(1, 20000), itemsize=st.sampled_from([1, 2]))
def test_a_float32_result_leaves_a_ring_of_stages(m, n, k, itemsize):
    plan = plan_dense(m, n, k, itemsize, float32=True)
    w = jax.ShapeDtypeStruct((1, n, k), jnp.bfloat16 if itemsize == 2 else jnp.float8_e4m3fn)
    out = ((plan.splits, n, m), jnp.float32)
    kernel = kernel_of_plan(plan, Dense(m, plan.tile_m, plan.splits), w, w, out, SplitKernel)
    assert kernel.depth >= 2
    assert plan.splits <= kernel.k_steps


def test_an_unaligned_width_wins_where_it_saves_a_wave():
    plan = plan_dense(256, 7168, 16384, 1)
    assert plan.tile_n == 112 and waves(plan, 256, 7168) == 1
    aligned = TilePlan(True, 128, 64)
    assert waves(aligned, 256, 7168) == 2


def test_a_tall_tile_wins_where_it_saves_a_wave():
    """512 tiles of 256 x 128 are four waves, 704 of 128 x 192 are six, the last of them a third full."""
    assert plan_dense(4096, 4096, 7168, 1).is_tall
    for m, itemsize, float32 in (
        (128, 1, False),
        (4096, 2, False),
        (4096, 1, True),
    ):  # one row tile, no FP8, float32
        assert not plan_dense(m, 4096, 7168, itemsize, float32=float32).is_tall


def test_grouped_plans_follow_the_layout():
    assert plan_contiguous(8192, 32, 4096, 7168, 1) == TilePlan(False, 32, 128)
    assert plan_contiguous(8192, 128, 4096, 7168, 2).wide
    with pytest.raises(ValueError, match="tile_m=48"):
        plan_contiguous(96, 48, 4096, 7168, 1)


def test_deepseek_shapes_have_plans():
    assert all(plan_dense(m, n, k, 1) for m in DENSE_M for n, k in DENSE_NK)


@pytest.mark.parametrize(("rows", "tile_m", "used"), [(1792, 128, 5), (1792, 128, 3), (3168, 16, 35)])
def test_empty_tiles_leave_no_multiprocessor_idle(rows, tile_m, used):
    """Decode over 144 and over 8 devices: of the whole capacity the first `used` tiles hold rows."""
    columns, schedule = 26, Contiguous(rows, tile_m)
    positions = jnp.arange(schedule.most_tiles(columns), dtype=jnp.int32)
    row, _ = jax.vmap(lambda p: plgpu.planar_snake(p, (rows // tile_m, columns), 0, schedule.panel))(positions)
    tiles = np.bincount(np.asarray(positions) % NUM_SMS, weights=np.asarray(row) < used, minlength=NUM_SMS)
    assert tiles.max() == math.ceil(used * columns / NUM_SMS)
    assert Contiguous(1 << 16, 128).panel > 1


COLUMNS = 2
"""Pairs of column tiles in the test below."""


@functools.cache
def places(tiles):
    """Returns the pair and the column of each position of a schedule over so many row tiles."""
    schedule = ContiguousPairs(128 * tiles, 128)
    positions = jnp.arange(schedule.most_tiles(COLUMNS), dtype=jnp.int32)
    return schedule, *jax.vmap(lambda position: schedule.place(position, COLUMNS))(positions)


@settings(max_examples=15, deadline=None)
@given(group=st.sampled_from([5, 6]).flatmap(lambda n: st.lists(st.integers(-1, 2), min_size=n, max_size=n)))
def test_pairs_cover_each_tile_once(group):
    """The blocks of a cluster share weights or activations, never both, and skip tiles without a group."""
    schedule, pair, column = places(len(group))
    first, second = (np.asarray(its) for its in schedule.groups(np.asarray(group), np.asarray(pair)))
    found = []
    row, at, shared = (np.asarray(v) for v in own_place(first == second, pair, column, np.arange(2)[:, None]))
    for position, one_group in enumerate(shared):
        its = np.where(row[:, position] == 2 * pair[position], first[position], second[position])
        assert its[0] == its[1]  # so both continue, or neither
        assert (at[0, position] == at[1, position]) == one_group and (row[0, position] == row[1, position]) != one_group
        found += zip(row[:, position], at[:, position], strict=True) if its[0] >= 0 else ()
    expected = [(row, column) for row, its in enumerate(group) if its >= 0 for column in range(2 * COLUMNS)]
    assert sorted(found) == expected
