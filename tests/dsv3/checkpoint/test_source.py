"""Direct and cached reads give the same bytes, at any address, on any file system."""

import errno
import os
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dsv3.checkpoint import load, source
from dsv3.checkpoint.layout import extents, whole_slice
from dsv3.checkpoint.load_plan import LoadPlan, PlannedArray
from dsv3.checkpoint.reader import CheckpointReader, PendingReads, aligned_empty, group_reads
from dsv3.checkpoint.safetensors_file import CheckpointError, Tensor
from dsv3.checkpoint.source import ALIGNMENT, Buffers, Source

CONTENT = np.random.default_rng(0).integers(0, 256, 5 * ALIGNMENT + 77, np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT.tobytes())
    return tmp_path / "file"


@pytest.fixture(params=["past the cache", "from the cache"])
def opened(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    cached = request.param == "from the cache"
    monkeypatch.setattr(source, "is_cached", lambda *_: cached)
    file = Source(path, Buffers(ALIGNMENT))
    if not cached and not file.is_direct:
        pytest.skip("this file system has no direct reads")
    yield file
    file.close()


@pytest.mark.parametrize(
    ("start", "size"), [(0, 2 * ALIGNMENT), (ALIGNMENT, ALIGNMENT), (1, 3), (4090, 5000), (4096, 5), (8191, 2), (0, 0)]
)
def test_any_bytes_at_any_address(opened: Source, start: int, size: int) -> None:
    for address in (0, 1):
        out = aligned_empty((size + 1,), CONTENT.dtype)[address : address + size]
        assert opened.read(start, out) == size
        np.testing.assert_array_equal(out, CONTENT[start : start + size])


@pytest.mark.parametrize("start", [4 * ALIGNMENT, 5 * ALIGNMENT + 70, 6 * ALIGNMENT, 9 * ALIGNMENT])
def test_reads_beyond_the_end_of_a_file(opened: Source, start: int) -> None:
    for size in (2 * ALIGNMENT, 100):
        out = np.zeros(size, np.uint8)
        there = CONTENT[start : start + size]
        assert opened.read(start, out) == len(there)
        np.testing.assert_array_equal(out[: len(there)], there)


def test_a_file_that_is_truncated(opened: Source, path: Path) -> None:
    os.truncate(path, ALIGNMENT + 10)
    assert opened.read(100, np.zeros(2 * ALIGNMENT, np.uint8)) == ALIGNMENT - 90


@pytest.mark.parametrize("refuses", ["open", "preadv"])
def test_a_file_system_without_direct_reads(path: Path, refuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some fail to open such a file, some to read it."""
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("this system has no direct reads")
    monkeypatch.setattr(source, "is_cached", lambda *_: False)
    real, direct = getattr(os, refuses), set()

    def refusing(first, *args):
        if (refuses == "open" and args[0] & os.O_DIRECT) or first in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(first, *args)

    monkeypatch.setattr(source.os, refuses, refusing)
    file, out = Source(path, Buffers(ALIGNMENT)), np.zeros(300, np.uint8)
    direct.add(file._direct)
    assert file.is_direct == (refuses == "preadv")
    assert file.read(200, out) == 300
    np.testing.assert_array_equal(out, CONTENT[200:500])
    file.close()


def test_other_disk_errors_are_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Source(path, Buffers(ALIGNMENT))

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(source.os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output error"):
        file.read(0, np.zeros(10, np.uint8))
    file.close()


def test_what_was_just_written_is_in_the_cache(path: Path) -> None:
    """If the file system reports it; a load after a restart then needs no disk."""
    with path.open("rb") as file:
        assert source.is_cached(file.fileno(), len(CONTENT)) in (True, False)
        if not source._is_in_memory(os.fstat(file.fileno()).st_dev):
            assert not source.is_cached(file.fileno(), 100 * len(CONTENT)), "absent bytes are not cached"


@pytest.mark.parametrize(("kind", "known"), [("tmpfs", True), ("nfs4", False)])
def test_files_on_tmpfs_count_as_cached(path, monkeypatch, kind, known) -> None:
    """tmpfs does not report it, and would accept direct reads, with a useless copy."""
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("this system does not report what is cached")

    def silent(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with path.open("rb") as file:
        device = os.fstat(file.fileno()).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        mounts = f"25 30 0:5 / /a rw - tmpfs none rw\n26 30 {number} / /b rw shared:2 - {kind} none rw\n"
        monkeypatch.setattr(Path, "read_text", lambda _: mounts)
        monkeypatch.setattr(source.os, "preadv", silent)
        assert source.is_cached(file.fileno(), len(CONTENT)) == known


def test_blocks_that_several_boxes_need_are_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards by columns need the same blocks of the file; shards by rows need different ones."""
    tensor = Tensor("t", path, CONTENT.dtype, (4, 64), 77)
    array = PlannedArray("t", (4, 64), CONTENT.dtype, (whole_slice("t", (4, 64)),), {"t": tensor})
    columns = [(slice(0, 4), slice(0, 32)), (slice(0, 4), slice(32, 64))]
    rows = [(slice(0, 2), slice(0, 64)), (slice(2, 4), slice(0, 64))]
    monkeypatch.setattr("dsv3.checkpoint.reader.BLOCK_BYTES", 128)
    assert group_reads(array, columns, limit=256) == [columns]
    assert group_reads(array, columns, limit=255) == [[box] for box in columns]
    assert group_reads(array, rows, limit=256) == [[box] for box in rows]
    assert [len(group) for group in group_reads(array, [rows[0], rows[1], columns[0]], limit=999)] == [3]
    wanted, read = [(box, np.zeros(extents(box), np.uint8)) for box in columns], []
    with CheckpointReader(2) as reader:
        reader.open([path])
        real = reader._read
        monkeypatch.setattr(reader, "_read", lambda *args: read.append(args[1]) or real(*args))
        reader.read(array, wanted, lambda _: None)
    assert sorted(read) == [0, 128]
    for box, out in wanted:
        np.testing.assert_array_equal(out, CONTENT[77 : 77 + 256].reshape(4, 64)[box])


@pytest.mark.parametrize(("ahead", "most"), [(0, 1), (32, 2), (1 << 20, 4)])
def test_arrays_are_read_ahead(path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, most: int) -> None:
    """Four arrays of 16 bytes: as many are in flight as fit `AHEAD_BYTES`, and they arrive in order."""
    tensors = {name: Tensor(name, path, CONTENT.dtype, (16,), 16 * i) for i, name in enumerate("abcd")}
    leaves = {n: (PlannedArray(n, (16,), CONTENT.dtype, (whole_slice(n, (16,)),), tensors),) for n in tensors}
    in_flight, seen = set(), []

    def start_read(reader: CheckpointReader, array: PlannedArray, *args) -> PendingReads:
        in_flight.add(array.name)
        seen.append(len(in_flight))
        reads = real(reader, array, *args)
        monkeypatch.setattr(reads, "wait", lambda: (PendingReads.wait(reads), in_flight.discard(array.name)))
        return reads

    real = CheckpointReader.start_read
    monkeypatch.setattr(CheckpointReader, "start_read", start_read)
    monkeypatch.setattr(load, "AHEAD_BYTES", ahead)
    values = list(load.read_leaves(LoadPlan(path.parent, leaves), {}, progress=False))
    assert max(seen) == most
    for i, (_, value) in enumerate(values):
        np.testing.assert_array_equal(value, CONTENT[16 * i : 16 * (i + 1)])


class OnDevice:
    """An array of which each read makes another copy in host memory; counts those made, and the most at once."""

    made = live = most = 0

    def __init__(self, values: np.ndarray) -> None:
        self._values, self.shape, self.dtype = values, values.shape, values.dtype

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        copied = self._values.copy()
        weakref.finalize(copied, self._count, -1)
        self._count(1)
        return copied

    @classmethod
    def _count(cls, change: int) -> None:
        cls.live += change
        cls.made, cls.most = cls.made + (change > 0), max(cls.most, cls.live)


def test_arrays_come_to_host_memory_one_by_one_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer has them on its devices. One that has been deleted since is refused before a leaf is replaced."""
    monkeypatch.setattr("dsv3.checkpoint.reader.BLOCK_BYTES", 128)
    values = {name: CONTENT[i : i + 512].reshape(8, 64) for i, name in enumerate("abc")}
    tensors = {name: Tensor(name, Path(name), CONTENT.dtype, (8, 64), 0) for name in values}
    leaves = {n: (PlannedArray(n, (8, 64), CONTENT.dtype, (whole_slice(n, (8, 64)),), tensors),) for n in values}
    arrays: dict[Path, Any] = {Path(name): OnDevice(array) for name, array in values.items()}
    equal = ((tensors["a"], tensors["a"]),)
    plan = LoadPlan(Path(), leaves, equal, arrays=arrays)
    for name, value in load.read_leaves(plan, {}, progress=False, threads=1):
        np.testing.assert_array_equal(value, values[name])
    assert (OnDevice.made, OnDevice.live, OnDevice.most) == (4, 0, 1)  # "a" is compared first
    arrays[Path("c")] = jax.device_put(values["c"])
    arrays[Path("c")].delete()
    with pytest.raises(CheckpointError, match="has been deleted"):
        next(load.read_leaves(plan, {}, progress=False, threads=1))
    assert OnDevice.made == 5
