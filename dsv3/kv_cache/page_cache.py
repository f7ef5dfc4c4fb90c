"""Pages of one rank with their prefixes: what the scheduler allocates from, shares and gives back.

`Holders` joins the ranks' prefix indexes by key, so that one look-up asks them all; a router has one of its instances.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from dsv3.kv_cache.events import EventSource
from dsv3.kv_cache.page_keys import Key


class Holders:
    """Key to a bit mask of ranks. The ranks' prefix indexes keep it."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks_of: dict[Key, int] = {}

    def add(self, keys: Iterable[Key], rank: int) -> None:
        """Notes that a rank can find these pages."""
        ranks_of, mine = self._ranks_of, 1 << rank
        for key in keys:
            ranks_of[key] = ranks_of.get(key, 0) | mine

    def remove(self, keys: Iterable[Key], rank: int) -> None:
        """Notes that a rank can find these pages no longer."""
        ranks_of, mine = self._ranks_of, 1 << rank
        for key in keys:
            ranks = ranks_of.get(key)
            if ranks == mine:  # most pages are on one rank
                del ranks_of[key]
            elif ranks is not None:
                ranks_of[key] = ranks & ~mine

    def depths(self, keys: Sequence[Key]) -> np.ndarray | None:
        """Returns how many of the first `keys` each rank can find, `[X]` int64; None where none finds the first."""
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
    """Key to page and back, and the least-recently-used order of the pages nobody owns."""

    def __init__(self) -> None:
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._parked: OrderedDict[int, None] = OrderedDict()
        self.watch: EventSource | None = None  # hears of pages that cannot be found any more
        self._holders: Holders | None = None
        self._rank = 0

    def share(self, holders: Holders, rank: int) -> None:
        """Tells `holders` from now on which pages `rank` can find; none so far."""
        self._holders, self._rank = holders, rank

    def __len__(self) -> int:
        return len(self._page_of)

    @property
    def num_parked(self) -> int:
        """Pages that nobody owns and that can be evicted."""
        return len(self._parked)

    def longest_match(self, keys: Iterable[Key]) -> list[int]:
        """Returns the pages of the longest known prefix of `keys`."""
        pages, page_of = [], self._page_of.get
        for key in keys:
            page = page_of(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def page_of(self, key: Key) -> int | None:
        """Returns the page of a key."""
        return self._page_of.get(key)

    def insert(self, keys: Sequence[Key], pages: Sequence[int]) -> list[int]:
        """Makes pages findable by their keys, as far as neither is known; returns the indices of those that were not.

        Of what is known nothing changes.
        """
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

    def knows(self, page: int) -> bool:
        return page in self._key_of

    def count_parked(self, pages: Iterable[int]) -> int:
        """Returns how many of `pages` nobody owns, though they can be found."""
        return sum(map(self._parked.__contains__, pages))

    def park(self, pages: Sequence[int]) -> Sequence[int]:
        """Notes that pages have no owner any more; returns those that are not known.

        The others become the most recently used of the evictable ones, the last one most of all.
        """
        if not self._key_of:
            return pages
        unknown = []
        for page in pages:
            if page in self._key_of:
                self._parked[page] = None
            else:
                unknown.append(page)
        return unknown

    def unpark(self, pages: Iterable[int]) -> None:
        """Notes that pages have an owner again."""
        if self._parked:
            for page in pages:
                self._parked.pop(page, None)

    def evict(self, count: int) -> list[int]:
        """Forgets up to `count` unowned pages, the least recently used ones, and returns them in this order."""
        parked = self._parked
        pages = [parked.popitem(last=False)[0] for _ in range(min(count, len(parked)))]
        self.forget(pages)
        return pages

    def clear(self) -> None:
        """Makes all pages unfindable; none may be parked."""
        if self.watch is not None and self._page_of:
            self.watch.removed(list(self._page_of))
        if self._holders is not None:
            self._holders.remove(self._page_of, self._rank)
        self._page_of.clear()
        self._key_of.clear()

    def forget(self, pages: Iterable[int]) -> None:
        """Makes pages unfindable."""
        key_of, page_of = self._key_of, self._page_of
        keys = [key for page in pages if (key := key_of.pop(page, None)) is not None]
        for key in keys:
            del page_of[key]
        if self._holders is not None:
            self._holders.remove(keys, self._rank)
        if self.watch is not None and keys:
            self.watch.removed(keys)


class PagePool:
    """Reference counts over `num_pages` pages and the list of free ones.

    A page is *free* (in the list), *held* (count above 0) or *parked* (count 0, but kept out of the list because the
    prefix index still knows its content).
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
        """Returns the owners of `page`."""
        return self._count[page]

    def take(self, count: int) -> list[int]:
        """Returns up to `count` free pages with one owner each."""
        free, counts = self._free, self._count
        if count == 1 and free:  # as an answer asks for them
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
        """Adds an owner to each of some held or parked pages."""
        counts = self._count
        for page in pages:
            counts[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Drops an owner of each; returns those that have none any more, which the caller must now park or free."""
        counts, last = self._count, []
        for page in pages:
            count = counts[page]
            if count == 1:
                last.append(page)
            elif count < 1:
                raise ValueError(f"page {page} is released more often than it was taken")
            counts[page] = count - 1
        return last

    def free(self, pages: Sequence[int]) -> None:
        """Puts unowned pages back into the list."""
        for page in pages:
            if self._count[page]:
                raise ValueError(f"page {page} still has {self._count[page]} owners")
        self._free += pages


class PageCache:
    """A page pool and its prefix index. A page that is given back stays findable until its room is needed."""

    def __init__(self, num_pages: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex()
        self._sharing = enable_prefix_caching

    @property
    def available(self) -> int:
        """Pages that can be allocated now: the free ones and those nobody owns."""
        return self.pool.num_free + self.index.num_parked

    @property
    def in_use(self) -> int:
        """Pages that somebody owns."""
        return self.pool.num_pages - self.available

    def allocate(self) -> int | None:
        """Returns a page for one owner, whose content means nothing; None when every page is owned."""
        return self.allocate_several(1)[0] if self.available else None

    def allocate_several(self, count: int) -> list[int]:
        """Returns `count` pages, which must be available, for one owner each."""
        pages = self.pool.take(count)
        if len(pages) < count:  # then those that nobody has used for the longest time
            evicted = self.index.evict(count - len(pages))
            self.pool.retain(evicted)
            pages += evicted
            assert len(pages) == count
        return pages

    def match(self, keys: Iterable[Key]) -> list[int]:
        """Returns the pages of the longest cached prefix of `keys`; the caller owns none of them yet (see `retain`)."""
        return self.index.longest_match(keys) if self._sharing else []

    def retain(self, pages: Sequence[int]) -> None:
        """Adds an owner to each of `pages`, which `match` has just returned."""
        self.pool.retain(pages)
        self.index.unpark(pages)

    def num_parked(self, pages: Iterable[int]) -> int:
        """Returns how many of `pages` nobody owns: so many fewer are available once they are retained."""
        return self.index.count_parked(pages)

    def publish(self, keys: Sequence[Key], pages: Sequence[int]) -> list[int]:
        """Makes completely written pages findable; returns the indices of those that were not before.

        The first of two equal pages stays; the other remains private.
        """
        return self.index.insert(keys, pages) if self._sharing else []

    def finds(self, key: Key, page: int) -> bool:
        """Returns whether `key` leads to `page`."""
        return self.index.page_of(key) == page

    def release(self, pages: Sequence[int]) -> None:
        """Takes an owner from each of `pages`; the deepest are parked first, so that they are evicted first."""
        self.pool.free(self.index.park(self.pool.release(reversed(pages))))

    def clear(self) -> None:
        """Makes every page unfindable; those that nobody owns are free."""
        self.pool.free(self.index.evict(self.index.num_parked))
        self.index.clear()

    def forget(self, pages: Iterable[int]) -> None:
        """Makes owned pages unfindable, because their content cannot be trusted; who shares them keeps them."""
        self.index.forget(pages)
