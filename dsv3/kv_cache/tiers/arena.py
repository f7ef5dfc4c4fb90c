"""Values in host memory: cells of one size, found by key, the least recently used one overwritten first.

Any thread may call. Bytes are copied without the lock. A cell's header is written after its payload, so whoever finds
the memory again after a `kill -9` finds whole values or none; what was torn does not verify.
"""

import threading
from collections import Counter, OrderedDict

import numpy as np

from dsv3.kv_cache.events.record import Watch
from dsv3.kv_cache.keys import Key
from dsv3.kv_cache.tiers.value import HEADER_BYTES, aligned, header_of, read_header

Place = tuple[int, int]
"""Where a value lies in its process: the address of its header, and that of its payload."""


def arena_bytes(num_cells: int, value_bytes: int) -> int:
    """Returns the memory of an arena: its headers, then its cells."""
    return aligned(num_cells * HEADER_BYTES) + num_cells * aligned(value_bytes)


def cells_within(size: int, value_bytes: int) -> int:
    """Returns how many values an arena of `size` bytes holds."""
    return max(0, size - aligned(1)) // (aligned(value_bytes) + HEADER_BYTES)


class Arena:
    """Values of `value_bytes` bytes in `memory`, uint8 `[arena_bytes(num_cells, value_bytes)]`.

    What the memory holds already stays, as far as its headers are whole. `watch` hears what comes and goes.
    """

    def __init__(self, memory: np.ndarray, value_bytes: int, num_cells: int, watch: Watch | None = None) -> None:
        self._watch = watch
        start = aligned(num_cells * HEADER_BYTES)
        self.memory = memory
        self.value_bytes, self.num_cells = value_bytes, num_cells
        self._headers = memory[: num_cells * HEADER_BYTES].reshape(num_cells, HEADER_BYTES)
        self._cells = memory[start : start + num_cells * aligned(value_bytes)].reshape(num_cells, -1)[:, :value_bytes]
        self._lock = threading.Condition()  # told of new values
        self._cell_of: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._readers: Counter[int] = Counter()  # by cell
        self._retired: set[int] = set()  # without a key, but with readers
        self._free: list[int] = []
        self._written = 0
        self.evictions = self.damaged = 0
        self._find_again()

    def __len__(self) -> int:
        return len(self._cell_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._cell_of

    def put(self, key: Key, payload: np.ndarray) -> bool:
        """Keeps a value, uint8 `[value_bytes]`; False where it is there already or every cell is being read."""
        with self._lock:
            cell = None if key in self._cell_of else self._empty_cell()
            if cell is None:
                return False
            self._written += 1
            order = self._written
        self._cells[cell] = payload
        self._headers[cell] = np.frombuffer(header_of(key, payload, order).pack(), np.uint8)
        with self._lock:
            was_faster = key in self._cell_of  # another thread
            if was_faster:
                self._empty(cell)
            else:
                self._cell_of[key] = cell
                self._tell_stored([key])
                self._lock.notify_all()
        return not was_faster

    def wait_for(self, key: Key, seconds: float) -> bool:
        """Returns whether a value is there, or comes within `seconds`."""
        with self._lock:
            return self._lock.wait_for(lambda: key in self._cell_of, seconds)

    def place_of(self, key: Key) -> Place | None:
        """Returns where a value lies; None without one. Another may be written there at any time."""
        with self._lock:
            cell = self._cell_of.get(key)
            if cell is None:
                return None
            self._cell_of.move_to_end(key)
        return self._headers[cell].ctypes.data, self._cells[cell].ctypes.data

    def get(self, key: Key, out: np.ndarray) -> bool:
        """Copies a value to `out`, uint8 `[value_bytes]`; False where there is none that verifies."""
        with self._lock:
            cell = self._cell_of.get(key)
            if cell is None:
                return False
            self._cell_of.move_to_end(key)
            self._readers[cell] += 1
        out[:] = self._cells[cell]
        header = read_header(self._headers[cell].tobytes())
        intact = header is not None and header.covers(key, out)
        with self._lock:
            self._readers[cell] -= 1
            if not intact:
                self.damaged += 1
                self._retire(key, cell)
            self._reclaim(cell)
        return intact

    def forget(self, key: Key) -> None:
        """Drops a value."""
        with self._lock:
            if (cell := self._cell_of.get(key)) is not None:
                self._retire(key, cell)
                self._reclaim(cell)

    def clear(self) -> None:
        """Drops all values."""
        for key in list(self._cell_of):
            self.forget(key)

    def _empty_cell(self) -> int | None:
        """Returns a cell that nobody has, the least recently used one if all are taken; None if all are being read."""
        if self._free:
            return self._free.pop()
        found = next(((key, cell) for key, cell in self._cell_of.items() if not self._readers[cell]), None)
        if found is None:
            return None
        key, cell = found
        self._remove(key)
        self._headers[cell] = 0
        self.evictions += 1
        return cell

    def _retire(self, key: Key, cell: int) -> None:
        if self._cell_of.get(key) == cell:
            self._remove(key)
            self._retired.add(cell)

    def _remove(self, key: Key) -> None:
        del self._cell_of[key]
        if self._watch is not None:
            self._watch.removed([key])

    def _tell_stored(self, keys: list[Key]) -> None:
        if self._watch is not None and keys:
            self._watch.stored(keys)

    def _reclaim(self, cell: int) -> None:
        """Frees a retired cell that nobody reads any more."""
        if cell in self._retired and not self._readers[cell]:
            self._retired.remove(cell)
            self._empty(cell)

    def _empty(self, cell: int) -> None:
        self._headers[cell] = 0
        self._free.append(cell)

    def _find_again(self) -> None:
        """Takes over what whole headers say the memory holds, in the order in which it was written."""
        found = {}
        for cell, raw in enumerate(self._headers):
            header = read_header(raw.tobytes()) if raw.any() else None
            if header is not None and header.length == self.value_bytes:
                found[cell] = header
        for cell, header in sorted(found.items(), key=lambda item: item[1].order):
            self._cell_of[header.key] = cell
        kept = set(self._cell_of.values())
        self._free = [cell for cell in reversed(range(self.num_cells)) if cell not in kept]
        self._written = max((header.order for header in found.values()), default=0)
        self._tell_stored(list(self._cell_of))
