"""Which pages an instance holds, as its KV events over ZMQ tell: what a prompt finds there is known and not guessed.

A page is named by what it spells, a chain of hashes over token ids. The instance's own names have a start that a router
cannot know (model, tenant). So pages of several tenants that spell the same have one name here. The listener asks again
for what it has missed, and says when it hears nothing.
"""

import asyncio
import contextlib
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
from dsv3.kv_cache.page_cache import Holders
from router.request import PAGE_TOKENS

_END = -1  # the number behind a replay
_IDLE_S = 10.0  # without an event; then it asks whether it has missed one
_ANSWER_S = 2.0  # for the next part of a replay
_AGAIN_S = 1.0, 30.0  # before it asks once more whom it has not heard; twice as long each time
_MOST_BYTES = 2**26
_MOST_RANKS = 4096
_log = logging.getLogger("dsv3.router")
MAX_SPELLED = 2**19
"""Pages whose tokens are remembered per instance, those that have left it among them: 34 million tokens."""

_PAGE_BYTES = 4 * PAGE_TOKENS
_START = b""
_decoder = msgspec.msgpack.Decoder(EventBatch)


class UnreadableEvents(Exception):
    """What an instance has sent is no batch of KV events."""


def spelled_keys(tokens: Sequence[int] | np.ndarray, before: bytes = _START) -> tuple[bytes, ...]:
    """Returns the names of the full pages of `tokens`, which stand behind the page `before`."""
    data, keys = np.asarray(tokens, "<i4").tobytes(), []
    for start in range(0, len(data) - _PAGE_BYTES + 1, _PAGE_BYTES):
        before = hashlib.blake2b(before + data[start : start + _PAGE_BYTES], digest_size=16).digest()
        keys.append(before)
    return tuple(keys)


