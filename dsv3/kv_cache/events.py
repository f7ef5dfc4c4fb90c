"""What becomes of pages, in order, until a thread sends it on, and vLLM's wire format for it; no zmq.

Any thread may note something; none waits. A message is msgpack of `[time, events, rank]`, each event a map with its
type. A page's hash is the first 8 bytes of its key. Consumers that hash tokens themselves find these in `token_ids`.
"""

import dataclasses
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from dsv3.kv_cache.page_keys import Key

Medium = Literal["GPU", "CPU", "STORAGE"]


class Spelled(NamedTuple):
    """Which tokens keys stand for, should a tier tell of them.

    `tokens` are int32 `[n * page_size]`, `before` is the key before. Keys of a prompt's beginning have None before
    them, and `tenant`, if its request had a salt.
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


class QueuedBatch:
    """What was noted between two calls of `close`, and how many batches behind it were lost."""

    __slots__ = ("lost", "notes", "time")

    def __init__(self, notes: list[Note]) -> None:
        self.notes, self.time, self.lost = notes, time.time(), 0


@dataclasses.dataclass(frozen=True)
class EventStats:
    """Batches of events that could not be sent for want of room."""

    dropped: int


class EventQueue:
    """Batches that wait to be sent, `most` of them; the next ones are lost, and counted in `dropped`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._open: list[Note] = []
        self._closed: deque[QueuedBatch] = deque()
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
            batch, self._open = QueuedBatch(self._open), []
            if len(self._closed) < self._most:
                self._closed.append(batch)
            else:
                self._closed[-1].lost += 1
                self.dropped += 1

    def take(self) -> QueuedBatch | None:
        """Returns the oldest batch that has ended."""
        with self._lock:
            return self._closed.popleft() if self._closed else None


class EventSource(NamedTuple):
    """Tells a record what happens in one place: a rank's prefix index, or a tier, which serves several ranks."""

    record: EventQueue
    medium: Medium
    rank: Where = None

    def stored(self, keys: Sequence[Key], spelled: Spelled | None = None) -> None:
        """Notes pages that can be found from now on."""
        self.record.note(Stored(self.rank, self.medium, keys, spelled))

    def removed(self, keys: Sequence[Key]) -> None:
        """Notes pages that cannot be found any more; call it before they are used for anything else."""
        self.record.note(Removed(self.rank, self.medium, keys))


_MOST_SPELLED = 2**14  # pages whose tokens are known, should a tier tell of them: 8 MB


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Pages that can be found, one behind the other; without tokens where these are not known."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Pages that cannot be found any more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """All that was told before is void."""


class EventBatch(msgspec.Struct, array_like=True):
    """Events of one rank, with the time in seconds."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


Event = BlockStored | BlockRemoved | AllBlocksCleared


def hash_of(key: Key) -> int:
    """Returns a page's name on the wire."""
    return int.from_bytes(key[:8], "big")


class EventEncoder:
    """Turns batches into messages. It remembers what lately stored pages spell, for tiers know keys only."""

    def __init__(self, num_ranks: int, page_size: int) -> None:
        self._ranks, self._page_size = range(num_ranks), page_size
        self._spelled: OrderedDict[Key, Spelled] = OrderedDict()
        self._pack = msgspec.msgpack.Encoder()

    def messages(self, batch: QueuedBatch) -> list[tuple[int, bytes]]:
        """Returns the payload for each rank that the batch says something about."""
        events: dict[int, list[Event]] = {}
        for note in batch.notes:
            if isinstance(note, Spelled):
                self._remember(note)
                continue
            rank = None if isinstance(note, Cleared) else note.rank
            told = list(self._told(note))
            for each in self._ranks if rank is None else (rank,) if isinstance(rank, int) else rank:
                _append(events.setdefault(each, []), told)
        return [(rank, self._pack.encode(EventBatch(batch.time, mine, rank))) for rank, mine in events.items()]

    def _told(self, note: Stored | Removed | Cleared) -> Iterator[Event]:
        if isinstance(note, Cleared):
            yield AllBlocksCleared()
        elif isinstance(note, Removed):
            yield BlockRemoved([hash_of(key) for key in note.keys], note.medium)
        elif note.spelled is not None:
            self._remember(note.spelled)
            yield _stored(note.keys, note.spelled, note.medium, self._page_size)
        else:
            for key in note.keys:
                yield _stored([key], self._spelled.get(key), note.medium, self._page_size)

    def _remember(self, spelled: Spelled) -> None:
        before = spelled.before
        for i, key in enumerate(spelled.keys):
            tokens = spelled.tokens[i * self._page_size : (i + 1) * self._page_size]
            self._spelled[key] = Spelled([key], before, tokens, spelled.tenant)
            before = key
        while len(self._spelled) > _MOST_SPELLED:
            self._spelled.popitem(last=False)


def _stored(keys: Sequence[Key], spelled: Spelled | None, medium: str, page_size: int) -> BlockStored:
    hashes = [hash_of(key) for key in keys]
    if spelled is None:
        return BlockStored(hashes, None, [], page_size, None, medium, None)
    before, tenant = spelled.before, spelled.tenant
    extra: list[tuple[str, ...] | None] | None = None
    if tenant is not None and before is None:
        extra = [(tenant.hex(),), *[None] * (len(keys) - 1)]
    tokens: list[int] = np.asarray(spelled.tokens).tolist()
    parent = None if before is None else hash_of(before)
    return BlockStored(hashes, parent, tokens, page_size, None, medium, None, extra)


def _append(events: list[Event], more: Sequence[Event]) -> None:
    """Adds events; removals that follow each other become one."""
    for event in more:
        last = events[-1] if events else None
        if isinstance(event, BlockRemoved) and isinstance(last, BlockRemoved) and event.medium == last.medium:
            events[-1] = BlockRemoved([*last.block_hashes, *event.block_hashes], event.medium)
        else:
            events.append(event)
