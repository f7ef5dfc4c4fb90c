"""Files read past the page cache or through it: the same bytes, at any address, on any file system."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from dsv3.checkpoint import load, source
from dsv3.checkpoint.fill import Files, Filling, aligned_empty, read_together
from dsv3.checkpoint.layout import extents, whole_piece
from dsv3.checkpoint.load_plan import Array, LoadPlan
from dsv3.checkpoint.safetensors_file import Tensor
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
def test_the_end_of_a_file_comes_early(opened: Source, start: int) -> None:
    for size in (2 * ALIGNMENT, 100):
        out = np.zeros(size, np.uint8)
        there = CONTENT[start : start + size]
        assert opened.read(start, out) == len(there)
        np.testing.assert_array_equal(out[: len(there)], there)


def test_a_file_that_has_become_shorter(opened: Source, path: Path) -> None:
    os.truncate(path, ALIGNMENT + 10)
    assert opened.read(100, np.zeros(2 * ALIGNMENT, np.uint8)) == ALIGNMENT - 90


@pytest.mark.parametrize("refuses", ["open", "preadv"])
def test_a_file_system_without_direct_reads(path: Path, refuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some refuse to open such a file, some to read it."""
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


def test_another_error_of_the_disk_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Source(path, Buffers(ALIGNMENT))

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(source.os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output error"):
        file.read(0, np.zeros(10, np.uint8))
    file.close()


def test_what_was_just_written_is_in_the_cache(path: Path) -> None:
    """Where the file system can say so; a load after a restart then takes no disk's time."""
    with path.open("rb") as file:
        assert source.is_cached(file.fileno(), len(CONTENT)) in (True, False)
        if not source._is_in_memory(os.fstat(file.fileno()).st_dev):
            assert not source.is_cached(file.fileno(), 100 * len(CONTENT)), "what is not there is not cached"


@pytest.mark.parametrize(("kind", "known"), [("tmpfs", True), ("nfs4", False)])
def test_a_file_system_of_memory_holds_its_files_though_it_does_not_say_so(path, monkeypatch, kind, known) -> None:
    """It would also take direct reads, with a copy that nobody needs."""
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("this system does not say what is cached")

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
    """Columns, as devices of a rank take them, need the same rows of the file; other rows need others."""
    tensor = Tensor("t", path, CONTENT.dtype, (4, 64), 77)
    array = Array("t", (4, 64), CONTENT.dtype, (whole_piece("t", (4, 64)),), {"t": tensor})
    columns = [(slice(0, 4), slice(0, 32)), (slice(0, 4), slice(32, 64))]
    rows = [(slice(0, 2), slice(0, 64)), (slice(2, 4), slice(0, 64))]
    monkeypatch.setattr("dsv3.checkpoint.fill.BLOCK_BYTES", 128)
    assert read_together(array, columns, limit=256) == [columns]
    assert read_together(array, columns, limit=255) == [[box] for box in columns]
    assert read_together(array, rows, limit=256) == [[box] for box in rows]
    assert [len(group) for group in read_together(array, [rows[0], rows[1], columns[0]], limit=999)] == [3]
    wanted, read = [(box, np.zeros(extents(box), np.uint8)) for box in columns], []
    with Files(2) as files:
        files.open([path])
        real = files._read
        monkeypatch.setattr(files, "_read", lambda *args: read.append(args[1]) or real(*args))
        files.fill(array, wanted, lambda _: None)
    assert sorted(read) == [0, 128]
    for box, out in wanted:
        np.testing.assert_array_equal(out, CONTENT[77 : 77 + 256].reshape(4, 64)[box])


@pytest.mark.parametrize(("ahead", "most"), [(0, 1), (32, 2), (1 << 20, 4)])
def test_arrays_are_read_ahead_of_the_one_that_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, most: int
) -> None:
    """Four arrays of 16 bytes: as many are under way at once as fit `AHEAD_BYTES`, and they come in order."""
    tensors = {name: Tensor(name, path, CONTENT.dtype, (16,), 16 * i) for i, name in enumerate("abcd")}
    leaves = {n: (Array(n, (16,), CONTENT.dtype, (whole_piece(n, (16,)),), tensors),) for n in tensors}
    under_way, seen = set(), []

    def start(files: Files, array: Array, *args) -> Filling:
        under_way.add(array.name)
        seen.append(len(under_way))
        filling = real(files, array, *args)
        monkeypatch.setattr(filling, "wait", lambda: (Filling.wait(filling), under_way.discard(array.name)))
        return filling

    real = Files.start
    monkeypatch.setattr(Files, "start", start)
    monkeypatch.setattr(load, "AHEAD_BYTES", ahead)
    values = load.read_leaves(LoadPlan(path.parent, leaves), {}, progress=False)
    assert max(seen) == most
    for i, value in enumerate(values):
        np.testing.assert_array_equal(value, CONTENT[16 * i : 16 * (i + 1)])
