"""The pages of one rank: which are free and how many owners each of the others has. All is O(1) per page."""

from collections.abc import Iterable, Sequence


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
