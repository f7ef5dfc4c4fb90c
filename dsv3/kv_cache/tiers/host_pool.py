"""The host pool: page payloads in host memory, shared memory that outlives the process, and staging buffers.

A pool has blocks of one size, found by key, the least recently used one evicted first. Any thread may call. Bytes are
copied without the lock. A block's header is written after its payload, so a process that recovers the memory after a
`kill -9` finds whole payloads or none; a torn one does not verify.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import tempfile
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dsv3.kv_cache.events import EventSource
from dsv3.kv_cache.page_keys import HEADER_BYTES, Key, aligned, make_header, read_header

FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_MAX_ENGINES = 64  # of one model on a host
_ZEROS = 2**20  # bytes per write
_KEPT = 4  # buffers of each size
_NOT_MINE = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO}  # no file, or another user's
_log = logging.getLogger(__name__)

PayloadAddress = tuple[int, int]
"""Addresses of a page in its process: of the header, and of the payload."""


def host_pool_bytes(num_blocks: int, payload_bytes: int) -> int:
    """Returns the memory of a host pool: its headers, then its blocks."""
    return aligned(num_blocks * HEADER_BYTES) + num_blocks * aligned(payload_bytes)


def blocks_within(size: int, payload_bytes: int) -> int:
    """Returns how many payloads a host pool of `size` bytes holds."""
    return max(0, size - aligned(1)) // (aligned(payload_bytes) + HEADER_BYTES)


class HostPool:
    """Payloads of `payload_bytes` bytes in `memory`, uint8 `[host_pool_bytes(num_blocks, payload_bytes)]`.

    Recovers the pages that the memory already holds, where headers are whole. `events` receives stored and removed
    pages.
    """

    def __init__(
        self, memory: np.ndarray, payload_bytes: int, num_blocks: int, events: EventSource | None = None
    ) -> None:
        self._events = events
        start = aligned(num_blocks * HEADER_BYTES)
        self.memory = memory
        self.payload_bytes, self.num_blocks = payload_bytes, num_blocks
        self._headers = memory[: num_blocks * HEADER_BYTES].reshape(num_blocks, HEADER_BYTES)
        self._blocks = memory[start : start + num_blocks * aligned(payload_bytes)].reshape(num_blocks, -1)[
            :, :payload_bytes
        ]
        self._lock = threading.Condition()  # notified of new pages
        self._block_of: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._readers: Counter[int] = Counter()  # by block
        self._retired: set[int] = set()  # blocks without a key that are still being read
        self._free: list[int] = []
        self._written = 0
        self.evictions = self.damaged = 0
        self._recover()

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._block_of

    def put(self, key: Key, payload: np.ndarray) -> bool:
        """Stores a payload, uint8 `[payload_bytes]`; False where it is stored already or every block is being read."""
        with self._lock:
            block = None if key in self._block_of else self._allocate_block()
            if block is None:
                return False
            self._written += 1
            order = self._written
        self._blocks[block] = payload
        self._headers[block] = np.frombuffer(make_header(key, payload, order).pack(), np.uint8)
        with self._lock:
            is_stored = key not in self._block_of  # another thread may have been faster
            if is_stored:
                self._block_of[key] = block
                self._publish_stored([key])
                self._lock.notify_all()
            else:
                self._free_block(block)
        return is_stored

    def wait_for(self, key: Key, seconds: float) -> bool:
        """Returns whether a page is stored now or within `seconds`."""
        with self._lock:
            return self._lock.wait_for(lambda: key in self._block_of, seconds)

    def address_of(self, key: Key) -> PayloadAddress | None:
        """Returns the addresses of a page; None where it is not stored. It may be overwritten at any time."""
        with self._lock:
            block = self._block_of.get(key)
            if block is None:
                return None
            self._block_of.move_to_end(key)
        return self._headers[block].ctypes.data, self._blocks[block].ctypes.data

    def get(self, key: Key, out: np.ndarray) -> bool:
        """Copies a payload to `out`, uint8 `[payload_bytes]`; False where none is stored that verifies."""
        with self._lock:
            block = self._block_of.get(key)
            if block is None:
                return False
            self._block_of.move_to_end(key)
            self._readers[block] += 1
        out[:] = self._blocks[block]
        header = read_header(self._headers[block].tobytes())
        intact = header is not None and header.covers(key, out)
        with self._lock:
            self._readers[block] -= 1
            if not intact:
                self.damaged += 1
                self._retire(key, block)
            self._reclaim(block)
        return intact

    def delete(self, key: Key) -> None:
        with self._lock:
            if (block := self._block_of.get(key)) is not None:
                self._retire(key, block)
                self._reclaim(block)

    def clear(self) -> None:
        for key in list(self._block_of):
            self.delete(key)

    def _allocate_block(self) -> int | None:
        """Returns a free block, else evicts the least recently used page; None where all are being read."""
        if self._free:
            return self._free.pop()
        found = next(((key, block) for key, block in self._block_of.items() if not self._readers[block]), None)
        if found is None:
            return None
        key, block = found
        self._remove(key)
        self._headers[block] = 0
        self.evictions += 1
        return block

    def _retire(self, key: Key, block: int) -> None:
        if self._block_of.get(key) == block:
            self._remove(key)
            self._retired.add(block)

    def _remove(self, key: Key) -> None:
        del self._block_of[key]
        if self._events is not None:
            self._events.removed([key])

    def _publish_stored(self, keys: list[Key]) -> None:
        if self._events is not None and keys:
            self._events.stored(keys)

    def _reclaim(self, block: int) -> None:
        """Frees a retired block that is no longer read."""
        if block in self._retired and not self._readers[block]:
            self._retired.remove(block)
            self._free_block(block)

    def _free_block(self, block: int) -> None:
        self._headers[block] = 0
        self._free.append(block)

    def _recover(self) -> None:
        """Recovers the pages that whole headers name, in the order in which they were written."""
        found = {}
        for block, raw in enumerate(self._headers):
            header = read_header(raw.tobytes()) if raw.any() else None
            if header is not None and header.length == self.payload_bytes:
                found[block] = header
        for block, header in sorted(found.items(), key=lambda item: item[1].order):
            self._block_of[header.key] = block
        kept = set(self._block_of.values())
        self._free = [block for block in reversed(range(self.num_blocks)) if block not in kept]
        self._written = max((header.order for header in found.values()), default=0)
        self._publish_stored(list(self._block_of))


class SharedMemory:
    """`size` bytes that a later process finds again under `name`, unless another one has them locked.

    Frees memory that engines of other names have left behind first. Raises MemoryError where the host has too little.
    """

    def __init__(self, name: str, size: int, folder: Path | None = None) -> None:
        folder = folder or FOLDER
        prefix = f"dsv3-kv-{os.getuid()}-"
        _remove_others(folder, prefix, f"{prefix}{name}-")
        self.path, descriptor = _lock_one(folder, f"{prefix}{name}-", size)
        _reserve(self.path, descriptor, size)
        self.array = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        self.close = weakref.finalize(self, _release, descriptor)
        """Unlocks the memory for another process, with its content; `array` stays readable."""


def _release(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # the map holds a copy of the descriptor
    os.close(descriptor)


def _lock_one(folder: Path, prefix: str, size: int) -> tuple[Path, int]:
    """Locks the first file of this name that no process has locked; truncates it if it has another size."""
    for i in range(_MAX_ENGINES):
        path = folder / f"{prefix}{i}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in _NOT_MINE:
                continue
            raise
        if _is_mine(descriptor) and _lock(descriptor) and _is_at(path, descriptor):
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, 0)
            return path, descriptor
        os.close(descriptor)
    raise MemoryError(
        f"{folder} has {_MAX_ENGINES} files {prefix}* that are in use or belong to other users; stop an engine or "
        "remove the files"
    )


def _reserve(path: Path, descriptor: int, size: int) -> None:
    """Allocates the memory now: otherwise the first write to a full file system would kill the process."""
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
    """Removes files of engines of other models that have ended; running ones have theirs locked."""
    for path in _files(folder, prefix):
        if path.name.startswith(own):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        if _is_mine(descriptor) and _lock(descriptor) and _is_at(path, descriptor):
            _log.info("removing the host pool of an engine that has ended: %s", path)
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _files(folder: Path, prefix: str) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        yield from [Path(entry.path) for entry in entries if entry.name.startswith(prefix)]


def _is_mine(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode)


def _is_at(path: Path, descriptor: int) -> bool:
    """Returns whether the file still has this name: another process may have removed it before the lock."""
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


class Staging:
    """Staging buffers for batches on their way to a device; a buffer is reused once no array refers to it.

    New memory costs more than the read into it, since the system clears it page by page: with new memory per batch the
    tiers loaded at a seventh of the disk's rate (`benchmarks.kv_tiers`). Huge pages need fewer page faults.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[mmap.mmap]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def rows(self, rows: int, width: int) -> np.ndarray:
        """Returns uint8 `[rows, width]` at the start of a memory page, with any content. Any thread may call."""
        size = max(1, rows * width)
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            memory = _new(size)
        array = np.frombuffer(memory, np.uint8)  # the base of all views of it, as the map is not an array
        weakref.finalize(array, free.append, memory).atexit = False
        return array[: rows * width].reshape(rows, width)


def _new(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel may be built without huge pages, as some for Arm are
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
