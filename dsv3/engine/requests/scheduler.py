"""Owns the requests: takes them in, gives them slots and pages, notes their tokens, lets them go. Imports no jax.

Every decision assumes that each launched step goes on as planned; results arrive one step late through `accept`. So a
request may have one step too many in flight when it stops: that step's tokens are dropped, and the pages it may still
write are held back from new owners until it has been collected. The jobs of a step (`dsv3.engine.jobs`) plan with this.
"""

from time import perf_counter

import numpy as np

from dsv3.cache.keys import extend_keys
from dsv3.cache.page import PAGE_SIZE
from dsv3.cache.page_cache import PageCache
from dsv3.engine.config import EngineConfig
from dsv3.engine.requests.admission import Admission
from dsv3.engine.requests.pages import RankPages
from dsv3.engine.requests.queue import WaitingQueue
from dsv3.engine.requests.sequence import Sequence, State
from dsv3.engine.requests.slots import SlotTable


class Scheduler:
    """Continuous batching with chunked prefill over the ranks' slots and pages."""

    def __init__(self, cfg: EngineConfig, vocab_size: int) -> None:
        self.cfg = cfg
        self.slots = SlotTable(cfg, vocab_size)
        self.pages = RankPages(cfg)
        self.queue = WaitingQueue()
        self.admission = Admission(cfg, self.slots, self.pages, self.queue)
        self.sequences: dict[int, Sequence] = {}  # every request that has not ended
        self.prefilling: list[list[Sequence]] = [[] for _ in range(cfg.num_ranks)]  # in order of admission
        self.num_preemptions = 0
        self.prompt_tokens = 0  # computed, not found in the cache
        self.generated_tokens = 0
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or pages wait for a step to be collected."""
        return bool(self.sequences) or self.pages.holds_back

    @property
    def waiting(self) -> list[Sequence]:
        """The queue, oldest first."""
        return list(self.queue)

    @property
    def caches(self) -> list[PageCache]:
        """The page cache of each rank."""
        return self.pages.caches

    def add(self, sequence: Sequence) -> None:
        """Puts a request at the end of the queue."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.queued_at = perf_counter()
        self.sequences[sequence.id] = sequence
        self.queue.push(sequence)

    def admit(self) -> None:
        """Starts as many waiting requests as fit."""
        for sequence in self.admission.admit():
            self.prefilling[self.slots.rank_of(sequence.slot)].append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a request out wherever it is; its pages are free once no launched step can write them."""
        del self.sequences[sequence.id]
        if sequence.slot >= 0:
            self._vacate(sequence, State.ENDED)
        else:
            self.queue.remove(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """Keeps the content of a request's pages from being shared: its logits were not finite."""
        self.caches[self.slots.rank_of(sequence.slot)].forget(sequence.pages)

    def abandon(self) -> None:
        """Notes that no launched step will be collected any more."""
        self.pages.collect(self.pages.launched)

    def publish(self, sequence: Sequence, start: int, stop: int) -> None:
        """Makes the pages findable that the latents of tokens `start` to `stop`, now in the cache, have completed."""
        if not self.cfg.enable_prefix_caching:
            return
        first, last = start // PAGE_SIZE, stop // PAGE_SIZE
        if last > len(sequence.keys):
            extend_keys(sequence.root, sequence.keys, self.slots.history[sequence.slot, : last * PAGE_SIZE])
        rank = self.slots.rank_of(sequence.slot)
        cache = self.caches[rank]
        for index in range(first, last):
            key = sequence.keys[index]
            cache.publish(key, sequence.pages[index])
            if key in sequence.pending:
                sequence.pending.discard(key)
                self.pages.pending[rank].discard(key)
                self.queue.wake(rank, key)

    def extend(self, short: np.ndarray) -> tuple[dict[int, int], list[int]]:
        """Gives one more page to each of the slots `short`, the oldest request first.

        Without a free page the youngest of the rank is pre-empted. Its pages may still be written by the step in
        flight, so the request in need sits this step out.

        Returns new pages by slot, and the slots that sit out.
        """
        new_pages: dict[int, int] = {}
        stalled: list[int] = []
        demand = [0] * self.cfg.num_ranks
        sequences = [self.slots.sequences[slot] for slot in short.tolist()]
        for sequence in sorted((s for s in sequences if s is not None), key=_by_arrival):
            slot = sequence.slot
            if slot < 0:
                continue  # pre-empted for an older one
            page = self._page_for(sequence, demand)
            if page is not None:
                sequence.pages.append(page)
                self.slots.capacity[slot] += PAGE_SIZE
                new_pages[slot] = page
            elif sequence.slot >= 0:
                stalled.append(slot)
        return new_pages, [slot for slot in stalled if self.slots.decoding[slot]]

    def _page_for(self, sequence: Sequence, demand: list[int]) -> int | None:
        """A page on the request's rank, pre-empting as little as needed; None where it has to wait for one."""
        rank = self.slots.rank_of(sequence.slot)
        cache = self.caches[rank]
        page = cache.allocate()
        demand[rank] += page is None
        while page is None and self.pages.num_held[rank] < demand[rank]:
            youngest = max(self.slots.on_rank(rank), key=_by_arrival)
            self._preempt(youngest)
            if youngest is sequence:
                return None
            page = cache.allocate()
            demand[rank] -= page is not None
        return page

    def _preempt(self, sequence: Sequence) -> None:
        """Sends a running request back to the queue; it will compute its known tokens again."""
        slot = sequence.slot
        sequence.tokens = self.slots.history[slot, : self.slots.known[slot]].copy()
        if self.cfg.enable_prefix_caching:
            extend_keys(sequence.root, sequence.keys, sequence.tokens)
        self._vacate(sequence, State.WAITING)
        self.queue.push(sequence)
        self.num_preemptions += 1

    def _vacate(self, sequence: Sequence, state: State) -> None:
        """Takes slot and pages from a running request, and lets those go on that waited for its pages."""
        rank = self.slots.rank_of(sequence.slot)
        if sequence in self.prefilling[rank]:
            self.prefilling[rank].remove(sequence)
        pending, sequence.pending = sequence.pending, set()
        self.pages.pending[rank] -= pending
        for key in pending:
            self.queue.wake(rank, key)
        self.slots.leave(sequence, state)
        pages, sequence.pages = sequence.pages, []
        self.pages.give_back(rank, pages)


def _by_arrival(sequence: Sequence) -> int:
    return sequence.arrival
