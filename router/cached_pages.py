"""Which pages an instance has cached, by the KV events that it publishes over ZMQ.

The router names a page by a chain of hashes over its token ids: the instance's own block hashes start from model and
tenant, which a router does not know. So equal tokens of several tenants have one name here. A block of an instance is
one such page or, of DeepSeek-V4 and where devices divide pages, several. The listener requests the batches that it
missed.
"""

import asyncio
import contextlib
import functools
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from dsv3.config.publishing import endpoint_of
from dsv3.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from dsv3.kv_cache.page_cache import RankPrefixIndex
from router.request import PAGE_TOKENS

_END = -1  # the number behind a replay
_IDLE_S = 10.0  # without an event; then it requests a replay, in case it missed one
_ANSWER_S = 2.0  # for the next part of a replay
_RETRY_S = 1.0, 30.0  # before it subscribes again to a silent publisher; twice as long each time
_MOST_BYTES = 2**26
_MOST_RANKS = 4096
_log = logging.getLogger("dsv3.router")
MAX_NAMES = 2**19
"""Block hashes that are mapped to page keys per instance, evicted ones included: 34 million tokens."""

_PAGE_BYTES = 4 * PAGE_TOKENS
_START = b""
_decoder = msgspec.msgpack.Decoder(EventBatch)


def token_page_keys(tokens: Sequence[int] | np.ndarray, before: bytes = _START) -> tuple[bytes, ...]:
    """Returns the keys of the full pages of `tokens`; `before` is the key of the page before them."""
    data, keys = np.asarray(tokens, "<i4").tobytes(), []
    for start in range(0, len(data) - _PAGE_BYTES + 1, _PAGE_BYTES):
        before = hashlib.blake2b(before + data[start : start + _PAGE_BYTES], digest_size=16).digest()
        keys.append(before)
    return tuple(keys)


