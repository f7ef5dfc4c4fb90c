"""The pages of all ranks: their owners, those being filled, and those that a launched step may still write."""

from collections import Counter, deque
from collections.abc import Sequence

from dsv3.config.engine import EngineConfig
from dsv3.kv_cache.keys import Key
from dsv3.kv_cache.page_cache import Holders, PageCache
from dsv3.scheduler.sequence import Sequence as Request


class RankPages:
    """One page cache per rank.

    Steps run on the device in launch order. When a request leaves while a step that contains it is in flight, its pages
    are held back from new owners until that step has been collected.
    """

    def __init__(self, cfg: EngineConfig) -> None:
        self.caches = [
            PageCache(cfg.num_pages, enable_prefix_caching=cfg.enable_prefix_caching) for _ in range(cfg.num_ranks)
        ]
        self.holders = Holders(cfg.num_ranks)
        if cfg.num_ranks > 1:
            for rank, cache in enumerate(self.caches):
                cache.index.share(self.holders, rank)
        # Keys of pages being filled, with who tells when they are; `Sequence.pending` are those of one sequence.
        self.pending: list[dict[Key, Request]] = [{} for _ in range(cfg.num_ranks)]
        self.num_held = [0] * cfg.num_ranks
        self._held: deque[tuple[int, int, list[int]]] = deque()  # (step, rank, pages)
        self.launched = 0  # number of the last launched step
        self.collected = 0  # number of the last one whose results are here

    def found(self, keys: Sequence[Key], ranks: Sequence[int] | None = None) -> int:
        """Returns how many pages of a prompt, from its first on, that of `ranks` (None: of all) finds that has most."""
        if len(self.caches) == 1:
            return len(self.caches[0].match(keys))
        depths = self.holders.depths(keys)
        if depths is None:
            return 0
        return int(depths.max() if ranks is None else depths[ranks].max())

    @property
    def holds_back(self) -> bool:
        """Whether pages wait for a step to be collected."""
        return bool(self._held)

    @property
    def in_use(self) -> int:
        """Pages that somebody owns, on all ranks."""
        return sum(cache.in_use for cache in self.caches)

    def begin_step(self) -> int:
        """Returns the number of a step that is about to be launched."""
        self.launched += 1
        return self.launched

    def collect(self, step: int) -> None:
        """Notes that `step` and all before it have finished: pages that only they could write are free."""
        self.collected = step
        while self._held and self._held[0][0] <= step:
            _, rank, pages = self._held.popleft()
            self.num_held[rank] -= len(pages)
            self.caches[rank].release(pages)

    def coming(self, rank: int) -> set[int]:
        """Returns the held pages of `rank` that nobody owns once the launched steps have been collected."""
        held = Counter(page for _, owner, pages in self._held if owner == rank for page in pages)
        pool = self.caches[rank].pool
        return {page for page, count in held.items() if pool.references(page) == count}

    def give_back(self, rank: int, pages: list[int]) -> None:
        """Releases the pages of a request once no launched step can write them."""
        if self.launched > self.collected:
            self._held.append((self.launched, rank, pages))
            self.num_held[rank] += len(pages)
        else:
            self.caches[rank].release(pages)
