import gc

import numpy as np

from dsv3.kv_cache.tiers.staging import Staging
from dsv3.kv_cache.tiers.value import ALIGNMENT


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_once_nobody_sees_it():
    staging = Staging()
    first = staging.rows(8, 1000)
    at, view = address(first), first[2].view(np.int32).reshape(2, -1)
    view[:] = 7
    del first
    gc.collect()
    second = staging.rows(8, 1000)
    assert address(second) != at, "a view of it is still there"
    second[:] = 1
    assert (view == 7).all()
    del view
    gc.collect()
    assert address(staging.rows(8, 1000)) == at


def test_rows_begin_at_a_memory_page_and_little_memory_is_kept():
    staging = Staging()
    many = [staging.rows(3, 5000) for _ in range(10)]
    assert all(array.shape == (3, 5000) and not address(array) % ALIGNMENT for array in many)
    assert len({address(array) for array in many}) == 10
    assert staging.rows(1, 0).shape == (1, 0)
    del many
    gc.collect()
    assert len(staging._free[15000]) == 4
