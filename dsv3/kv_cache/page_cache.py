"""The page cache of one rank (vLLM: KVCacheManager): page pool with reference counts, prefix cache, LRU eviction.

`RankPrefixIndex` joins the prefix indexes of all ranks by key, so that one lookup covers them; a router has one of its
instances.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from dsv3.kv_cache.events import EventSource
from dsv3.kv_cache.page_keys import Key

PROVISIONAL_SHARE = 0.25
"""The share of window pages that provisional ones may keep from being used for others."""


class RankPrefixIndex:
    """Block hash (key) to a bit mask of the ranks that have the page cached; the ranks' prefix indexes update it."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks_of: dict[Key, int] = {}

    def add(self, keys: Iterable[Key], rank: int) -> None:
        ranks_of, mine = self._ranks_of, 1 << rank
        for key in keys:
            ranks_of[key] = ranks_of.get(key, 0) | mine

    def remove(self, keys: Iterable[Key], rank: int) -> None:
        ranks_of, mine = self._ranks_of, 1 << rank
        for key in keys:
            ranks = ranks_of.get(key)
            if ranks == mine:  # most pages are on one rank
                del ranks_of[key]
            elif ranks is not None:
                ranks_of[key] = ranks & ~mine

    def depths(self, keys: Sequence[Key]) -> np.ndarray | None:
        """Does the prefix cache lookup on all ranks: returns how many leading `keys` each has; None if all are 0.

        The result is `[X]` int64.
        """
        alive = self._ranks_of.get(keys[0], 0) if keys else 0
        if not alive:
            return None
        depths, ranks_of = np.zeros(self._num_ranks, np.int64), self._ranks_of
        for depth, key in enumerate(keys):
            still = alive & ranks_of.get(key, 0)
            if still != alive:
                _set(depths, alive & ~still, depth)
                alive = still
                if not alive:
                    return depths
        _set(depths, alive, len(keys))
        return depths


def _set(depths: np.ndarray, ranks: int, depth: int) -> None:
    while ranks:
        lowest = ranks & -ranks
        depths[lowest.bit_length() - 1] = depth
        ranks ^= lowest