def read_batch(payload: bytes) -> EventBatch:
    """Reads what was sent for a batch; raises UnreadableEvents."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
        raise UnreadableEvents(str(error)) from None


class CachedPages:
    """The pages of an instance of so many ranks, on whatever medium; its length counts those of all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._holders = Holders(num_ranks)
        self._spelled: OrderedDict[int, bytes] = OrderedDict()  # the instance's name of a page to ours
        self._there: list[dict[tuple[int, str], bytes]] = [{} for _ in range(num_ranks)]  # its name and medium to ours
        self._counts: Counter[tuple[bytes, int]] = Counter()  # of those, by our name and rank

    @property
    def num_ranks(self) -> int:
        """Ranks of the instance."""
        return len(self._there)

    def __len__(self) -> int:
        return len(self._counts)

    def overlap(self, keys: Sequence[bytes]) -> int:
        """Returns how many pages of a prompt, from its first on, the rank finds that has the most."""
        depths = self._holders.depths(keys)
        return 0 if depths is None else int(depths.max())

    def take(self, rank: int, batch: EventBatch) -> None:
        """Takes in a batch of a rank's events."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._spell(event)
                for name in event.block_hashes:
                    self._add(rank, name, event.medium)
            elif isinstance(event, BlockRemoved):
                self._remove(rank, [(name, event.medium) for name in event.block_hashes])
            elif isinstance(event, AllBlocksCleared):
                self.forget(rank)

    def forget(self, rank: int) -> None:
        """Drops all that is known of a rank."""
        self._remove(rank, list(self._there[rank]))

    def _spell(self, event: BlockStored) -> None:
        """Notes what pages spell, where that is told and what comes before them is known."""
        parent = event.parent_block_hash
        before = _START if parent is None else self._spelled.get(parent)
        is_told = len(event.token_ids) == PAGE_TOKENS * len(event.block_hashes) and event.block_size == PAGE_TOKENS
        if before is None or not is_told or not _are_ids(event.token_ids):
            return
        for name, key in zip(event.block_hashes, spelled_keys(event.token_ids, before), strict=True):
            self._spelled.setdefault(name, key)
            self._spelled.move_to_end(name)
        while len(self._spelled) > MAX_SPELLED:
            self._spelled.popitem(last=False)

    def _add(self, rank: int, name: int, medium: str) -> None:
        key = self._spelled.get(name)
        if key is None or (name, medium) in self._there[rank]:
            return
        self._there[rank][name, medium] = key
        self._counts[key, rank] += 1
        self._holders.add((key,), rank)

    def _remove(self, rank: int, pages: Iterable[tuple[int, str]]) -> None:
        for page in pages:
            key = self._there[rank].pop(page, None)
            if key is None:
                continue
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
        """Returns the source with the host in it; None where nobody can connect to it from here."""
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


class Listener:
    """Keeps `held` as an instance tells, from `start` to `close`. `is_live`: all that it has told is in there."""

    def __init__(self, source: EventEndpoint, name: str):
        self.held = CachedPages(source.num_ranks)
        self._source, self._name = source, name
        self._heard = [False] * source.num_ranks
        self._newest = [0.0] * source.num_ranks  # seconds, of the batches taken in
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_live(self) -> bool:
        """Whether it hears all ranks."""
        return all(self._heard)

    def start(self) -> None:
        """Begins to listen."""
        context = zmq.asyncio.Context.instance()
        self._tasks = [asyncio.create_task(self._follow(context, rank)) for rank in range(self._source.num_ranks)]

    def close(self) -> None:
        """Ends it."""
        for task in self._tasks:
            task.cancel()

    async def _follow(self, context: "zmq.asyncio.Context", rank: int) -> None:
        """Listens to a rank for ever; begins anew, later and later, where it does not answer."""
        pause = _AGAIN_S[0]
        while True:
            try:
                async with self._subscribed(context, rank) as socket:
                    await self._listen(context, socket, rank)
            except _OtherPublisher:
                pass
            except (zmq.ZMQError, TimeoutError, UnreadableEvents) as error:
                _log.warning("%s: no KV events of rank %d (%s)", self._name, rank, str(error) or "it does not answer")
            pause = _AGAIN_S[0] if self._heard[rank] else min(2 * pause, _AGAIN_S[1])
            self._heard[rank] = False
            self.held.forget(rank)
            await asyncio.sleep(pause)

    @contextlib.asynccontextmanager
    async def _subscribed(self, context: "zmq.asyncio.Context", rank: int) -> AsyncIterator["zmq.asyncio.Socket"]:
        with context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
            socket.setsockopt_string(zmq.SUBSCRIBE, self._source.topic)
            socket.connect(endpoint_of(self._source.endpoint, rank))
            yield socket

    async def _listen(self, context: "zmq.asyncio.Context", socket: "zmq.asyncio.Socket", rank: int) -> None:
        """Takes in what comes; raises _OtherPublisher, and TimeoutError where a question has no answer."""
        expected = await self._replayed(context, rank, None)
        while True:
            try:
                async with asyncio.timeout(_IDLE_S):
                    number, payload = _message(await socket.recv_multipart())
            except TimeoutError:
                expected = await self._replayed(context, rank, expected)
                continue
            batch = read_batch(payload)
            if expected is not None and number > expected:
                expected = await self._replayed(context, rank, expected)
            if expected is not None and number < expected:
                if batch.ts > self._newest[rank]:
                    raise _OtherPublisher
                continue  # it was in the replay
            if expected is not None and number > expected:
                self.held.forget(rank)  # what is missing cannot be had any more
            self._take(rank, batch)
            expected, self._heard[rank] = number + 1, True

    async def _replayed(self, context: "zmq.asyncio.Context", rank: int, expected: int | None) -> int | None:
        """Takes in what the instance has kept from number `expected` on, None for all; returns the next number.

        It asks for the one before, too, by whose time it knows whether the same process publishes.
        """
        endpoint = self._source.replay_endpoint
        if endpoint is None:
            return expected
        with context.socket(zmq.DEALER) as socket:  # a new one, so that no late answer to an earlier question comes
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
                    self._heard[rank] = True
                    return expected
                batch = read_batch(payload)
                if number == expected - 1 and known and batch.ts != self._newest[rank]:
                    raise _OtherPublisher
                known = None
                if number >= expected:
                    if number > expected:
                        self.held.forget(rank)  # what lies between has been dropped: what it removed is not known
                    self._take(rank, batch)
                    expected = number + 1

    def _take(self, rank: int, batch: EventBatch) -> None:
        self.held.take(rank, batch)
        self._newest[rank] = batch.ts


class _OtherPublisher(Exception):
    """Another process publishes than the one that has been heard."""


def _message(frames: list[bytes]) -> tuple[int, bytes]:
    if len(frames) != 3 or len(frames[1]) != 8:
        raise UnreadableEvents(f"a message has {len(frames)} parts")
    return int.from_bytes(frames[1], "big", signed=True), frames[2]
