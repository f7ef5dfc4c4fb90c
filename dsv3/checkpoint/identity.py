"""Computes an identity of the weights of a checkpoint directory from their content, not from path or time."""

import functools
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dsv3.checkpoint.source import is_cached
from dsv3.files import open_regular

_WHOLE_BYTES = 2**28  # directories of up to this size are hashed completely
_STRIDE = 2**22
_SAMPLE_BYTES = 2**12
_READ_BYTES = 2**24
_THREADS = 16  # 671 GB have 160,000 samples, and one thread would wait for the disk at each of them
_AT_ONCE = 32  # samples per task; one sample per task took four times the processor time


_Range = tuple[int, int]
"""Offset and length."""


def known_identity(directory: Path) -> str:
    """Returns `weights_identity`, cached per process while stat shows the same files."""
    return _identity_of(directory, file_states(directory))


@functools.lru_cache(maxsize=4)
def _identity_of(directory: Path, states: tuple[tuple[int, ...], ...]) -> str:
    return weights_identity(directory)


def file_states(directory: Path) -> tuple[tuple[int, ...], ...]:
    """Returns what stat shows of the weight files of a directory and of their index: it differs where one changes."""
    found = [path.stat() for path in sorted(directory.glob("*.safetensors*"))]
    return tuple((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found)


def weights_identity(directory: Path) -> str:
    """Returns the sha256, in hex, of the weight files of a directory.

    Up to 256 MiB all bytes are hashed. Of a larger directory, 4 KiB of each 4 MiB and the header of each file are
    hashed: further training changes nearly every byte, but an edit of single rows can go undetected. Raises OSError for
    unreadable files.
    """
    total = hashlib.sha256()
    paths = sorted(directory.glob("*.safetensors"))
    sizes = [path.stat().st_size for path in paths]
    is_small = sum(sizes) <= _WHOLE_BYTES
    with ThreadPoolExecutor(_THREADS) as pool:
        for path, size in zip(paths, sizes, strict=True):
            total.update(f"{path.name}\0{size}\0".encode())
            with open_regular(path) as file:
                ranges = itertools.batched(_ranges(file.fileno(), size, is_small), 1 if is_small else _AT_ONCE)
                # Cached reads would only contend for the GIL.
                each = map if is_cached(file.fileno(), size) else pool.map
                for part in each(functools.partial(_read, file.fileno()), ranges):
                    total.update(part)
    return total.hexdigest()


def _ranges(descriptor: int, size: int, is_small: bool) -> Iterator[_Range]:
    """Yields the ranges of a file to hash."""
    if is_small:
        yield from ((start, _READ_BYTES) for start in range(0, max(1, size), _READ_BYTES))
        return
    header = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
    yield 0, min(header, _READ_BYTES)
    yield from ((start, _SAMPLE_BYTES) for start in range(0, size, _STRIDE))


def _read(descriptor: int, ranges: Sequence[_Range]) -> bytes:
    return b"".join(os.pread(descriptor, length, start) for start, length in ranges)
