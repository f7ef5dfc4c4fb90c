"""Memory for batches on their way to a device, used again and again.

New memory costs more than what is read into it, since the system clears it page by page: with new memory per batch the
tiers loaded at a seventh of the disk's rate (`benchmarks/README.md`). Large pages need fewer such stops.
"""

import contextlib
import mmap
import weakref
from collections import defaultdict, deque

import numpy as np

_KEPT = 4  # pieces of each size


class Staging:
    """Hands out arrays; the memory of one is handed out again when nobody holds the array or a view of it."""

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
        array = np.frombuffer(memory, np.uint8)  # the base of all views of it, as the map is no array
        weakref.finalize(array, free.append, memory).atexit = False
        return array[: rows * width].reshape(rows, width)


def _new(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel may be built without large pages, as some for Arm are
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