class PrefixIndex:
    """Prefix cache index: block hash (key) to page and back, and the LRU order of the pages without an owner."""

    def __init__(self, num_provisional: int = 0) -> None:
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._num_provisional = num_provisional  # evictable provisional pages beyond this many are evicted first
        self._provisional: set[int] = set()  # cached pages that no request has continued yet
        self._evictable_provisional: OrderedDict[int, None] = OrderedDict()
        self.events: EventSource | None = None  # of removed pages
        self._holders: RankPrefixIndex | None = None
        self._rank = 0

    def attach(self, rank_index: RankPrefixIndex, rank: int) -> None:
        """Records in `rank_index` from now on which pages `rank` has cached; none so far."""
        self._holders, self._rank = rank_index, rank

    def __len__(self) -> int:
        return len(self._page_of)

    @property
    def num_evictable(self) -> int:
        """Cached pages without an owner."""
        return len(self._evictable) + len(self._evictable_provisional)

    def longest_match(self, keys: Iterable[Key]) -> list[int]:
        """Returns the pages of the longest cached prefix of `keys`."""
        pages, page_of = [], self._page_of.get
        for key in keys:
            page = page_of(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def page_of(self, key: Key) -> int | None:
        return self._page_of.get(key)

    def insert(self, keys: Sequence[Key], pages: Sequence[int]) -> list[int]:
        """Inserts pages under their keys where neither is in the index; returns the indices of the inserted ones."""
        page_of, key_of = self._page_of, self._key_of
        fresh = list(range(len(keys)))
        if not (page_of.keys().isdisjoint(keys) and key_of.keys().isdisjoint(pages)):
            fresh = [i for i in fresh if keys[i] not in page_of and pages[i] not in key_of]
            keys, pages = [keys[i] for i in fresh], [pages[i] for i in fresh]
        page_of.update(zip(keys, pages, strict=True))
        key_of.update(zip(pages, keys, strict=True))
        if self._holders is not None:
            self._holders.add(keys, self._rank)
        return fresh

    def set_provisional(self, pages: Iterable[int]) -> None:
        """Makes owned pages provisional until a request continues them (`mark_owned`)."""
        self._provisional.update(pages)

    def count_evictable(self, pages: Iterable[int]) -> int:
        return sum(page in self._evictable or page in self._evictable_provisional for page in pages)

    def mark_unowned(self, pages: Sequence[int]) -> Sequence[int]:
        """Makes cached pages evictable that lost their last owner, in LRU order; returns those that are not cached.

        The last one becomes the most recently used.
        """
        if not self._key_of:
            return pages
        without_key = []
        for page in pages:
            if page in self._provisional:
                self._evictable_provisional[page] = None
            elif page in self._key_of:
                self._evictable[page] = None
            else:
                without_key.append(page)
        return without_key

    def mark_owned(self, pages: Iterable[int]) -> None:
        """Removes pages from the evictable ones: they have an owner again, and are no longer provisional."""
        if self._evictable or self._provisional:
            for page in pages:
                self._evictable.pop(page, None)
                self._evictable_provisional.pop(page, None)
                self._provisional.discard(page)

    def evict(self, count: int) -> list[int]:
        """Evicts up to `count` pages without an owner, least recently used first, and returns them in this order.

        Provisional pages beyond `num_provisional` come first, the others of them last.
        """
        kept, provisional = self._evictable, self._evictable_provisional
        first = min(count, max(0, len(provisional) - self._num_provisional))
        pages = [provisional.popitem(last=False)[0] for _ in range(first)]
        pages += [kept.popitem(last=False)[0] for _ in range(min(count - len(pages), len(kept)))]
        pages += [provisional.popitem(last=False)[0] for _ in range(min(count - len(pages), len(provisional)))]
        self.invalidate(pages)
        return pages

    def clear(self) -> None:
        """Removes all pages from the index; none may be evictable."""
        if self.events is not None and self._page_of:
            self.events.removed(list(self._page_of))
        if self._holders is not None:
            self._holders.remove(self._page_of, self._rank)
        self._page_of.clear()
        self._key_of.clear()
        self._provisional.clear()

    def invalidate(self, pages: Iterable[int]) -> None:
        """Removes pages from the index."""
        key_of, page_of = self._key_of, self._page_of
        pages = list(pages)
        keys = [key for page in pages if (key := key_of.pop(page, None)) is not None]
        self._provisional.difference_update(pages)
        for key in keys:
            del page_of[key]
        if self._holders is not None:
            self._holders.remove(keys, self._rank)
        if self.events is not None and keys:
            self.events.removed(keys)


class PagePool:
    """Reference counts over `num_pages` pages and the list of free ones.

    A page is *free* (in the list), *owned* (count above 0) or *evictable* (count 0, but not in the list because the
    prefix index still has it).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a page pool needs at least one page, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._count = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        return self._count[page]

    def allocate(self, count: int) -> list[int]:
        """Returns up to `count` free pages with one owner each."""
        free, counts = self._free, self._count
        if count == 1 and free:  # the common case: the next page of an answer
            counts[free[-1]] = 1
            return [free.pop()]
        start = max(0, len(free) - count)
        pages = free[start:]
        pages.reverse()
        del free[start:]
        for page in pages:
            counts[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds an owner to each of some owned or evictable pages."""
        counts = self._count
        for page in pages:
            counts[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Removes an owner of each; returns those without one, which the caller must make evictable or free."""
        counts, last = self._count, []
        for page in pages:
            count = counts[page]
            if count == 1:
                last.append(page)
            elif count < 1:
                raise ValueError(f"page {page} is released more often than it was allocated")
            counts[page] = count - 1
        return last

    def free(self, pages: Sequence[int]) -> None:
        """Returns pages without an owner to the free list."""
        for page in pages:
            if self._count[page]:
                raise ValueError(f"page {page} still has {self._count[page]} owners")
        self._free += pages


class PageCache:
    """A page pool and its prefix index. A released page stays cached until it is evicted.

    With `num_window_pages` there is a `window`, the cache of window pages: a cached prefix can be continued only behind
    a page under whose key a window page is cached too. Up to `num_provisional` cached pages are kept though no request
    has continued them (`PrefixIndex.set_provisional`).
    """

    def __init__(
        self,
        num_pages: int,
        *,
        enable_prefix_caching: bool = True,
        num_window_pages: int = 0,
        num_provisional: int = 0,
    ) -> None:
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex(num_provisional)
        self._sharing = enable_prefix_caching
        self.window: PageCache | None = None
        if num_window_pages:
            provisional = int(PROVISIONAL_SHARE * num_window_pages)
            self.window = PageCache(
                num_window_pages, enable_prefix_caching=enable_prefix_caching, num_provisional=provisional
            )

    @property
    def available(self) -> int:
        """Pages that can be allocated now: free or evictable."""
        return self.pool.num_free + self.index.num_evictable

    @property
    def in_use(self) -> int:
        return self.pool.num_pages - self.available

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` pages, which must be available, with one owner each; evicts cached ones where needed."""
        pages = self.pool.allocate(count)
        if len(pages) < count:
            evicted = self.index.evict(count - len(pages))
            self.pool.retain(evicted)
            pages += evicted
            assert len(pages) == count
        return pages

    def match(self, keys: Sequence[Key]) -> list[int]:
        """Does the prefix cache lookup: returns the pages of the longest cached prefix that can be continued.

        `retain` adds owners.
        """
        pages = self.index.longest_match(keys) if self._sharing else []
        if self.window is not None:
            while pages and self.window.index.page_of(keys[len(pages) - 1]) is None:
                pages.pop()
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """Adds an owner to each of `pages`, which `match` has just returned."""
        self.pool.retain(pages)
        self.index.mark_owned(pages)

    def num_evictable(self, pages: Iterable[int]) -> int:
        """Returns how many of `pages` have no owner: so many fewer are available once they are retained."""
        return self.index.count_evictable(pages)

    def publish(self, keys: Sequence[Key], pages: Sequence[int]) -> list[int]:
        """Inserts completely written pages into the prefix cache; returns the indices of those that were not in it.

        Of two equal pages the first stays; the other remains private.
        """
        return self.index.insert(keys, pages) if self._sharing else []

    def is_page_of(self, key: Key, page: int) -> bool:
        return self.index.page_of(key) == page

    def release(self, pages: Sequence[int]) -> None:
        """Removes an owner from each of `pages`; the deepest become evictable first, so that they are evicted first."""
        self.pool.free(self.index.mark_unowned(self.pool.release(reversed(pages))))

    def clear(self) -> None:
        """Empties the prefix cache; pages without an owner are free."""
        if self.window is not None:
            self.window.clear()
        self.pool.free(self.index.evict(self.index.num_evictable))
        self.index.clear()

    def invalidate(self, pages: Iterable[int]) -> None:
        """Removes owned pages from the prefix cache, because their content is wrong; their owners keep them."""
        self.index.invalidate(pages)
