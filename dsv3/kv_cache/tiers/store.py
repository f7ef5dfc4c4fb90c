"""KV stores: page payloads beyond host memory, in a directory or an object store that several engines may share.

A directory is one of a local disk, or a mounted 3FS or NFS that several hosts share:

    NAMESPACE/ab/abcdef....kv     a header, then the payload at 4,096 bytes

A file gets its name when it is complete; nothing is synced, since a file that a crash tears does not verify. Files that
others remove are misses. The directory's size is that of the last scan plus what was written since.

Buckets use tensorstore's key-value drivers: s3, gcs, memory. An object is a header and its payload. Nothing is evicted
there: a bucket has lifecycle rules of its own.
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
from dsv3.kv_cache.page_keys import ALIGNMENT, HEADER_BYTES, Key, aligned, make_header, read_header


class PageStore(Protocol):
    """Payloads by key, in batches. Any thread may call; methods raise OSError where the store fails."""

    damaged: int
    evictions: int

    @property
    def bytes_held(self) -> int:
        """Bytes in the store, as far as this process knows."""

    def count(self, keys: Sequence[Key]) -> int:
        """Returns how many leading `keys` are stored."""

    def get(self, keys: Sequence[Key], out: np.ndarray) -> int:
        """Reads payloads into the rows of `out`, uint8 `[n, payload_bytes]`.

        Returns how many leading ones are stored and verify.
        """

    def put(self, keys: Sequence[Key], payloads: np.ndarray) -> int:
        """Writes the rows of `payloads`, uint8 `[n, payload_bytes]`; returns how many were written."""

    def delete(self, keys: Sequence[Key]) -> None:
        """Deletes pages."""


def open_store(
    address: str, namespace: str, payload_bytes: int, limit: int, events: EventSource | None = None
) -> PageStore:
    """Opens a directory (an absolute path, or file://) or an object store (s3://, gs://).

    An S3 address may end with `?endpoint=URL&region=NAME`, for a server that is not Amazon's.

    Payloads have `payload_bytes` bytes. Engines that can read each other's pages use the same `namespace`. A directory
    holds at most `limit` bytes; an object store is bounded by its own rules. Raises ValueError for another address,
    OSError where the store cannot be opened.
    """
    check_address(address)
    directory = directory_of(address)
    if directory is not None:
        return Directory(directory / namespace, payload_bytes, limit, events)
    return Objects(location_of(address, namespace), payload_bytes, events)


_THREADS = 8
_LOOKAHEAD = 64  # files that are looked up at once: most prefixes are absent and end at their first page
_RESCAN_S = 60.0  # for files that others have written and removed
_TOUCH_S = 60.0  # between two updates of a file's time of use
_TORN_S = 600.0  # age after which an unfinished file is removed
_SUFFIX, _UNFINISHED = ".kv", ".tmp"
_DEADLINE_S = 30.0  # of a batch
_log = logging.getLogger(__name__)


class Directory:
    """Payloads of `payload_bytes` bytes under `root`, at most `limit` bytes of files; evicts the least recently used.

    `events` receives the pages that this process writes, removes and misses. Files are read through the page cache:
    O_DIRECT was no faster. Raises OSError where the directory cannot be created or read.
    """

    def __init__(self, root: Path, payload_bytes: int, limit: int, events: EventSource | None = None) -> None:
        self._root, self._value_bytes, self._limit, self._events = root, payload_bytes, limit, events
        self._file_bytes = ALIGNMENT + aligned(payload_bytes)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-files")
        # A random name: containers on several hosts all have process id 1, and may share the directory.
        self._name, self._numbers = secrets.token_hex(8), itertools.count()
        self._lock = threading.Lock()
        self._used: OrderedDict[Key, float] = OrderedDict()  # when its file was touched, least recently used first
        self._scanned_at = 0.0
        self.evictions = self.damaged = 0
        self._scan()

    @property
    def bytes_held(self) -> int:
        return len(self._used) * self._file_bytes

    def count(self, keys: Sequence[Key]) -> int:
        total = 0
        for some in itertools.batched(keys, _LOOKAHEAD):
            found = sum(1 for _ in itertools.takewhile(bool, self._pool.map(self._exists, some)))
            total += found
            if found < len(some):
                break
        return total

    def get(self, keys: Sequence[Key], out: np.ndarray) -> int:
        found = list(self._pool.map(self._read, keys, out))
        return sum(1 for _ in itertools.takewhile(bool, found))

    def put(self, keys: Sequence[Key], payloads: np.ndarray) -> int:
        """Writes payloads that are not stored yet; after an OSError some of them may be stored, each whole."""
        if time.monotonic() - self._scanned_at > _RESCAN_S:
            self._scan()
        new = [(key, payload) for key, payload in zip(keys, payloads, strict=True) if key not in self._used]
        self._evict_for(len(new))
        return sum(self._pool.map(lambda pair: self._write(*pair), new))

    def delete(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._remove(key)

    def _path(self, key: Key) -> Path:
        name = key.hex()
        return self._root / name[:2] / f"{name}{_SUFFIX}"

    def _exists(self, key: Key) -> bool:
        found = self._path(key).is_file()
        if not found:
            self._forget(key)
        return found

    def _forget(self, key: Key) -> None:
        with self._lock:
            was_known = self._used.pop(key, None) is not None
            if was_known and self._events is not None:
                self._events.removed([key])

    def _read(self, key: Key, out: np.ndarray) -> bool:
        try:
            with _opened(self._path(key), os.O_RDONLY) as descriptor:
                # Reading the header by itself makes the kernel read ahead: twice as fast as one call for both.
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
                _write_fully(descriptor, make_header(key, payload).pack().ljust(ALIGNMENT, b"\0"), memoryview(payload))
                os.ftruncate(descriptor, self._file_bytes)
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        with self._lock:
            self._used[key] = time.time()
            if self._events is not None:
                self._events.stored([key])
        return True

    def _touch(self, key: Key) -> None:
        """Records the use of a page, in the order here and, at intervals, in the file's time for other processes."""
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

    def _evict_for(self, wanted: int) -> None:
        """Evicts the least recently used pages until `wanted` more fit."""
        most = max(0, self._limit // self._file_bytes - wanted)
        while len(self._used) > most:
            with self._lock:
                key = next(iter(self._used), None)
            if key is None:
                return
            self._remove(key)
            self.evictions += 1

    def _scan(self) -> None:
        """Reads the directory in the order of last use, and removes files that a crash has left unfinished.

        Creates the directory where it is missing: it may have been deleted while the engine runs.
        """
        self._scanned_at = time.monotonic()
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
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
    """Fills `out` from offset `start` on; returns how many bytes there were."""
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
    """Payloads of `payload_bytes` bytes under `address`, a URL or the fields of a tensorstore driver.

    `events` receives the pages that this process writes and removes. Raises OSError where the address cannot be opened,
    or does not answer a batch within 30 s.
    """

    def __init__(self, address: str | dict[str, str], payload_bytes: int, events: EventSource | None = None) -> None:
        import tensorstore as ts  # only here: it is large, and few engines use a bucket

        self._value_bytes, self._events = payload_bytes, events
        self.evictions = self.damaged = self.bytes_held = 0
        self._objects: Any = _wait_for_all([ts.KvStore.open(address)])[0]

    def count(self, keys: Sequence[Key]) -> int:
        """Returns how many leading `keys` are stored; reads one byte of each."""
        answers = _wait_for_all(self._objects.read(_name(key), byte_range=slice(0, 1)) for key in keys)
        return sum(1 for _ in itertools.takewhile(lambda answer: answer.state == "value", answers))

    def get(self, keys: Sequence[Key], out: np.ndarray) -> int:
        answers = _wait_for_all(self._objects.read(_name(key)) for key in keys)
        fits = [self._copy_object(key, answer, row) for key, answer, row in zip(keys, answers, out, strict=True)]
        return sum(1 for _ in itertools.takewhile(bool, fits))

    def put(self, keys: Sequence[Key], payloads: np.ndarray) -> int:
        values = (make_header(key, row).pack() + row.tobytes() for key, row in zip(keys, payloads, strict=True))
        written = len(
            _wait_for_all(self._objects.write(_name(key), value) for key, value in zip(keys, values, strict=True))
        )
        self.bytes_held += written * (HEADER_BYTES + self._value_bytes)
        if self._events is not None:
            self._events.stored(list(keys))
        return written

    def delete(self, keys: Sequence[Key]) -> None:
        if self._events is not None:
            self._events.removed(list(keys))
        _wait_for_all(self._objects.write(_name(key), None) for key in keys)

    def _copy_object(self, key: Key, answer: Any, out: np.ndarray) -> bool:
        """Copies an object's payload to `out`; False where it is missing or damaged; deletes a damaged one."""
        if answer.state != "value":
            return False
        header, payload = read_header(answer.value[:HEADER_BYTES]), answer.value[HEADER_BYTES:]
        if header is None or len(payload) != out.size:
            return self._delete_damaged(key)
        out[:] = np.frombuffer(payload, np.uint8)
        return header.covers(key, out) or self._delete_damaged(key)

    def _delete_damaged(self, key: Key) -> bool:
        self.damaged += 1
        self.delete([key])
        return False


def _name(key: Key) -> str:
    return f"{key.hex()}.kv"


def _wait_for_all(futures: Iterable[Any]) -> list[Any]:
    """Returns the results of a batch; raises OSError where one fails or the batch exceeds its deadline."""
    deadline = time.time() + _DEADLINE_S
    try:
        return [future.result(deadline=deadline) for future in list(futures)]
    except TimeoutError:
        raise OSError(f"kv_store: the object store has not answered within {_DEADLINE_S:.0f} s") from None
    except (ValueError, RuntimeError) as error:
        raise OSError(f"kv_store: the object store has failed: {error}") from None
