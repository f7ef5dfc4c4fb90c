"""Stores: places for values beyond the host's memory, which several engines may share, as pages are named by content.

A directory is one of a local disk, or a mounted 3FS or NFS that several hosts share:

    NAMESPACE/ab/abcdef....kv     a header, then the payload at 4,096 bytes

A file appears under its name when it is whole; nothing is synced, since what a crash tears does not verify. Files that
others remove are misses. The directory's size is what was found at the last look plus what was written since.

A bucket is reached through tensorstore's key-value drivers: s3, gcs, memory. An object is a header and its payload. A
bucket has rules of its own for what is old; nothing is evicted there.
"""

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dsv3.config.store_address import check_address, directory_of, location_of
from dsv3.kv_cache.events import EventSource
from dsv3.kv_cache.page_keys import ALIGNMENT, HEADER_BYTES, Key, aligned, header_of, read_header


class PageStore(Protocol):
    """Values by key, in batches. Any thread may call; OSError says that the place does not answer as it should."""

    damaged: int
    evictions: int

    @property
    def bytes_held(self) -> int:
        """Bytes that the place holds, as far as this process knows."""

    def count(self, keys: Sequence[Key]) -> int:
        """Returns how many of `keys` are there, from the first on."""

    def get(self, keys: Sequence[Key], out: np.ndarray) -> int:
        """Reads values into the rows of `out`, uint8 `[n, value_bytes]`.

        Returns how many there are, from the first on, that verify.
        """

    def put(self, keys: Sequence[Key], payloads: np.ndarray) -> int:
        """Writes the rows of `payloads`, uint8 `[n, value_bytes]`; returns how many were written."""

    def delete(self, keys: Sequence[Key]) -> None:
        """Drops values."""


def open_store(
    address: str, namespace: str, value_bytes: int, limit: int, watch: EventSource | None = None
) -> PageStore:
    """Opens a directory (an absolute path, or file://) or an object store (s3://, gs://).

    An S3 address may end with `?endpoint=URL&region=NAME`, for a server that is not Amazon's.

    Values have `value_bytes` bytes. Engines that can read each other's pages use the same `namespace`. A directory
    holds at most `limit` bytes; an object store is bounded by its own rules. Raises ValueError for another address,
    OSError where the store cannot be opened.
    """
    check_address(address)
    directory = directory_of(address)
    if directory is not None:
        return Directory(directory / namespace, value_bytes, limit, watch)
    return Objects(location_of(address, namespace), value_bytes, watch)


_THREADS = 8
_LOOK_AHEAD = 64  # files that are looked for at once: most prefixes are not there, and end at their first page
_LOOK_AGAIN_S = 60.0  # at what others have written and removed
_TOUCH_S = 60.0  # at most so often a file's time says that it was used
_TORN_S = 600.0  # an unfinished file that old belongs to nobody
_SUFFIX, _UNFINISHED = ".kv", ".tmp"
_DEADLINE_S = 30.0  # of a batch
_log = logging.getLogger(__name__)


