"""KV cache events: a queue of what happens to pages, and its encoding in vLLM's wire format; no zmq.

Any thread may append an event; none waits. A message is msgpack of `[time, events, rank]`, each event a map with its
type. The block hash of a page is the first 8 bytes of its key. Consumers that hash tokens themselves use `token_ids`.
Window pages, without which a prefix cannot be continued in some models, are in no event.
"""

import dataclasses
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from dsv3.kv_cache.page_keys import Key, is_window_key

Medium = Literal["GPU", "CPU", "STORAGE"]


class PageTokens(NamedTuple):
    """The token ids of pages, for events of tiers, which know keys only.

    `tokens` are int32 `[n * page_size]`, `parent` is the key before the first page: None at the beginning of a prompt.
    `salted_root` is the root key of a request with a salt.
    """

    keys: Sequence[Key]
    parent: Key | None
    tokens: np.ndarray
    salted_root: Key | None = None


Ranks = int | range | None
"""A rank, the ranks of one host, or None for all ranks."""


class Stored(NamedTuple):
    """Pages that are cached from now on, for `rank`."""

    rank: Ranks
    medium: Medium
    keys: Sequence[Key]
    page_tokens: PageTokens | None = None


class Removed(NamedTuple):
    """Pages that are no longer cached."""

    rank: Ranks
    medium: Medium
    keys: Sequence[Key]


class Cleared(NamedTuple):
    """No page is cached any more."""


PageEvent = PageTokens | Stored | Removed | Cleared


class QueuedBatch:
    """The events between two calls of `end_batch`, and how many batches behind it were dropped."""

    __slots__ = ("dropped", "events", "time")

    def __init__(self, events: list[PageEvent]) -> None:
        self.events, self.time, self.dropped = events, time.time(), 0


@dataclasses.dataclass(frozen=True)
class EventStats:
    """Batches of events that were dropped because the queue was full."""

    dropped: int


class EventQueue:
    """Batches of events that wait to be sent, at most `capacity`; later ones are dropped and counted in `dropped`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._open: list[PageEvent] = []
        self._ended: deque[QueuedBatch] = deque()
        self.dropped = 0

    def append(self, event: PageEvent) -> None:
        with self._lock:
            self._open.append(event)

    def end_batch(self) -> None:
        """Ends the open batch unless it is empty."""
        with self._lock:
            if not self._open:
                return
            batch, self._open = QueuedBatch(self._open), []
            if len(self._ended) < self._capacity:
                self._ended.append(batch)
            else:
                self._ended[-1].dropped += 1
                self.dropped += 1

    def pop(self) -> QueuedBatch | None:
        """Removes and returns the oldest batch that has ended; None without one."""
        with self._lock:
            return self._ended.popleft() if self._ended else None


class EventSource(NamedTuple):
    """Appends the events of one place to a queue: a rank's prefix cache, or a tier, which serves several ranks."""

    queue: EventQueue
    medium: Medium
    rank: Ranks = None

    def stored(self, keys: Sequence[Key], page_tokens: PageTokens | None = None) -> None:
        """Publishes that pages are cached from now on."""
        self.queue.append(Stored(self.rank, self.medium, keys, page_tokens))

    def removed(self, keys: Sequence[Key]) -> None:
        """Publishes that pages are no longer cached; call it before they are reused."""
        self.queue.append(Removed(self.rank, self.medium, keys))


_MAX_PAGE_TOKENS = 2**14  # pages whose token ids are kept for events of tiers: 8 MB


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Consecutive pages that are cached; `token_ids` are empty where they are not known."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Pages that are no longer cached."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """Voids all events before it."""


class EventBatch(msgspec.Struct, array_like=True):
    """Events of one rank, with the time in seconds."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


Event = BlockStored | BlockRemoved | AllBlocksCleared


def hash_of(key: Key) -> int:
    """Returns the block hash of a page on the wire."""
    return int.from_bytes(key[:8], "big")


class EventEncoder:
    """Encodes batches as messages. It keeps the token ids of recently stored pages, since tiers know keys only."""

    def __init__(self, num_ranks: int, page_size: int) -> None:
        self._ranks, self._page_size = range(num_ranks), page_size
        self._page_tokens: OrderedDict[Key, PageTokens] = OrderedDict()
        self._encoder = msgspec.msgpack.Encoder()

    def messages(self, batch: QueuedBatch) -> list[tuple[int, bytes]]:
        """Returns the message for each rank that the batch has events of."""
        by_rank: dict[int, list[Event]] = {}
        for event in batch.events:
            if isinstance(event, PageTokens):
                self._remember(event)
                continue
            rank = None if isinstance(event, Cleared) else event.rank
            encoded = list(self._to_wire(event))
            for each in self._ranks if rank is None else (rank,) if isinstance(rank, int) else rank:
                _append(by_rank.setdefault(each, []), encoded)
        return [(rank, self._encoder.encode(EventBatch(batch.time, mine, rank))) for rank, mine in by_rank.items()]

    def _to_wire(self, event: Stored | Removed | Cleared) -> Iterator[Event]:
        if isinstance(event, Cleared):
            yield AllBlocksCleared()
        elif isinstance(event, Removed):
            if keys := [key for key in event.keys if not is_window_key(key)]:
                yield BlockRemoved([hash_of(key) for key in keys], event.medium)
        elif event.page_tokens is not None:
            self._remember(event.page_tokens)
            yield _block_stored(event.keys, event.page_tokens, event.medium, self._page_size)
        else:
            for key in itertools.filterfalse(is_window_key, event.keys):
                yield _block_stored([key], self._page_tokens.get(key), event.medium, self._page_size)

    def _remember(self, pages: PageTokens) -> None:
        parent = pages.parent
        for i, key in enumerate(pages.keys):
            tokens = pages.tokens[i * self._page_size : (i + 1) * self._page_size]
            self._page_tokens[key] = PageTokens([key], parent, tokens, pages.salted_root)
            self._page_tokens.move_to_end(key)
            parent = key
        while len(self._page_tokens) > _MAX_PAGE_TOKENS:
            self._page_tokens.popitem(last=False)


def _block_stored(keys: Sequence[Key], pages: PageTokens | None, medium: str, page_size: int) -> BlockStored:
    hashes = [hash_of(key) for key in keys]
    if pages is None:
        return BlockStored(hashes, None, [], page_size, None, medium, None)
    extra: list[tuple[str, ...] | None] | None = None
    if pages.salted_root is not None and pages.parent is None:
        extra = [(pages.salted_root.hex(),), *[None] * (len(keys) - 1)]
    tokens: list[int] = np.asarray(pages.tokens).tolist()
    parent = None if pages.parent is None else hash_of(pages.parent)
    return BlockStored(hashes, parent, tokens, page_size, None, medium, None, extra)


def _append(events: list[Event], more: Sequence[Event]) -> None:
    """Appends events; consecutive removals become one."""
    for event in more:
        last = events[-1] if events else None
        if isinstance(event, BlockRemoved) and isinstance(last, BlockRemoved) and event.medium == last.medium:
            events[-1] = BlockRemoved([*last.block_hashes, *event.block_hashes], event.medium)
        else:
            events.append(event)
