"""Admission and preemption: which waiting request starts, on which rank, and with which cached pages."""

import dataclasses
from collections.abc import Callable

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.kv_cache.page_keys import Key
from dsv3.kv_cache.tiers.hosts import Hosts
from dsv3.kv_cache.tiers.tiers import HostTiers
from dsv3.scheduler.balance import Balancer
from dsv3.scheduler.batch_slots import BatchSlots, RankPages
from dsv3.scheduler.sequence import CAPACITY, Sequence, SequenceStatus, WaitingQueue
from dsv3.scheduler.windows import WindowPages

# Bounds the host's time for admission in one step, per 16 ranks: under 2 ms for as many cached tokens. Without it the
# 127 other sequences of one prompt of 131,071 tokens took 176 ms.
MAX_ADMISSION_TOKENS = 2**18
# Pages that requests of a higher priority number leave free for each running one of a lower number: it may need one in
# this step and one in the next, before preempted pages are free. So it never skips a step because of them.
RESERVED_PAGES = 2


def max_admission_tokens(cfg: EngineConfig) -> int:
    """Returns how many known tokens the sequences may have that one step considers for admission."""
    return MAX_ADMISSION_TOKENS * max(1, cfg.num_ranks // 16)


def lookup_keys(sequence: Sequence, page_size: int) -> list[Key]:
    """Returns the keys that a request looks up in the prefix cache; at least one token must be computed.

    None where the request wants log-probabilities of its prompt: pages hold no hidden states. Where it wants the
    experts of its tokens, only those of pages whose experts are known.
    """
    keys = _shared_keys(sequence, page_size)
    return keys if sequence.routed is None else keys[: sequence.routed.num_usable(keys)]


def _shared_keys(sequence: Sequence, page_size: int) -> list[Key]:
    """Returns the keys of pages that another request may fill for this one."""
    return [] if sequence.needs_prompt_logprobs else sequence.keys[: (len(sequence.tokens) - 1) // page_size]


@dataclasses.dataclass
class _Claims:
    """Slots and pages by rank `[ranks]` that requests considered in this step will take, and keys they will fill.

    `reserved_ranks` are the ranks, by request id, of requests whose pages are free in the next step.
    """

    slots: np.ndarray
    pages: np.ndarray
    keys: set[Key] = dataclasses.field(default_factory=set)
    reserved_ranks: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Need:
    """What a sequence needs on a rank: the cached pages of its prefix, new ones, and the key of the first new one."""

    rank: int
    cached: list[int]
    missing: int
    key: Key | None


class Preemption:
    """Preempts running requests for waiting ones of a lower priority number, before a step is scheduled.

    Batch work has a high number. It delays a waiting request by one step at most: the pages of a preempted request are
    free once the results of the step in flight have arrived. Nothing keeps requests of a high number from starving.
    `preempt` moves a running request back to the queue.
    """

    def __init__(
        self,
        cfg: EngineConfig,
        slots: BatchSlots,
        pages: RankPages,
        queue: WaitingQueue,
        preempt: Callable[[Sequence], None],
    ) -> None:
        self._cfg, self._slots, self._pages, self._queue, self._preempt = cfg, slots, pages, queue, preempt
        self._claimed, self._first_claim = np.zeros(cfg.num_ranks, np.int64), 0

    def is_possible(self) -> bool:
        """Returns whether a running request may be preempted for the first waiting one."""
        first = self._queue.first_priority
        return first is not None and first < self._slots.lowest_priority

    def preempt_for_waiting(self, looks_up_tiers: bool) -> dict[int, int]:
        """Preempts as little as waiting requests need; returns the ranks of those that have their pages one step later.

        Requests that first look up a store need no capacity yet. A request that fits on no rank even so preempts all
        requests of higher numbers: a later one must not delay it.
        """
        if self._slots.has_mixed_priorities:
            self._restore_reserves()
        self._claimed[:] = 0
        if not self.is_possible():
            return {}
        claims = _Claims(np.zeros(self._cfg.num_ranks, np.int64), np.zeros(self._cfg.num_ranks, np.int64))
        considered: list[Sequence] = []
        tokens = 0
        while (
            tokens < max_admission_tokens(self._cfg)
            and self.is_possible()
            and (sequence := self._queue.pop()) is not None
        ):
            if not considered:
                self._first_claim = sequence.priority
            considered.append(sequence)
            tokens += len(sequence.tokens)
            if looks_up_tiers and sequence.lookup is None:
                continue
            if not self._claim(sequence, claims):
                break
        for sequence in considered:
            self._queue.push(sequence)
        margin = (self._slots.running + claims.slots) // 2  # what admission wants to be free besides
        self._claimed = np.where(claims.slots > 0, claims.pages + margin, 0)
        return claims.reserved_ranks

    def reserved_pages(self, rank: int, priority: int) -> int:
        """Returns how many pages of `rank` a running request of `priority` must leave free.

        One for each running request of a lower number, and those that waiting requests of lower numbers have claimed.
        """
        claimed = int(self._claimed[rank]) if priority > self._first_claim else 0
        return self._slots.num_higher_priority(rank, priority) + claimed

    def reserved_pages_by_rank(self) -> list[int]:
        """Returns how many pages of each rank a running request of the highest number must leave free."""
        lowest = self._slots.lowest_priority
        if not self._slots.has_mixed_priorities and lowest <= self._first_claim:
            return [0] * self._cfg.num_ranks
        return [self.reserved_pages(rank, lowest) for rank in range(self._cfg.num_ranks)]

    def _claim(self, sequence: Sequence, claims: _Claims) -> bool:
        """Reserves capacity for one request, on its requested rank or that with the least non-preemptible work.

        Returns whether the next request may be considered.
        """
        busy = self._slots.num_not_preemptible(sequence.priority) + claims.slots
        required, best = sequence.request.rank, None
        for rank in np.argsort(busy, kind="stable").tolist() if required is None else (required,):
            if best is not None and busy[rank] > busy[best.rank]:
                break
            need = self._need(sequence, rank)
            if self._waits_for_page(sequence, need, claims):
                return True
            if self._fits_now(need, claims):
                self._reserve(need, claims)
                return True
            if best is None and self._may_fit(sequence, need, claims):
                best = need
        if best is None and required is not None:
            return True  # preempting would not make it fit, and later requests may fit on other ranks
        if best is None:
            self._preempt_all(sequence.priority)
            return False
        return self._preempt_on_rank(sequence, best, claims)

    def _preempt_on_rank(self, sequence: Sequence, need: _Need, claims: _Claims) -> bool:
        """Preempts on one rank until the request fits; False where shared pages keep it from fitting."""
        preemptible = self._slots.preemptible_on_rank(need.rank, sequence.priority)
        reserve = RESERVED_PAGES * (self._slots.num_running(need.rank) - len(preemptible) + 1)
        while preemptible and not self._fits_next(need, claims, reserve):
            self._preempt(preemptible.pop())
        if not self._fits_now(need, claims):
            if not self._fits_next(need, claims, self._slots.num_running(need.rank) // 2):
                return False
            claims.reserved_ranks[sequence.id] = need.rank
        self._reserve(need, claims)
        return True

    def _need(self, sequence: Sequence, rank: int) -> _Need:
        useful = lookup_keys(sequence, self._cfg.page_size)
        cached = self._pages.caches[rank].match(useful)
        missing = self._cfg.pages_for(len(sequence.tokens) + self._cfg.tokens_ahead) - len(cached)
        return _Need(rank, cached, missing, useful[len(cached)] if len(cached) < len(useful) else None)

    def _waits_for_page(self, sequence: Sequence, need: _Need, claims: _Claims) -> bool:
        """Returns whether admission will park the request until another one has filled a page of its prompt."""
        if need.key is None:
            return False
        owner = self._pages.pending[need.rank].get(need.key)
        return need.key in claims.keys or (owner is not None and owner.priority <= sequence.priority)

    def _fits_now(self, need: _Need, claims: _Claims) -> bool:
        cache, margin = self._pages.caches[need.rank], self._slots.num_running(need.rank) // 2
        lacking = need.missing + cache.num_evictable(need.cached) + margin
        return self._has_slot(need.rank, claims) and cache.available - claims.pages[need.rank] >= lacking

    def _fits_next(self, need: _Need, claims: _Claims, margin: int) -> bool:
        """Returns whether a request fits once the step in flight has finished, with `margin` pages for others."""
        cache, deferred = self._pages.caches[need.rank], self._pages.deferred(need.rank)
        lacking = need.missing + cache.num_evictable(need.cached) + len(deferred.intersection(need.cached)) + margin
        free = cache.available + len(deferred) - claims.pages[need.rank]
        return self._has_slot(need.rank, claims) and free >= lacking

    def _may_fit(self, sequence: Sequence, need: _Need, claims: _Claims) -> bool:
        """Returns whether a request may fit once all that it may preempt is gone; shared pages count twice."""
        preemptible = self._slots.preemptible_on_rank(need.rank, sequence.priority)
        free = self._slots.num_free_on(need.rank) + len(preemptible) - claims.slots[need.rank]
        pages = self._pages.caches[need.rank].available + len(self._pages.deferred(need.rank))
        pages += sum(len(each.pages) for each in preemptible) - int(claims.pages[need.rank])
        margin = (self._slots.num_running(need.rank) - len(preemptible)) // 2
        return free > 0 and pages >= need.missing + margin

    def _has_slot(self, rank: int, claims: _Claims) -> bool:
        return self._slots.num_free_on(rank) > claims.slots[rank]

    def _reserve(self, need: _Need, claims: _Claims) -> None:
        claims.slots[need.rank] += 1
        claims.pages[need.rank] += need.missing + self._pages.caches[need.rank].num_evictable(need.cached)
        if need.key is not None:
            claims.keys.add(need.key)

    def _restore_reserves(self) -> None:
        """Preempts the last request of each rank while running ones of lower numbers might lack pages because of it."""
        before = self._slots.num_above_lowest_priority()
        for rank in before.nonzero()[0].tolist():
            cache, reserve = self._pages.caches[rank], RESERVED_PAGES * int(before[rank])
            while reserve > cache.available and reserve > cache.available + len(self._pages.deferred(rank)):
                self._preempt(max(self._slots.on_rank(rank), key=lambda s: s.turn))
                reserve = RESERVED_PAGES * int(self._slots.num_above_lowest_priority()[rank])

    def _preempt_all(self, priority: int) -> None:
        for rank in range(self._cfg.num_ranks):
            for each in reversed(self._slots.preemptible_on_rank(rank, priority)):
                self._preempt(each)


_STORE_LOOKUP = -1  # parks requests that wait for a store, instead of a rank


class Admission:
    """Admits by priority, then first come, first served, on the rank with capacity where a request costs least.

    Two exceptions to the order. A prompt whose next pages a running prefill is computing is parked under the last of
    these pages until it is filled, and others may pass it; it does not wait for work of a higher priority number, which
    would wait for it. A request that requires a rank is parked until that rank has capacity, which none behind it
    takes.
    """

    def __init__(
        self,
        cfg: EngineConfig,
        slots: BatchSlots,
        pages: RankPages,
        queue: WaitingQueue,
        balancer: Balancer,
        preempt: Callable[[Sequence], None],
    ) -> None:
        self._cfg, self._slots, self._pages, self._queue = cfg, slots, pages, queue
        self.balancer = balancer
        self.preemption = Preemption(cfg, slots, pages, queue, preempt)
        self.windows = WindowPages(cfg, slots, pages) if cfg.has_window else None
        self._requested_ranks: dict[int, tuple[int, int]] = {}  # by rank that parked requests require: the first turn
        self._reserved_ranks: dict[int, int] = {}  # by id of a request that preemption has reserved pages for
        self._blocked_ranks: set[int] = set()  # where such a request comes first
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0  # of these, found
        self.tiers: HostTiers | Hosts | None = None
        self.awaiting_lookup: list[Sequence] = []  # parked until a store or another instance has been looked up

    def admit(self) -> list[Sequence]:
        """Allocates slots and pages to waiting sequences, within `max_admission_tokens`; returns those that start."""
        started: list[Sequence] = []
        waiting: list[Sequence] = []  # for reserved pages; only requests of a higher priority number wait for these
        tokens = 0
        for rank in [rank for rank in self._requested_ranks if self._slots.num_free_on(rank)]:
            self._wake_next(rank)
        self._blocked_ranks.clear()
        most = max_admission_tokens(self._cfg)
        while tokens < most and self._may_admit and (sequence := self._queue.pop()) is not None:
            if not tokens:
                self.balancer.refresh()
            tokens += len(sequence.tokens)
            if self._start_lookup(sequence):
                continue
            if (reserved := self._reserved_ranks.get(sequence.id)) is not None:
                self._blocked_ranks.add(reserved)
                waiting.append(sequence)
                continue
            match = self._choose_rank(sequence)
            if match is None and sequence.request.rank is not None:
                self._park_for_rank(sequence, sequence.request.rank, waiting)
                continue
            if match is None or (waiting and sequence.priority > waiting[-1].priority):
                waiting.append(sequence)
                break
            rank, cached = match
            if self._start_second_lookup(sequence, rank):
                continue
            awaited = self._last_pending(sequence, rank, len(cached))
            if awaited is not None:
                self._pages.pending[rank][awaited].snapshots.add(sequence.keys.index(awaited))
                self._queue.park(sequence, rank, awaited)
            else:
                self._start(sequence, rank, cached)
                started.append(sequence)
            if sequence.request.rank is not None:
                self._wake_next(rank)
        for sequence in waiting:
            self._queue.push(sequence)
        return started

    def preempt_for_waiting(self) -> None:
        """Preempts running requests for waiting ones of a lower priority number; call it before a step is scheduled."""
        self._reserved_ranks = self.preemption.preempt_for_waiting(self.tiers is not None)

    def _park_for_rank(self, sequence: Sequence, rank: int, waiting: list[Sequence]) -> None:
        """Parks a request until its requested rank has capacity; one that may preempt there stays in the queue."""
        if self._slots.preemptible_on_rank(rank, sequence.priority):
            waiting.append(sequence)
            return
        self._requested_ranks[rank] = min(sequence.turn, self._requested_ranks.get(rank, sequence.turn))
        self._queue.park(sequence, rank, CAPACITY)

    def _wake_next(self, rank: int) -> None:
        """Wakes the first request that waits for capacity on a rank, and records the turn of the next one.

        The first one may be aborted while it waits behind others.
        """
        behind = self._queue.wake_first(rank, CAPACITY)
        if behind is None:
            self._requested_ranks.pop(rank, None)
        else:
            self._requested_ranks[rank] = behind.turn

    @property
    def _may_admit(self) -> bool:
        """Whether the first waiting request may find a slot, now or in the next step."""
        return self._slots.num_free > 0 or self.preemption.is_possible()

    def process_lookups(self) -> None:
        """Wakes requests whose lookup has finished or timed out."""
        for sequence in [s for s in self.awaiting_lookup if s.lookup is None or s.lookup.is_over]:
            self.awaiting_lookup.remove(sequence)
            if sequence.lookup is not None:
                sequence.lookup.close()
            sequence.timing.enter("queue")
            self._queue.wake(_STORE_LOOKUP, (_key_of_sequence(sequence),))

    def _start_lookup(self, sequence: Sequence) -> bool:
        """Looks up a sequence's pages in a store or another instance, once; returns whether the sequence now waits.

        The lookup runs on the host where the sequence would start now.
        """
        if self.tiers is None or sequence.lookup is not None:
            return False
        useful, rank = lookup_keys(sequence, self._cfg.page_size), sequence.request.rank
        ranks = self.balancer.ranks_by_cost(sequence, useful) if rank is None else iter((rank,))
        return self._submit_lookup(sequence, useful, self.tiers.nearest(ranks))

    def _start_second_lookup(self, sequence: Sequence, rank: int) -> bool:
        """Looks up again, on another host, once others have taken the first host's capacity; see `_start_lookup`."""
        before = sequence.lookup
        if self.tiers is None or before is None or before.is_second or before.tiers is self.tiers.of(rank):
            return False
        before.is_second = True
        return self._submit_lookup(sequence, lookup_keys(sequence, self._cfg.page_size), self.tiers.of(rank))

    def _submit_lookup(self, sequence: Sequence, useful: list[Key], tiers: HostTiers | None) -> bool:
        """Starts a lookup in the tiers of a host and parks the sequence; False where there is nothing to look up."""
        assert self.tiers is not None
        if tiers is None:
            return False
        ranks = [rank for rank in range(len(self._pages.caches)) if self.tiers.of(rank) is tiers]
        on_device = self._pages.longest_match(useful, ranks)
        source, is_second = sequence.request.pages_from, sequence.lookup is not None
        lookup = tiers.fetch_from_peer(source, useful, on_device) if source else tiers.lookup_store(useful, on_device)
        if lookup is None:
            return False
        lookup.is_second = is_second
        sequence.lookup = lookup
        sequence.timing.enter("transfer" if source else "lookup")
        self.awaiting_lookup.append(sequence)
        self._queue.park(sequence, _STORE_LOOKUP, _key_of_sequence(sequence))
        return True

    def _choose_rank(self, sequence: Sequence) -> tuple[int, list[int]] | None:
        """Returns the rank for a request and its cached pages there; None where it fits on no rank now.

        The rank is the one with enough slots and pages on which it costs least, or the requested one.
        """
        useful = lookup_keys(sequence, self._cfg.page_size)
        required = sequence.request.rank
        for rank in self.balancer.ranks_by_cost(sequence, useful) if required is None else (required,):
            if rank in self._blocked_ranks or self._requested_ranks.get(rank, sequence.turn) < sequence.turn:
                continue
            cached = self._match_if_it_fits(sequence, rank, useful)
            if cached is not None:
                return rank, cached
        return None

    def _match_if_it_fits(self, sequence: Sequence, rank: int, useful: list[Key]) -> list[int] | None:
        """Does the prefix cache lookup on a rank: returns the cached pages; None where the request does not fit.

        It needs pages for all known tokens and the drafts behind them, and half a page per running request, so that
        these do not preempt it at once; `RESERVED_PAGES` for each request of a lower priority number.
        """
        if not self._slots.num_free_on(rank) or (self.windows is not None and not self.windows.can_start(rank)):
            return None
        cache = self._pages.caches[rank]
        cached = cache.match(useful)
        missing = self._cfg.pages_for(len(sequence.tokens) + self._cfg.tokens_ahead) - len(cached)
        margin = max(
            self._slots.num_running(rank) // 2,
            RESERVED_PAGES * self._slots.num_higher_priority(rank, sequence.priority),
        )
        spare = cache.available - cache.num_evictable(cached) - missing - margin
        return cached if spare >= 0 else None

    def _last_pending(self, sequence: Sequence, rank: int, matched: int) -> Key | None:
        """Returns the key of the last page after `matched` that a running prefill of `rank` is about to fill.

        Pages of a prompt are filled in order, so those to wait for are contiguous: found by bisection.
        """
        pending, keys = self._pages.pending[rank], sequence.keys

        def is_awaited(page: int) -> bool:
            owner = pending.get(keys[page])
            if owner is None or (sequence.routed is not None and owner.routed is None):
                return False
            return owner.priority <= sequence.priority

        low, high = matched, len(_shared_keys(sequence, self._cfg.page_size))
        if low >= high or not is_awaited(low):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_awaited(middle) else (low, middle)
        return keys[low]

    def _start(self, sequence: Sequence, rank: int, cached: list[int]) -> None:
        """Allocates a slot to a request, and pages for all its known tokens and the drafts behind them."""
        cache = self._pages.caches[rank]
        cache.retain(cached)
        needed = self._cfg.pages_for(len(sequence.tokens) + self._cfg.tokens_ahead)
        sequence.pages = [*cached, *cache.allocate(needed - len(cached))]
        sequence.page_row = np.array(sequence.pages, np.int32)
        sequence.num_found = sequence.num_published = len(cached)
        sequence.prefilled = len(cached) * self._cfg.page_size
        sequence.load_stop = len(cached) + self._num_loadable_pages(sequence, rank, len(cached))
        if sequence.routed is not None:
            sequence.routed.restore(sequence.keys[: sequence.load_stop])
        if self.windows is not None:
            self.windows.start(sequence, rank, len(cached))
        sequence.timing.enter("prefill" if sequence.load_stop == len(cached) else "load")
        if not sequence.started:
            sequence.timing.device = sequence.prefilled
        if self._cfg.enable_prefix_caching:
            self._register_pending(sequence, rank, len(cached))
            self._record_prefix_hits(sequence)
        self._slots.allocate(sequence, rank)
        if sequence.load_stop > len(cached):
            sequence.state = SequenceStatus.LOADING
        self.balancer.charge(sequence)

    def _register_pending(self, sequence: Sequence, rank: int, cached: int) -> None:
        """Registers the pages after the `cached` ones as this request's to fill, in place of later work's."""
        pending, keys = self._pages.pending[rank], set(sequence.keys[cached:])
        for key in keys & pending.keys():
            if (owner := pending[key]).priority > sequence.priority:
                owner.pending.discard(key)
            else:
                keys.discard(key)
        sequence.pending = keys
        pending.update(dict.fromkeys(keys, sequence))

    def _num_loadable_pages(self, sequence: Sequence, rank: int, cached: int) -> int:
        """Returns how many pages behind the cached ones a tier has and loads faster than they are computed."""
        if self.tiers is None or not sequence.may_load:
            return 0
        useful = lookup_keys(sequence, self._cfg.page_size)
        tiers, lookup = self.tiers.of(rank), sequence.lookup
        tiers.record_query(len(useful) - cached)
        found = lookup.num_found if lookup is not None and lookup.tiers is tiers else 0
        sequence.looked_up = (0, 0) if lookup is None else (lookup.first, found)
        return tiers.num_loadable(useful, cached, found)

    def record_loaded(self, sequence: Sequence) -> None:
        """Records that a running request gets no more pages of a tier, and how many each tier had."""
        timing, size = sequence.timing, self._cfg.page_size
        if not sequence.started:
            first, stop = timing.device // size, sequence.num_found
            looked_up = max(0, min(stop, sequence.looked_up[1]) - max(first, sequence.looked_up[0]))
            timing.host = size * (stop - first - looked_up)
            if sequence.request.pages_from:
                timing.peer = size * looked_up
            else:
                timing.store = size * looked_up
        timing.enter("prefill")

    def _record_prefix_hits(self, sequence: Sequence) -> None:
        if sequence.started:
            return
        sequence.num_cached = min(sequence.prefilled, sequence.prompt_length)
        self.prefix_queries += sequence.prompt_length
        self.prefix_hits += sequence.num_cached


def _key_of_sequence(sequence: Sequence) -> Key:
    """Returns a key under which only this sequence is parked."""
    return sequence.arrival.to_bytes(8, "little")
