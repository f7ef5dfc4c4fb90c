import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from dsv3.checkpoint import identity
from dsv3.checkpoint.identity import known_identity, weights_identity


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (folder / name).write_bytes(np.random.default_rng(0).bytes(100_000))
    return folder


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_copy_elsewhere_and_later_is_the_same_model(directory: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    os.utime(copy / "a.safetensors", (1, 1))
    assert weights_identity(copy) == weights_identity(directory)


@pytest.mark.parametrize("at", [0, 50_000, 99_999])
def test_any_byte_of_a_small_model_counts(directory: Path, at: int):
    before = weights_identity(directory)
    _flip(directory / "b.safetensors", at)
    assert weights_identity(directory) != before


def test_of_a_large_model_headers_samples_and_sizes_count(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(identity, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity, "_STRIDE", 10_000)
    monkeypatch.setattr(identity, "_SAMPLE_BYTES", 100)
    path = directory / "a.safetensors"
    path.write_bytes((5000).to_bytes(8, "little") + path.read_bytes()[8:])
    before = weights_identity(directory)
    _flip(path, 15_000)
    assert weights_identity(directory) == before, "between two samples"
    for at in (4000, 20_050, 90_000):
        _flip(path, at)
        assert weights_identity(directory) != before
        _flip(path, at)
    path.write_bytes(path.read_bytes() + b"\0")
    assert weights_identity(directory) != before


def test_threads_find_what_one_finds(directory: Path, monkeypatch: pytest.MonkeyPatch):
    """Threads read what the page cache does not hold, several samples each."""
    monkeypatch.setattr(identity, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity, "_STRIDE", 500)
    monkeypatch.setattr(identity, "_SAMPLE_BYTES", 100)
    found = set()
    for cached in (True, False):
        monkeypatch.setattr(identity, "is_cached", lambda *_, cached=cached: cached)
        found.add(weights_identity(directory))
    assert len(found) == 1


def test_an_identity_is_found_once_until_a_file_changes(directory: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that starts needs it twice, and 671 GB have 160,000 samples."""
    found: list[str] = []
    monkeypatch.setattr(identity, "weights_identity", lambda path: found.append(weights_identity(path)) or found[-1])
    assert known_identity(directory) == known_identity(directory) == found[0] and len(found) == 1
    other = directory.parent / "other"
    other.write_bytes(np.random.default_rng(1).bytes(100_000))
    other.replace(directory / "a.safetensors")
    assert known_identity(directory) == found[1] != found[0]
