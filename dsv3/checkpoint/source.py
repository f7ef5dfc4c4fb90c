"""An open checkpoint file: cached files are read from the page cache, all others by direct I/O.

A direct read avoids the kernel's copy, and evicts no other files from the cache. It needs offsets, lengths and
addresses in multiples of 4,096 bytes. If the destination is not aligned, the bytes pass through a buffer: one per
reading thread, as large as its largest read, kept for the whole load.
"""

import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np

ALIGNMENT = 4096
"""Bytes: the largest common block size of disks."""
_PROBES = 8
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)  # from file systems that open files for direct reads, but fail them


class Buffers:
    """Aligned scratch buffers, one per thread, of at least `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes + 2 * ALIGNMENT
        self._local = threading.local()

    def own(self, nbytes: int) -> np.ndarray:
        """Returns the calling thread's buffer, uint8, of `nbytes` at an address divisible by `ALIGNMENT`."""
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or buffer.size < nbytes:
            pages = mmap.mmap(-1, max(nbytes, self._nbytes))
            buffer = self._local.buffer = np.frombuffer(pages, np.uint8)
        return buffer[:nbytes]


class Source:
    """One open file. `read` may be called by several threads."""

    def __init__(self, path: Path, buffers: Buffers) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._file).st_size
        self._buffers = buffers
        self._direct = None if is_cached(self._file, self._size) else _open_direct(path)

    @property
    def is_direct(self) -> bool:
        return self._direct is not None

    def close(self) -> None:
        for descriptor in (self._file, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def hold(self) -> None:
        """Does nothing: a file's bytes are not kept."""

    def release(self) -> None:
        """Does nothing, as `hold`."""

    def read(self, start: int, out: np.ndarray) -> int:
        """Fills `out`, uint8 [n], from byte `start` on; returns the number of bytes read. Raises OSError."""
        if self._direct is not None:
            try:
                return self._read_direct(self._direct, start, out)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
        return _read_all(self._file, start, out)

    def _read_direct(self, descriptor: int, start: int, out: np.ndarray) -> int:
        end = min(start + out.size, self._size)
        fits = start % ALIGNMENT == 0 and out.ctypes.data % ALIGNMENT == 0
        if fits and out.size % ALIGNMENT == 0:
            return _read_all(descriptor, start, out)
        first = start // ALIGNMENT * ALIGNMENT
        buffer = self._buffers.own(-(-(start + out.size - first) // ALIGNMENT) * ALIGNMENT)
        wanted = slice(start - first, max(start, end) - first)
        if _read_all(descriptor, first, buffer, least=wanted.stop) < wanted.stop:
            return _read_all(self._file, start, out)  # the file was truncated: the buffered read reports it
        out[: wanted.stop - wanted.start] = buffer[wanted]
        return wanted.stop - wanted.start


def _read_all(descriptor: int, start: int, out: np.ndarray, least: int | None = None) -> int:
    """Reads until `out` is full, or has `least` bytes, or the file ends; returns how many bytes were read."""
    done, view = 0, memoryview(out)
    while done < (len(view) if least is None else least):
        if not (n := os.preadv(descriptor, [view[done:]], start + done)):
            break
        done += n
    return done


def _open_direct(path: Path) -> int | None:
    """Opens a file for direct reads; None if file system or platform does not support them."""
    if not hasattr(os, "O_DIRECT"):  # macOS
        return None
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None


def is_cached(descriptor: int, size: int) -> bool:
    """Returns whether a file is in memory: in the page cache, by probes of a few bytes, or on tmpfs.

    Returns False on platforms other than Linux.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    offsets = range(0, max(size, 1), max(1, size // _PROBES))
    try:
        return all(os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) for offset in offsets if offset < size)
    except OSError as error:  # EAGAIN: not cached; EOPNOTSUPP: unknown
        return error.errno == errno.EOPNOTSUPP and _is_in_memory(os.fstat(descriptor).st_dev)


def _is_in_memory(device: int) -> bool:
    """Returns whether a device is a tmpfs, which accepts direct reads but does not profit from them."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    return any(mount.split()[2] == number and mount.partition(" - ")[2].startswith("tmpfs ") for mount in mounts)