class Directory:
    """Values of `value_bytes` bytes under `root`, at most `limit` bytes of files; the least recently used ones go.

    `watch` hears what this process writes, removes and misses. Raises OSError where the directory cannot be made or
    read.
    """

    def __init__(self, root: Path, value_bytes: int, limit: int, watch: EventSource | None = None) -> None:
        self._root, self._value_bytes, self._limit, self._watch = root, value_bytes, limit, watch
        self._file_bytes = ALIGNMENT + aligned(value_bytes)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-files")
        # Containers on several hosts all have process id 1, and may share the directory.
        self._name, self._numbers = secrets.token_hex(8), itertools.count()
        self._lock = threading.Lock()
        self._used: OrderedDict[Key, float] = OrderedDict()  # when its file was touched, least recently used first
        self._looked = 0.0
        self.evictions = self.damaged = 0
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._look()

    @property
    def bytes_held(self) -> int:
        """Bytes of the files known."""
        return len(self._used) * self._file_bytes

    def count(self, keys: Sequence[Key]) -> int:
        """Returns how many of `keys` are there, from the first on."""
        there = 0
        for some in itertools.batched(keys, _LOOK_AHEAD):
            found = sum(1 for _ in itertools.takewhile(bool, self._pool.map(self._is_there, some)))
            there += found
            if found < len(some):
                break
        return there

    def get(self, keys: Sequence[Key], out: np.ndarray) -> int:
        """Reads values into the rows of `out`; returns how many there are, from the first on, that verify."""
        found = list(self._pool.map(self._read, keys, out))
        return sum(1 for _ in itertools.takewhile(bool, found))

    def put(self, keys: Sequence[Key], payloads: np.ndarray) -> int:
        """Writes values that are not there yet; returns how many.

        Raises OSError where nothing can be written; then the directory holds what it held.
        """
        if time.monotonic() - self._looked > _LOOK_AGAIN_S:
            self._look()
        new = [(key, payload) for key, payload in zip(keys, payloads, strict=True) if key not in self._used]
        self._make_room(len(new))
        return sum(self._pool.map(lambda pair: self._write(*pair), new))

    def delete(self, keys: Sequence[Key]) -> None:
        """Removes values."""
        for key in keys:
            self._remove(key)

    def _path(self, key: Key) -> Path:
        name = key.hex()
        return self._root / name[:2] / f"{name}{_SUFFIX}"

    def _is_there(self, key: Key) -> bool:
        found = self._path(key).is_file()
        if not found:
            self._forget(key)
        return found

    def _forget(self, key: Key) -> None:
        with self._lock:
            was_known = self._used.pop(key, None) is not None
            if was_known and self._watch is not None:
                self._watch.removed([key])

    def _read(self, key: Key, out: np.ndarray) -> bool:
        try:
            with _opened(self._path(key), os.O_RDONLY) as descriptor:
                # Reading the header by itself has the kernel read ahead: twice as fast as one call for both.
                header = read_header(os.pread(descriptor, HEADER_BYTES, 0))
                length = _read_fully(descriptor, memoryview(out), ALIGNMENT)
        except FileNotFoundError:
            self._forget(key)
            return False
        if header is None or length < out.size or not header.covers(key, out):
            self.damaged += 1
            self._remove(key)
            return False
        self._touch(key)
        return True

    def _write(self, key: Key, payload: np.ndarray) -> bool:
        path = self._path(key)
        unfinished = path.with_name(f"{path.stem}.{self._name}-{next(self._numbers)}{_UNFINISHED}")
        path.parent.mkdir(exist_ok=True, mode=0o700)
        try:
            with _opened(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
                _write_fully(descriptor, header_of(key, payload).pack().ljust(ALIGNMENT, b"\0"), memoryview(payload))
                os.ftruncate(descriptor, self._file_bytes)
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        with self._lock:
            self._used[key] = time.time()
            if self._watch is not None:
                self._watch.stored([key])
        return True

    def _touch(self, key: Key) -> None:
        """Notes that a value was used, for the order here and, now and then, for that of other processes."""
        now = time.time()
        with self._lock:
            is_due = now - self._used.get(key, 0.0) > _TOUCH_S
            self._used[key] = now if is_due else self._used[key]
            self._used.move_to_end(key)
        if is_due:
            with contextlib.suppress(OSError):
                os.utime(self._path(key))

    def _remove(self, key: Key) -> None:
        self._forget(key)
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _make_room(self, wanted: int) -> None:
        """Removes the least recently used values until `wanted` more fit."""
        most = max(0, self._limit // self._file_bytes - wanted)
        while len(self._used) > most:
            with self._lock:
                key = next(iter(self._used), None)
            if key is None:
                return
            self._remove(key)
            self.evictions += 1

    def _look(self) -> None:
        """Takes over what is there, in the order of last use, and removes what a crash has left unfinished."""
        self._looked = time.monotonic()
        found = dict(self._found())
        with self._lock:
            self._used = OrderedDict(sorted(found.items(), key=lambda item: item[1]))

    def _found(self) -> Iterator[tuple[Key, float]]:
        for entry in _entries(self._root):
            stem, suffix = os.path.splitext(entry.name)
            with contextlib.suppress(OSError, ValueError):
                modified = entry.stat(follow_symlinks=False).st_mtime
                if suffix == _UNFINISHED and time.time() - modified > _TORN_S:
                    os.unlink(entry.path)
                elif suffix == _SUFFIX:
                    yield bytes.fromhex(stem), modified


def _entries(root: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(root) as folders:
        paths = [folder.path for folder in folders if folder.is_dir(follow_symlinks=False)]
    for path in paths:
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            yield from entries


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_fully(descriptor: int, out: memoryview, start: int) -> int:
    """Fills `out` from `start` on; returns how many bytes there were."""
    done = 0
    while done < len(out) and (count := os.preadv(descriptor, [out[done:]], start + done)):
        done += count
    return done


def _write_fully(descriptor: int, *parts: memoryview | bytes) -> None:
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(descriptor, rest) :]


class Objects:
    """Values of `value_bytes` bytes under `address`, a URL or the fields of a tensorstore driver.

    `watch` hears what this process writes and removes. Raises OSError where the address cannot be opened, or does not
    answer a batch within 30 s.
    """

    def __init__(self, address: str | dict[str, str], value_bytes: int, watch: EventSource | None = None) -> None:
        import tensorstore as ts  # only here: it is large, and few engines have a bucket

        self._value_bytes, self._watch = value_bytes, watch
        self.evictions = self.damaged = self.bytes_held = 0
        self._objects: Any = _answers([ts.KvStore.open(address)])[0]

    def count(self, keys: Sequence[Key]) -> int:
        """Returns how many of `keys` are there, from the first on; asks for one byte of each."""
        answers = _answers(self._objects.read(_name(key), byte_range=slice(0, 1)) for key in keys)
        return sum(1 for _ in itertools.takewhile(lambda answer: answer.state == "value", answers))

    def get(self, keys: Sequence[Key], out: np.ndarray) -> int:
        """Reads values into the rows of `out`; returns how many there are, from the first on, that verify."""
        answers = _answers(self._objects.read(_name(key)) for key in keys)
        fits = [self._take(key, answer, row) for key, answer, row in zip(keys, answers, out, strict=True)]
        return sum(1 for _ in itertools.takewhile(bool, fits))

    def put(self, keys: Sequence[Key], payloads: np.ndarray) -> int:
        """Writes values; returns how many."""
        values = (header_of(key, row).pack() + row.tobytes() for key, row in zip(keys, payloads, strict=True))
        written = len(_answers(self._objects.write(_name(key), value) for key, value in zip(keys, values, strict=True)))
        self.bytes_held += written * (HEADER_BYTES + self._value_bytes)
        if self._watch is not None:
            self._watch.stored(list(keys))
        return written

    def delete(self, keys: Sequence[Key]) -> None:
        """Removes values."""
        if self._watch is not None:
            self._watch.removed(list(keys))
        _answers(self._objects.write(_name(key), None) for key in keys)

    def _take(self, key: Key, answer: Any, out: np.ndarray) -> bool:
        """Copies an object's payload to `out`; False where there is none that verifies; a damaged one is removed."""
        if answer.state != "value":
            return False
        header, payload = read_header(answer.value[:HEADER_BYTES]), answer.value[HEADER_BYTES:]
        if header is None or len(payload) != out.size:
            return self._drop(key)
        out[:] = np.frombuffer(payload, np.uint8)
        return header.covers(key, out) or self._drop(key)

    def _drop(self, key: Key) -> bool:
        self.damaged += 1
        self.delete([key])
        return False


def _name(key: Key) -> str:
    return f"{key.hex()}.kv"


def _answers(futures: Iterable[Any]) -> list[Any]:
    """Waits for all of a batch; raises OSError where one fails or the batch takes too long."""
    deadline = time.time() + _DEADLINE_S
    try:
        return [future.result(deadline=deadline) for future in list(futures)]
    except TimeoutError:
        raise OSError(f"the object store has not answered within {_DEADLINE_S:.0f} s") from None
    except (ValueError, RuntimeError) as error:
        raise OSError(f"the object store has failed: {error}") from None
