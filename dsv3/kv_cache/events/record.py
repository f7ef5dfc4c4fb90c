"""What has become of pages, in order, until a thread sends it on. Any thread may note something; none waits."""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from dsv3.kv_cache.keys import Key

Medium = Literal["GPU", "CPU", "STORAGE"]


class Spelled(NamedTuple):
    """Which tokens keys stand for, should a tier tell of them: `tokens` int32 `[64 * n]`, `before` the key before.

    Keys of a prompt's beginning have None before them, and `tenant`, if its request had a salt.
    """

    keys: Sequence[Key]
    before: Key | None
    tokens: np.ndarray
    tenant: Key | None = None


Where = int | range | None
"""A rank, the ranks of one host, or None for all ranks."""


class Stored(NamedTuple):
    """Pages that can be found from now on, by the ranks `rank`."""

    rank: Where
    medium: Medium
    keys: Sequence[Key]
    spelled: Spelled | None = None


class Removed(NamedTuple):
    """Pages that cannot be found any more."""

    rank: Where
    medium: Medium
    keys: Sequence[Key]


class Cleared(NamedTuple):
    """Nothing can be found any more."""


Note = Spelled | Stored | Removed | Cleared


class Batch:
    """What was noted between two calls of `close`, and how many batches behind it were lost."""

    __slots__ = ("lost", "notes", "time")

    def __init__(self, notes: list[Note]) -> None:
        self.notes, self.time, self.lost = notes, time.time(), 0


@dataclasses.dataclass(frozen=True)
class EventStats:
    """Batches of events that could not be sent for want of room."""

    dropped: int


class Record:
    """Batches that wait to be sent, `most` of them; the next ones are lost, and counted in `dropped`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._open: list[Note] = []
        self._closed: deque[Batch] = deque()
        self.dropped = 0

    def note(self, note: Note) -> None:
        """Adds to the batch that is open."""
        with self._lock:
            self._open.append(note)

    def close(self) -> None:
        """Ends a batch, if it holds anything."""
        with self._lock:
            if not self._open:
                return
            batch, self._open = Batch(self._open), []
            if len(self._closed) < self._most:
                self._closed.append(batch)
            else:
                self._closed[-1].lost += 1
                self.dropped += 1

    def take(self) -> Batch | None:
        """Returns the oldest batch that has ended."""
        with self._lock:
            return self._closed.popleft() if self._closed else None


class Watch(NamedTuple):
    """Tells a record what happens in one place: a rank's prefix index, or a tier, which serves several ranks."""

    record: Record
    medium: Medium
    rank: Where = None

    def stored(self, keys: Sequence[Key], spelled: Spelled | None = None) -> None:
        """Notes pages that can be found from now on."""
        self.record.note(Stored(self.rank, self.medium, keys, spelled))

    def removed(self, keys: Sequence[Key]) -> None:
        """Notes pages that cannot be found any more; call it before they are used for anything else."""
        self.record.note(Removed(self.rank, self.medium, keys))
