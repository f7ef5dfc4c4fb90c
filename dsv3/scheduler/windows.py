"""Window pages of running requests: which ones each has, and which stay so that others can continue its prefix.

In layers with a window a step reads the last tokens alone, so a request has pages there for its last tokens only. A
cached prefix can be continued behind a page whose window page is cached too, under the same key. Prompts and answers
leave the window page of their last full page. Others may share a shorter prefix, and where it ends is not known yet: so
a prompt also leaves up to `SPREAD` window pages at equal distances. These are provisional, and evicted before others,
until a request continues one. A prompt that finds more of its prefix cached than it can continue leaves the window page
of the last of these pages.
"""

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.kv_cache.page_keys import Key
from dsv3.scheduler.batch_slots import BatchSlots, RankPages
from dsv3.scheduler.sequence import Sequence

SPREAD = 16
"""The most provisional window pages of a prompt."""


class WindowPages:
    """Allocates, publishes and releases the window pages of running requests (`Sequence.window_pages`)."""

    def __init__(self, cfg: EngineConfig, slots: BatchSlots, pages: RankPages) -> None:
        self._cfg, self._slots, self._pages = cfg, slots, pages

    def start(self, sequence: Sequence, rank: int, cached: int) -> None:
        """Attaches the window page of the last cached page to a request that starts.

        It is that of the last of the `cached` pages or, where a tier has more, one to load. Where more pages are cached
        than can be continued, the request leaves a window page for the next one.
        """
        cache, mine = self._pages.window(rank), sequence.window_pages
        if sequence.load_stop > cached:
            [mine[sequence.load_stop - 1]] = cache.allocate(1)
        elif cached:
            page = cache.index.page_of(sequence.keys[cached - 1])
            assert page is not None  # `PageCache.match` ends there
            cache.retain([page])
            mine[cached - 1] = page
        found = len(self._pages.caches[rank].index.longest_match(sequence.keys))
        sequence.snapshots = {found - 1} if found > max(cached, sequence.load_stop) else set()

    def can_start(self, rank: int) -> bool:
        """Returns whether a request that starts on `rank` may get a window page."""
        return self._pages.window(rank).available > self._slots.num_running(rank)

    def take_for_chunk(self, sequence: Sequence, start: int, stop: int) -> bool:
        """Allocates the window pages that tokens `start` to `stop` of a prompt are written to.

        Returns False, and allocates none, while there are too few: those of launched steps will be released.
        """
        cfg, mine = self._cfg, sequence.window_pages
        end = len(sequence.pages) if stop == len(sequence.tokens) else cfg.pages_for(stop)
        needed = [i for i in range(cfg.first_window_page(stop), end) if i not in mine]
        rank = self._slots.rank_of(sequence.slot)
        cache, running = self._pages.window(rank), self._slots.num_running(rank)
        if cache.available < len(needed) + running:
            return False
        wanted = self._left_by_chunk(sequence, range(start // cfg.page_size, stop // cfg.page_size))
        more = [i for i in wanted if i not in mine and i not in needed]
        needed += more[: cache.available - len(needed) - running]
        mine.update(zip(needed, cache.allocate(len(needed)), strict=True))
        return True

    def _left_by_chunk(self, sequence: Sequence, pages: range) -> list[int]:
        """Returns the indices in `pages`, all of which a chunk fills, at which it leaves a window page.

        First those where other prompts part from this one, then provisional ones that are not cached yet.
        """
        parts = [i for i in sorted(sequence.snapshots) if i in pages]
        if not self._cfg.enable_prefix_caching:
            return parts
        index = self._pages.window(self._slots.rank_of(sequence.slot)).index
        step = distance(len(sequence.tokens) // self._cfg.page_size)
        spread = [i for i in pages if (i + 1) % step == 0 and index.page_of(sequence.keys[i]) is None]
        return parts + [i for i in spread if i not in sequence.snapshots]

    def affordable(self, slots: np.ndarray) -> np.ndarray:
        """Returns for each of `slots` whether its rank has a window page for it now, `[n]` bool."""
        fits, taken = np.ones(len(slots), bool), [0] * self._cfg.num_ranks
        for i, rank in enumerate((slots // self._cfg.max_num_seqs).tolist()):
            fits[i] = taken[rank] < self._pages.window(rank).available
            taken[rank] += 1
        return fits

    def extend(self, sequence: Sequence) -> None:
        """Allocates the window page beside the request's last page, and releases those that it no longer needs."""
        rank = self._slots.rank_of(sequence.slot)
        self.release_before(sequence, int(self._slots.known[sequence.slot]) - 1)  # the last one is not computed
        [sequence.window_pages[len(sequence.pages) - 1]] = self._pages.window(rank).allocate(1)

    def release_before(self, sequence: Sequence, tokens: int) -> None:
        """Releases the window pages that a request with so many computed `tokens` no longer needs."""
        first, mine = self._cfg.first_window_page(tokens), sequence.window_pages
        if passed := [i for i in mine if i < first]:
            self._pages.free(self._pages.window(self._slots.rank_of(sequence.slot)), [mine.pop(i) for i in passed])

    def publish(self, sequence: Sequence, rank: int, count: int) -> list[tuple[bytes, int]]:
        """Inserts the window pages of a request's first `count` pages under their keys.

        Returns those inserted that are not provisional: a tier may keep them.
        """
        cache = self._pages.window(rank)
        full = sorted((i, page) for i, page in sequence.window_pages.items() if i < count)
        fresh = [full[i] for i in cache.publish([sequence.keys[i] for i, _ in full], [page for _, page in full])]
        last = self._cfg.first_window_page(max(len(sequence.tokens), count * self._cfg.page_size))
        kept = [(i, page) for i, page in fresh if i >= last or i in sequence.snapshots]
        cache.index.set_provisional({page for _, page in fresh} - {page for _, page in kept})
        return [(sequence.keys[i], page) for i, page in kept]

    def continued(self, sequence: Sequence) -> list[tuple[Key, int]]:
        """Returns the window page that a request has just found cached, with its key."""
        return [(sequence.keys[i], page) for i, page in sequence.window_pages.items() if i < sequence.num_found]

    def invalidate(self, sequence: Sequence, rank: int) -> None:
        """Removes from the index the window pages that a request has written."""
        written = [page for i, page in sequence.window_pages.items() if i >= sequence.num_found]
        self._pages.window(rank).invalidate(written)

    def release(self, sequence: Sequence, rank: int) -> None:
        """Releases all window pages of a request that leaves its slot."""
        pages = list(sequence.window_pages.values())
        sequence.window_pages, sequence.snapshots = {}, set()
        self._pages.free(self._pages.window(rank), pages)

    def row(self, sequence: Sequence) -> np.ndarray:
        """Returns the window pages at the indices of the request's pages, `[n]` int32, -1 for none."""
        row = np.full(len(sequence.pages), -1, np.int32)
        for i, page in sequence.window_pages.items():
            row[i] = page
        return row


def distance(num_pages: int) -> int:
    """Returns the distance, a power of two, of at most `SPREAD` window pages that a prompt of full pages leaves."""
    return 1 << max(0, (num_pages - 1) // SPREAD).bit_length()
