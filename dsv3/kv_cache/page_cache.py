"""Pages of one rank with their prefixes: what the scheduler allocates from, shares and gives back."""

from collections.abc import Iterable, Sequence

from dsv3.kv_cache.keys import Key
from dsv3.kv_cache.page_pool import PagePool
from dsv3.kv_cache.prefix_index import PrefixIndex


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
