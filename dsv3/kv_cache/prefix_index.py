"""Knows which page holds which prefix, so that equal prefixes share pages without a copy."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from dsv3.kv_cache.events.record import Watch
from dsv3.kv_cache.holders import Holders
from dsv3.kv_cache.keys import Key


class PrefixIndex:
    """Key to page and back, and the least-recently-used order of the pages nobody owns."""

    def __init__(self) -> None:
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._parked: OrderedDict[int, None] = OrderedDict()
        self.watch: Watch | None = None  # hears of pages that cannot be found any more
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
