"""Memory of the host that outlives the process: files in shared memory, one per engine, locked while it runs."""

import errno
import fcntl
import logging
import mmap
import os
import stat
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_MOST_ENGINES = 64  # of one model on a host
_ZEROS = 2**20  # bytes per write
_log = logging.getLogger(__name__)


class SharedMemory:
    """`size` bytes that a later process finds again under `name`, unless another one has them locked.

    Memory that engines of other names have left behind is given back first. Raises MemoryError where the host has too
    little.
    """

    def __init__(self, name: str, size: int, folder: Path | None = None) -> None:
        folder = folder or FOLDER
        prefix = f"dsv3-kv-{os.getuid()}-"
        _remove_others(folder, prefix, f"{prefix}{name}-")
        self.path, descriptor = _lock_one(folder, f"{prefix}{name}-", size)
        _reserve(self.path, descriptor, size)
        self.array = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        self.close = weakref.finalize(self, _release, descriptor)
        """Lets another process have the memory, with what it holds; `array` stays readable."""


def _release(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # the map holds a copy of the descriptor
    os.close(descriptor)


def _lock_one(folder: Path, prefix: str, size: int) -> tuple[Path, int]:
    """Returns the first file of this name that no process holds, emptied if it has another size."""
    for i in range(_MOST_ENGINES):
        path = folder / f"{prefix}{i}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except (PermissionError, IsADirectoryError):
            continue
        if _is_mine(descriptor) and _lock(descriptor) and _is_at(path, descriptor):
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, 0)
            return path, descriptor
        os.close(descriptor)
    raise MemoryError(f"{folder} has {_MOST_ENGINES} files {prefix}* that are in use or belong to others")


def _reserve(path: Path, descriptor: int, size: int) -> None:
    """Takes the memory now: without it the first write to a full file system would end the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:  # macOS: what is there keeps its content, the rest is written
            _fill(descriptor, os.fstat(descriptor).st_size, size)
    except OSError as error:
        os.unlink(path)
        os.close(descriptor)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
        raise MemoryError(
            f"kv_offloading_size: {size / 2**30:.3g} GiB do not fit {path.parent}, which has {free / 2**30:.3g} GiB "
            "left; lower it, or give the container more shared memory (docker run --shm-size)"
        ) from None


def _fill(descriptor: int, start: int, size: int) -> None:
    """Writes zeros from `start` to `size`."""
    zeros = bytes(min(_ZEROS, max(0, size - start)))
    while start < size:
        start += os.pwrite(descriptor, zeros[: size - start], start)


def _remove_others(folder: Path, prefix: str, own: str) -> None:
    """Removes files that ended engines of other models have left; memory of a running one is locked."""
    for path in _files(folder, prefix):
        if path.name.startswith(own):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        if _is_mine(descriptor) and _lock(descriptor):
            _log.info("giving back the memory of an ended engine: %s", path)
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _files(folder: Path, prefix: str) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        yield from [Path(entry.path) for entry in entries if entry.name.startswith(prefix)]


def _is_mine(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode)


def _is_at(path: Path, descriptor: int) -> bool:
    """Returns whether the file is still the one of that name: another process may have removed it before the lock."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
