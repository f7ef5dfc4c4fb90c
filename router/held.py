"""Which pages an instance holds, as its KV events tell: what a prompt finds there is known and not guessed. No zmq.

A page is named by what it spells, a chain of hashes over token ids. The instance's own names have a start that a router
cannot know (model, tenant). So pages of several tenants that spell the same have one name here.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from dsv3.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from dsv3.kv_cache.page_cache import Holders
from router.prompt import PAGE_TOKENS

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


class Held:
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
