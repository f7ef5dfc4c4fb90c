"""Which request runs when, and in which pages: host state only, no jax.

Each call of `plan` decides one step on the assumption that every launched step goes on as planned; results arrive one
step late through `collect`. So a request may have one step too many in flight when it stops: that step's token is
dropped, and the pages it may still write are held back from new owners until it has been collected.
"""

from collections import deque
from time import perf_counter

import numpy as np

from dsv3.cache.keys import extend_keys
from dsv3.cache.page import PAGE_SIZE, pages_for
from dsv3.cache.page_cache import PageCache
from dsv3.engine.config import EngineConfig, bucket
from dsv3.engine.plan import Chunk, DecodePlan, PrefillPlan, Rows, StepPlan
from dsv3.engine.sequence import Sequence
from dsv3.engine.slots import SlotTable


class Scheduler:
    """Continuous batching with chunked prefill over the ranks' slots and pages."""

    def __init__(self, cfg: EngineConfig, vocab_size: int) -> None:
        self.cfg = cfg
        self.slots = SlotTable(cfg, vocab_size)
        self.caches = [
            PageCache(cfg.num_pages, enable_prefix_caching=cfg.enable_prefix_caching) for _ in range(cfg.num_ranks)
        ]
        self.sequences: dict[int, Sequence] = {}  # every request that has not finished
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0  # of these, found
        self._prefilling: list[list[Sequence]] = [[] for _ in range(cfg.num_ranks)]  # in order of admission
        self._held_back: deque[tuple[int, int, list[int]]] = deque()  # (step, rank, pages)
        self._held_pages = [0] * cfg.num_ranks
        self._pending: list[set[bytes]] = [set() for _ in range(cfg.num_ranks)]
        self._launched = 0  # number of the last planned step
        self._collected = 0
        self._arrivals = 0
        self._decode_rows: Rows | None = None
        self._rows_version = -1
        self._decode_features = (0, False)
        self._decode_template = np.empty((0, 0, 2), np.int32)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences) or bool(self._held_back)

    @property
    def pages_in_use(self) -> int:
        return sum(cache.in_use for cache in self.caches)

    def add(self, sequence: Sequence) -> None:
        """Puts a request at the end of the queue."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.queued_at = perf_counter()
        self.sequences[sequence.id] = sequence
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a request out wherever it is; its pages are free once no launched step can write them."""
        del self.sequences[sequence.id]
        if sequence.slot >= 0:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """The content of the request's pages is not to be shared (its logits were not finite)."""
        self.caches[self.slots.rank_of(sequence.slot)].forget(sequence.pages)

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be launched."""
        decode = self._plan_decode()
        self._admit()
        prefill = self._plan_prefill()
        if decode is None and prefill is None:
            return None
        self._launched += 1
        return StepPlan(self._launched, prefill, decode)

    def collected(self, step: int) -> None:
        """Step `step` and all before it have finished: pages that only they could write are free."""
        self._collected = step
        while self._held_back and self._held_back[0][0] <= step:
            _, rank, pages = self._held_back.popleft()
            self._held_pages[rank] -= len(pages)
            self.caches[rank].release(pages)

    def abandon(self) -> None:
        """No launched step will be collected any more."""
        self.collected(self._launched)

    def publish(self, sequence: Sequence, start: int, stop: int) -> None:
        """Latents of tokens `start` to `stop` are in the cache: makes the pages they completed findable."""
        if not self.cfg.enable_prefix_caching:
            return
        first, last = start // PAGE_SIZE, stop // PAGE_SIZE
        if last > len(sequence.keys):
            extend_keys(sequence.root, sequence.keys, self.slots.history[sequence.slot, : last * PAGE_SIZE])
        rank = self.slots.rank_of(sequence.slot)
        for index in range(first, last):
            key = sequence.keys[index]
            self.caches[rank].publish(key, sequence.pages[index])
            if key in sequence.pending:
                sequence.pending.discard(key)
                self._pending[rank].discard(key)

    def _vacate(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running request."""
        rank = self.slots.rank_of(sequence.slot)
        if sequence in self._prefilling[rank]:
            self._prefilling[rank].remove(sequence)
        self._pending[rank] -= sequence.pending
        sequence.pending.clear()
        self.slots.leave(sequence)
        pages, sequence.pages = sequence.pages, []
        if self._launched > self._collected:
            self._held_back.append((self._launched, rank, pages))
            self._held_pages[rank] += len(pages)
        else:
            self.caches[rank].release(pages)

    def _preempt(self, sequence: Sequence) -> None:
        """Sends a running request back to the head of the queue; it will compute its known tokens again."""
        slot = sequence.slot
        sequence.tokens = self.slots.history[slot, : self.slots.known[slot]].copy()
        if self.cfg.enable_prefix_caching:
            extend_keys(sequence.root, sequence.keys, sequence.tokens)
        self._vacate(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit(self) -> None:
        """First come, first served. One exception: a prompt whose next page a running prefill is just computing
        waits for it, and the others may pass."""
        passed = []
        while self.waiting and self.slots.num_free:
            sequence = self.waiting.popleft()
            choice = self._choose_rank(sequence)
            if choice is None:
                self.waiting.appendleft(sequence)
                break
            rank, pages = choice
            if self._is_being_computed(sequence, rank, len(pages)):
                passed.append(sequence)
            else:
                self._start(sequence, rank, pages)
        self.waiting.extendleft(reversed(passed))

    def _choose_rank(self, sequence: Sequence) -> tuple[int, list[int]] | None:
        """The rank for a request and the cached pages of its prefix there; None where it fits on no rank now.

        The least busy rank with a slot and pages enough; the longer cached prefix decides ties. Pages: those of all
        known tokens, and half a page for each running request, so that they do not pre-empt the newcomer at once.
        """
        useful = sequence.keys[: (len(sequence.tokens) - 1) // PAGE_SIZE]  # one token at least must be computed
        needed = pages_for(len(sequence.tokens))
        choices = []
        for rank in range(self.cfg.num_ranks):
            cache, running = self.caches[rank], self.slots.num_running(rank)
            cached = cache.match(useful) if self.slots.has_room(rank) else []
            spare = cache.available - cache.num_parked(cached) - (needed - len(cached)) - running // 2
            if self.slots.has_room(rank) and spare >= 0:
                choices.append((running, -len(cached), rank, cached))
        if not choices:
            return None
        _, _, rank, cached = min(choices)
        return rank, cached

    def _is_being_computed(self, sequence: Sequence, rank: int, matched: int) -> bool:
        useful = min((len(sequence.tokens) - 1) // PAGE_SIZE, len(sequence.keys))
        return matched < useful and sequence.keys[matched] in self._pending[rank]

    def _start(self, sequence: Sequence, rank: int, cached: list[int]) -> None:
        """Gives a request a slot and the pages of all its known tokens."""
        cache = self.caches[rank]
        cache.retain(cached)
        fresh = [cache.allocate() for _ in range(pages_for(len(sequence.tokens)) - len(cached))]
        sequence.pages = [*cached, *(page for page in fresh if page is not None)]
        sequence.prefilled = len(cached) * PAGE_SIZE
        if sequence.queue_seconds is None:
            sequence.queue_seconds = perf_counter() - sequence.queued_at
        self._count_prefix(sequence)
        if self.cfg.enable_prefix_caching:
            sequence.pending = set(sequence.keys[len(cached) :]) - self._pending[rank]
            self._pending[rank] |= sequence.pending
        self.slots.enter(sequence, rank)
        self._prefilling[rank].append(sequence)

    def _count_prefix(self, sequence: Sequence) -> None:
        if sequence.started or not self.cfg.enable_prefix_caching:
            return
        sequence.num_cached = sequence.prefilled
        self.prefix_queries += sequence.prompt_length
        self.prefix_hits += sequence.num_cached

    def _plan_prefill(self) -> PrefillPlan | None:
        if not any(self._prefilling):
            return None
        rows = self.cfg.prefill_rows(self.cfg.prefill_buckets[-1])
        chunks = [self._take_chunks(rank, rows) for rank in range(self.cfg.num_ranks)]
        tokens = self._prefill_bucket(chunks)
        sampled, variant, logprobs = self._launch_chunks(chunks)
        return PrefillPlan(tokens, chunks, sampled, variant, logprobs)

    def _take_chunks(self, rank: int, rows: int) -> list[Chunk]:
        budget, chunks = self.cfg.max_num_batched_tokens, []
        for sequence in self._prefilling[rank][:rows]:
            stop = min(len(sequence.tokens), sequence.prefilled + budget)
            chunks.append(Chunk(sequence, int(self.slots.epoch[sequence.slot]), sequence.prefilled, stop))
            budget -= stop - sequence.prefilled
            if not budget:
                break
        return chunks

    def _prefill_bucket(self, chunks: list[list[Chunk]]) -> int:
        """The smallest bucket with enough tokens and enough rows."""
        tokens = max(sum(c.stop - c.start for c in mine) for mine in chunks)
        rows = max(map(len, chunks))
        return next(b for b in self.cfg.prefill_buckets if b >= tokens and self.cfg.prefill_rows(b) >= rows)

    def _launch_chunks(self, chunks: list[list[Chunk]]) -> tuple[Rows, int, bool]:
        """Notes the chunks as launched; rows that sample, their sampler variant, and whether one wants logprobs."""
        last = [(rank, i, c) for rank, mine in enumerate(chunks) for i, c in enumerate(mine) if c.is_last]
        slots = np.array([c.sequence.slot for _, _, c in last], np.int64)
        rank, position = (np.array([entry[k] for entry in last], np.int64) for k in (0, 1))
        sampled = Rows(slots, rank, position, self.slots.epoch[slots], self.slots.ids[slots])
        for chunk in (c for mine in chunks for c in mine):
            chunk.sequence.prefilled = chunk.stop
        for owner, _, chunk in last:
            self._prefilling[owner].remove(chunk.sequence)
            self.slots.start_decoding(chunk.sequence.slot)
        variant, logprobs = self._features(slots)
        return sampled, variant, logprobs

    def _features(self, slots: np.ndarray) -> tuple[int, bool]:
        if not len(slots):
            return 0, False
        return int(self.slots.variant[slots].max()), bool(self.slots.wants_logprobs[slots].any())

    def _plan_decode(self) -> DecodePlan | None:
        rows = self._live_rows()
        if rows is None:
            return None
        slots = self.slots
        short = slots.planned[rows.slots] > slots.capacity[rows.slots]
        new_pages = stalled = None
        if short.any():
            new_pages, stalled = self._extend(rows.slots[short])
            if self._rows_version != slots.version:  # pre-emption has removed some
                rows = self._live_rows()
            if rows is None:
                return None
        batch = self._decode_template.copy()
        for slot, page in (new_pages or {}).items():
            if slots.decoding[slot]:
                row = rows.slots.searchsorted(slot)
                batch[rows.rank[row], rows.position[row], 1] = page
        if stalled:
            rows = self._without(rows, stalled, batch)
            if not len(rows.slots):
                return None
        slots.planned[rows.slots] += 1
        return DecodePlan(rows, batch, *self._decode_features)

    def _live_rows(self) -> Rows | None:
        """Rows of all requests that decode and have not planned their last token; cached while they stay the same."""
        slots = self.slots
        if self._rows_version == slots.version and self._decode_rows is not None:
            mine = self._decode_rows.slots
            done = slots.planned[mine] >= slots.limit[mine]
            if not done.any():
                return self._decode_rows
            slots.stop_decoding(mine[done])
        else:
            mine = slots.decoding.nonzero()[0]
            done = slots.planned[mine] >= slots.limit[mine]
            if done.any():
                slots.stop_decoding(mine[done])
        self._decode_rows = self._make_rows(slots.decoding.nonzero()[0])
        self._rows_version = slots.version
        return self._decode_rows

    def _make_rows(self, mine: np.ndarray) -> Rows | None:
        if not len(mine):
            return None
        cfg, slots = self.cfg, self.slots
        rank = mine // cfg.max_num_seqs
        starts = np.searchsorted(mine, np.arange(cfg.num_ranks) * cfg.max_num_seqs)
        position = np.arange(len(mine)) - starts[rank]
        self._decode_features = self._features(mine)
        size = bucket(cfg.decode_buckets, int(position.max()) + 1)
        batch = np.empty((cfg.num_ranks, size, 2), np.int32)
        batch[..., 0], batch[..., 1] = cfg.max_num_seqs, -1
        batch[rank, position, 0] = mine - rank * cfg.max_num_seqs
        self._decode_template = batch
        return Rows(mine, rank, position, slots.epoch[mine], slots.ids[mine])

    def _extend(self, short: np.ndarray) -> tuple[dict[int, int], list[int]]:
        """One more page for each of the slots `short`, the oldest request first.

        Without a free page the youngest of the rank is pre-empted. Its pages may still be written by the step in
        flight, so the request in need sits this step out. Returns new pages by slot and the slots that sit out.
        """
        new_pages: dict[int, int] = {}
        stalled: list[int] = []
        demand = [0] * self.cfg.num_ranks
        sequences = [self.slots.sequences[slot] for slot in short.tolist()]
        for sequence in sorted((s for s in sequences if s is not None), key=lambda s: s.arrival):
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
        while page is None and self._held_pages[rank] < demand[rank]:
            youngest = max(self.slots.running(rank), key=lambda s: s.arrival)
            self._preempt(youngest)
            if youngest is sequence:
                return None
            page = cache.allocate()
            demand[rank] -= page is not None
        return page

    def _without(self, rows: Rows, stalled: list[int], batch: np.ndarray) -> Rows:
        """Rows that do not sit this step out; the others become padding in `batch`."""
        out = np.isin(rows.slots, stalled)
        batch[rows.rank[out], rows.position[out], 0] = self.cfg.max_num_seqs
        return rows.only(~out)
