"""Pages of one rank with their prefixes: what the scheduler allocates from, shares and gives back."""

from collections.abc import Iterable

from dsv3.cache.keys import Key
from dsv3.cache.page_pool import PagePool
from dsv3.cache.prefix_index import PrefixIndex


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
        page = self.pool.take()
        if page is not None:
            return page
        page = self.index.evict()
        if page is not None:
            self.pool.retain(page)
        return page

    def allocate_several(self, count: int) -> list[int]:
        """Returns `count` pages, which must be available, for one owner each."""
        pages = self.pool.take_several(count)
        while len(pages) < count:
            page = self.allocate()
            assert page is not None
            pages.append(page)
        return pages

    def match(self, keys: Iterable[Key]) -> list[int]:
        """Returns the pages of the longest cached prefix of `keys`; the caller owns none of them yet (see `retain`)."""
        return self.index.longest_match(keys) if self._sharing else []

    def retain(self, pages: Iterable[int]) -> None:
        """Adds an owner to each of `pages`, which `match` has just returned."""
        for page in pages:
            self.pool.retain(page)
            self.index.unpark(page)

    def num_parked(self, pages: Iterable[int]) -> int:
        """Returns how many of `pages` nobody owns: so many fewer are available once they are retained."""
        return sum(self.index.is_parked(page) for page in pages)

    def publish(self, key: Key, page: int) -> bool:
        """Makes a completely written page findable; returns whether it was not before.

        The first of two equal pages stays; the other remains private.
        """
        return self._sharing and self.index.insert(key, page)

    def finds(self, key: Key, page: int) -> bool:
        """Returns whether `key` leads to `page`."""
        return self.index.page_of(key) == page

    def release(self, pages: Iterable[int]) -> None:
        """Takes an owner from each of `pages`; the deepest are parked first, so that they are evicted first."""
        for page in reversed(list(pages)):
            if not self.pool.release(page):
                continue
            if self.index.knows(page):
                self.index.park(page)
            else:
                self.pool.free(page)

    def clear(self) -> None:
        """Makes every page unfindable; those that nobody owns are free."""
        while (page := self.index.evict()) is not None:
            self.pool.free(page)
        self.index.clear()

    def forget(self, pages: Iterable[int]) -> None:
        """Makes owned pages unfindable, because their content cannot be trusted; who shares them keeps them."""
        for page in pages:
            self.index.forget(page)