def read_batch(payload: bytes) -> EventBatch:
    """Decodes a batch; raises ValueError for what is none."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(str(error)) from None


class CachedPages:
    """Pages that an instance of `num_ranks` ranks has cached, on any medium; its length counts those of all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._holders = RankPrefixIndex(num_ranks)
        self._keys_of: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()  # block hash to page keys
        # (block hash, medium) to page keys
        self._cached: list[dict[tuple[int, str], tuple[bytes, ...]]] = [{} for _ in range(num_ranks)]
        self._counts: Counter[tuple[bytes, int]] = Counter()  # of those, by page key and rank

    def __len__(self) -> int:
        return len(self._counts)

    def overlap(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading pages of a prompt the rank with the most of them has."""
        depths = self._holders.depths(keys)
        return 0 if depths is None else int(depths.max())

    def apply(self, rank: int, batch: EventBatch) -> None:
        """Applies a batch of a rank's events."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._map_hashes(event)
                for name in event.block_hashes:
                    self._add(rank, name, event.medium)
            elif isinstance(event, BlockRemoved):
                self._remove(rank, [(name, event.medium) for name in event.block_hashes])
            elif isinstance(event, AllBlocksCleared):
                self.clear(rank)

    def clear(self, rank: int) -> None:
        """Removes all pages of a rank."""
        self._remove(rank, list(self._cached[rank]))

    def _map_hashes(self, event: BlockStored) -> None:
        """Maps block hashes to page keys, where the event has the tokens and its parent is known."""
        size, count = event.block_size, len(event.block_hashes)
        before = (_START,) if event.parent_block_hash is None else self._keys_of.get(event.parent_block_hash)
        whole = size > 0 and size % PAGE_TOKENS == 0 and len(event.token_ids) == size * count
        if before is None or not whole or not _are_ids(event.token_ids):
            return
        keys, each = token_page_keys(event.token_ids, before[-1]), size // PAGE_TOKENS
        for i, name in enumerate(event.block_hashes):
            self._keys_of.setdefault(name, keys[i * each : (i + 1) * each])
            self._keys_of.move_to_end(name)
        while len(self._keys_of) > MAX_NAMES:
            self._keys_of.popitem(last=False)

    def _add(self, rank: int, name: int, medium: str) -> None:
        keys = self._keys_of.get(name)
        if keys is None or (name, medium) in self._cached[rank]:
            return
        self._cached[rank][name, medium] = keys
        self._counts.update((key, rank) for key in keys)
        self._holders.add(keys, rank)

    def _remove(self, rank: int, pages: Iterable[tuple[int, str]]) -> None:
        for page in pages:
            for key in self._cached[rank].pop(page, ()):
                self._counts[key, rank] -= 1
                if not self._counts[key, rank]:
                    del self._counts[key, rank]
                    self._holders.remove([key], rank)


def _are_ids(tokens: Sequence[int]) -> bool:
    return not tokens or (min(tokens) >= 0 and max(tokens) < 2**31)


class EventEndpoint(msgspec.Struct, frozen=True):
    """Where an instance publishes, as its `/v1/models` says; `*` stands for its host."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    num_ranks: int = 1

    def at(self, host: str) -> "EventEndpoint | None":
        """Returns the endpoint with the host in it; None where this host cannot connect to it."""
        known = [_connectable(each, host) for each in (self.endpoint, self.replay_endpoint) if each is not None]
        if any(each is None for each in known) or not 1 <= self.num_ranks <= _MOST_RANKS:
            return None
        return EventEndpoint(str(known[0]), known[1] if len(known) > 1 else None, self.topic, self.num_ranks)


def _connectable(endpoint: str, host: str) -> str | None:
    shown = f"[{host}]" if ":" in host else host
    if endpoint.startswith("tcp://"):
        name, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        if not (port.isascii() and port.isdigit()):
            return None
        return f"tcp://{shown if name in ('*', '[::]', '::', '0.0.0.0') else name}:{port}"
    return endpoint if endpoint.startswith("ipc://") and host in ("127.0.0.1", "::1", "localhost") else None


@functools.cache
def zmq_context() -> "zmq.asyncio.Context":
    """Returns the context of all listeners, with as many sockets as there can be.

    Its default is 1,023, and each rank of each instance takes one: a decode unit may have 144 ranks.
    """
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


class Listener:
    """Keeps `cached` up to date from `start` to `close`. `is_live`: it has all events so far."""

    def __init__(self, source: EventEndpoint, name: str):
        self.cached = CachedPages(source.num_ranks)
        self._source, self._name = source, name
        self._is_current = [False] * source.num_ranks
        self._newest = [0.0] * source.num_ranks  # seconds, of the batches applied
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_live(self) -> bool:
        """Whether events of all ranks arrive."""
        return all(self._is_current)

    def start(self) -> None:
        """Subscribes to all ranks."""
        self._tasks = [asyncio.create_task(self._follow(rank)) for rank in range(self._source.num_ranks)]

    def close(self) -> None:
        """Unsubscribes."""
        for task in self._tasks:
            task.cancel()

    async def _follow(self, rank: int) -> None:
        """Subscribes to a rank, and again with growing pauses where it does not answer, until it is cancelled."""
        pause = _RETRY_S[0]
        while True:
            try:
                async with self._subscribed(rank) as socket:
                    await self._listen(socket, rank)
            except _OtherPublisher:
                pass
            except (zmq.ZMQError, TimeoutError, ValueError) as error:
                _log.warning("%s: no KV events of rank %d (%s)", self._name, rank, str(error) or "it does not answer")
            pause = _RETRY_S[0] if self._is_current[rank] else min(2 * pause, _RETRY_S[1])
            self._is_current[rank] = False
            self.cached.clear(rank)
            await asyncio.sleep(pause)

    @contextlib.asynccontextmanager
    async def _subscribed(self, rank: int) -> AsyncIterator["zmq.asyncio.Socket"]:
        with zmq_context().socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
            socket.setsockopt_string(zmq.SUBSCRIBE, self._source.topic)
            socket.connect(endpoint_of(self._source.endpoint, rank))
            yield socket

    async def _listen(self, socket: "zmq.asyncio.Socket", rank: int) -> None:
        """Applies batches as they come; raises _OtherPublisher, and TimeoutError where a replay does not come."""
        expected = await self._replayed(rank, None)
        while True:
            try:
                async with asyncio.timeout(_IDLE_S):
                    number, payload = _message(await socket.recv_multipart())
            except TimeoutError:
                expected = await self._replayed(rank, expected)
                continue
            batch = read_batch(payload)
            if expected is not None and number > expected:
                expected = await self._replayed(rank, expected)
            if expected is not None and number < expected:
                if batch.ts > self._newest[rank]:
                    raise _OtherPublisher
                continue  # it was in the replay
            if expected is not None and number > expected:
                self.cached.clear(rank)  # the missing batches are no longer replayed
            self._apply(rank, batch)
            expected, self._is_current[rank] = number + 1, True

    async def _replayed(self, rank: int, expected: int | None) -> int | None:
        """Applies the replay from batch `expected` on, None for all; returns the next number.

        The batch before is requested too: its time shows whether the same process publishes.
        """
        endpoint = self._source.replay_endpoint
        if endpoint is None:
            return expected
        # A new socket gets no late answer to an earlier request.
        with zmq_context().socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
            socket.connect(endpoint_of(endpoint, rank))
            known, expected = expected, expected or 0
            await socket.send_multipart([b"", max(expected - 1, 0).to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(_ANSWER_S):
                    number, payload = _message(await socket.recv_multipart())
                if number == _END:
                    if known:
                        raise _OtherPublisher
                    self._is_current[rank] = True
                    return expected
                batch = read_batch(payload)
                if number == expected - 1 and known and batch.ts != self._newest[rank]:
                    raise _OtherPublisher
                known = None
                if number >= expected:
                    if number > expected:
                        self.cached.clear(rank)  # batches between were dropped, and with them removals
                    self._apply(rank, batch)
                    expected = number + 1

    def _apply(self, rank: int, batch: EventBatch) -> None:
        self.cached.apply(rank, batch)
        self._newest[rank] = batch.ts


class _OtherPublisher(Exception):
    """Another process publishes at the endpoint than before."""


def _message(frames: list[bytes]) -> tuple[int, bytes]:
    if len(frames) != 3 or len(frames[1]) != 8:
        raise ValueError(f"a message has {len(frames)} parts")
    return int.from_bytes(frames[1], "big", signed=True), frames[2]
