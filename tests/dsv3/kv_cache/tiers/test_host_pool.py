"""The host pool: LRU blocks, damage, shared memory between processes, and staging buffers."""

import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.kv_cache.page_keys import ALIGNMENT, HEADER_BYTES, make_header, read_header
from dsv3.kv_cache.tiers import host_pool as host_pool_module
from dsv3.kv_cache.tiers.host_pool import HostPool, SharedMemory, Staging, blocks_within, host_pool_bytes

SIZE = 1000
BLOCKS = 4


def key(i: int) -> bytes:
    return i.to_bytes(32, "little")


def payload(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, SIZE, np.uint8)


def make(memory: np.ndarray | None = None) -> HostPool:
    memory = np.zeros(host_pool_bytes(BLOCKS, SIZE), np.uint8) if memory is None else memory
    return HostPool(memory, SIZE, BLOCKS)


def stores(host_pool: HostPool, i: int) -> bool:
    out = np.zeros(SIZE, np.uint8)
    found = host_pool.get(key(i), out)
    assert not found or np.array_equal(out, payload(i)), "the payload of another key"
    return found


@given(st.lists(st.tuples(st.sampled_from(("put", "get", "delete")), st.integers(0, 7)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_the_least_recently_used_page_is_evicted(actions: list[tuple[str, int]]):
    memory = np.zeros(host_pool_bytes(BLOCKS, SIZE), np.uint8)
    host_pool, model = make(memory), {}  # keys in the order of their use
    for action, i in actions:
        if action == "put":
            assert host_pool.put(key(i), payload(i)) == (i not in model)
            model.setdefault(i)
        elif action == "get":
            assert stores(host_pool, i) == (i in model)
            if i in model:
                model[i] = model.pop(i)
        else:
            host_pool.delete(key(i))
            model.pop(i, None)
        while len(model) > BLOCKS:
            model.pop(next(iter(model)))
        assert {j for j in range(8) if key(j) in host_pool} == set(model)
    found = make(memory)
    assert {j for j in range(8) if key(j) in found} == set(model), "recovered by a later process"
    assert all(stores(found, j) for j in model)


def test_any_damage_is_a_miss():
    memory = np.zeros(host_pool_bytes(BLOCKS, SIZE), np.uint8)
    host_pool = make(memory)
    host_pool.put(key(1), payload(1))
    for at in (3, 20, 70, ALIGNMENT + 17):  # magic, key, checksum, payload
        memory[_of_block(memory, at)] ^= 1
        assert not stores(host_pool, 1)
        assert key(1) not in host_pool
        assert host_pool.put(key(1), payload(1))
    assert host_pool.damaged == 4


def _of_block(memory: np.ndarray, at: int) -> int:
    """Returns the offset of byte `at` of the only page: in its header, or from `ALIGNMENT` on its payload."""
    block = int(memory[: BLOCKS * HEADER_BYTES].nonzero()[0].min()) // HEADER_BYTES
    if at < ALIGNMENT:
        return block * HEADER_BYTES + at
    return ALIGNMENT + block * ALIGNMENT + at - ALIGNMENT


def test_a_torn_write_is_not_recovered():
    memory = np.zeros(host_pool_bytes(BLOCKS, SIZE), np.uint8)
    make(memory).put(key(1), payload(1))
    memory[_of_block(memory, 40)] ^= 1
    assert len(make(memory)) == 0


def test_a_block_that_is_read_is_not_overwritten():
    host_pool = make()
    for i in range(BLOCKS):
        host_pool.put(key(i), payload(i))
    wrong: list[int] = []

    def read() -> None:
        for turn in range(300):
            stores(host_pool, turn % BLOCKS)

    def write() -> None:
        for i in range(BLOCKS, BLOCKS + 100):
            host_pool.put(key(i), payload(i))
            host_pool.delete(key(i - 2))

    def guarded(work) -> None:
        try:
            work()
        except AssertionError:
            wrong.append(1)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (read, read, write, write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(host_pool) + len(host_pool._free) == BLOCKS and not host_pool._retired


def test_size_and_number_of_blocks_agree():
    for size in (0, 4095, 5000, 10**6):
        blocks = blocks_within(size, SIZE)
        assert host_pool_bytes(blocks, SIZE) <= max(size, 0) or blocks == 0
    assert blocks_within(host_pool_bytes(10, SIZE), SIZE) >= 9


def test_a_header_of_another_version_or_size_is_rejected():
    raw = make_header(key(1), payload(1)).pack()
    assert len(raw) == HEADER_BYTES and read_header(raw) is not None
    assert read_header(raw[:8] + b"\x02" + raw[9:]) is None
    assert read_header(raw[:50]) is None


def test_shared_memory_is_reused_after_and_never_during_its_use(tmp_path: Path):
    first = SharedMemory("a", 8192, tmp_path)
    first.array[5] = 7
    second = SharedMemory("a", 8192, tmp_path)
    assert second.path != first.path and not second.array.any()
    first.close()
    again = SharedMemory("a", 8192, tmp_path)
    assert again.path == first.path and again.array[5] == 7
    again.close()
    assert not SharedMemory("a", 4096, tmp_path).array.any(), "another size starts empty"


def test_memory_of_an_ended_engine_is_removed(tmp_path: Path):
    running, ended = SharedMemory("a", 8192, tmp_path), SharedMemory("b", 8192, tmp_path)
    ended.close()
    SharedMemory("c", 8192, tmp_path)
    assert running.path.exists() and not ended.path.exists()


def test_names_that_are_no_files_are_passed_over(tmp_path: Path):
    """Any user of the host can take a name in the shared folder."""
    names = [f"dsv3-kv-{os.getuid()}-a-{i}" for i in range(3)]
    (tmp_path / names[0]).symlink_to(tmp_path / "elsewhere")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(tmp_path / names[1]))
        assert SharedMemory("a", 8192, tmp_path).path.name == names[2]
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_took_the_name_of_a_removed_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ended = SharedMemory("b", 8192, tmp_path)
    ended.close()
    lock = host_pool_module._lock

    def replaced_before_the_lock(descriptor: int) -> bool:
        if os.path.samestat(os.fstat(descriptor), os.stat(ended.path)):
            ended.path.unlink()
            ended.path.write_bytes(b"new")
        return lock(descriptor)

    monkeypatch.setattr(host_pool_module, "_lock", replaced_before_the_lock)
    SharedMemory("c", 8192, tmp_path)
    assert ended.path.read_bytes() == b"new"


def test_too_little_memory_is_an_error_at_the_start(tmp_path: Path):
    with pytest.raises(MemoryError, match=r"kv_offloading_size: .* left; lower it"):
        SharedMemory("a", 2**50, tmp_path)
    assert not list(tmp_path.iterdir())


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_staging_buffer_is_reused_once_no_array_refers_to_it():
    staging = Staging()
    first = staging.rows(8, 1000)
    at, view = address(first), first[2].view(np.int32).reshape(2, -1)
    view[:] = 7
    del first
    second = staging.rows(8, 1000)
    assert address(second) != at, "a view of it is still there"
    second[:] = 1
    assert (view == 7).all()
    del view
    assert address(staging.rows(8, 1000)) == at


def test_staging_rows_are_page_aligned_and_few_buffers_are_kept():
    staging = Staging()
    many = [staging.rows(3, 5000) for _ in range(10)]
    assert all(array.shape == (3, 5000) and not address(array) % ALIGNMENT for array in many)
    assert len({address(array) for array in many}) == 10
    assert staging.rows(1, 0).shape == (1, 0)
    del many
    assert len(staging._free[15000]) == 4
