"""Which page holds which prefix: content-addressed, so that equal prefixes share pages without a copy.

The key of a page is sha256 over the key of the page before it and its own 64 tokens; the chain starts at a root that
covers everything else the content depends on. sha256, because with a weaker hash a crafted prompt could read
another tenant's pages (CVE GHSA-rm76 in vLLM).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from dsv3.model.batch import PAGE_SIZE

Key = bytes


def root_key(model_id: str, dtype: str, tokenizer_id: str, salt: str) -> Key:
    """Start of a chain; fields are length-prefixed, so that no two different tuples give the same bytes."""
    digest = hashlib.sha256()
    for field in (model_id, dtype, tokenizer_id, salt):
        raw = field.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def next_key(parent: Key, tokens: np.ndarray) -> Key:
    """Key of the page that holds `tokens` ([64] int32) after the page of `parent`."""
    return hashlib.sha256(parent + tokens.astype("<i4", copy=False).tobytes()).digest()


def extend_keys(root: Key, keys: list[Key], tokens: np.ndarray) -> None:
    """Appends to `keys` until it covers every full page of `tokens` ([n] int32)."""
    for start in range(len(keys) * PAGE_SIZE, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        keys.append(next_key(keys[-1] if keys else root, tokens[start : start + PAGE_SIZE]))


class PrefixIndex:
    """Key to page and back, and the least-recently-used order of the pages nobody owns."""

    def __init__(self) -> None:
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._parked: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._page_of)

    @property
    def num_parked(self) -> int:
        """Pages that nobody owns and that can be evicted."""
        return len(self._parked)

    def longest_match(self, keys: Iterable[Key]) -> list[int]:
        """Pages of the longest known prefix of `keys`."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, key: Key, page: int) -> bool:
        """Makes `page` findable by `key`; False, and nothing changes, where the key or the page is known already."""
        if key in self._page_of or page in self._key_of:
            return False
        self._page_of[key], self._key_of[page] = page, key
        return True

    def knows(self, page: int) -> bool:
        return page in self._key_of

    def is_parked(self, page: int) -> bool:
        return page in self._parked

    def park(self, page: int) -> None:
        """The last owner of a known page has left: it becomes the most recently used of the evictable ones."""
        self._parked[page] = None

    def unpark(self, page: int) -> None:
        """The page has an owner again."""
        self._parked.pop(page, None)

    def evict(self) -> int | None:
        """Forgets the least recently used unowned page and returns it."""
        if not self._parked:
            return None
        page, _ = self._parked.popitem(last=False)
        self.forget(page)
        return page

    def forget(self, page: int) -> None:
        """The page is not findable any more."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
