"""Decides which waiting request starts, on which rank, and with which cached pages."""

import dataclasses
from collections.abc import Callable
from time import perf_counter

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.kv_cache.page_keys import Key
from dsv3.kv_cache.tiers.hosts import Hosts
from dsv3.kv_cache.tiers.tiers import HostTiers
from dsv3.scheduler.balance import Balancer
from dsv3.scheduler.batch_slots import BatchSlots, RankPages
from dsv3.scheduler.sequence import Sequence, SequenceStatus, WaitingQueue

# Known tokens of the sequences that are looked at in one step: under 2 ms where all are cached. The 127 others of one
# prompt of 131,071 tokens took 176 ms in the step after it had been computed. So many per 16 ranks, which compute them.
SLICE_TOKENS = 2**18
# Pages that requests of a higher number leave free for each running one of a lower number: it may need one in this
# step, and one in the next, before what they give up is free. So it never sits out a step because of them.
RESERVE = 2


def slice_tokens(cfg: EngineConfig) -> int:
    """Returns how many known tokens the sequences may have that are looked at in one step."""
    return SLICE_TOKENS * max(1, cfg.num_ranks // 16)


def useful_pages(sequence: Sequence, page_size: int) -> int:
    """Returns the cached pages that help: one token at least must be computed.

    None help where log-probabilities of the prompt are asked for: pages hold no hidden states.
    """
    return 0 if sequence.tells_prompt else (len(sequence.tokens) - 1) // page_size


@dataclasses.dataclass
class _Claims:
    """What those looked at so far in this step will take: slots and pages by rank `[ranks]`, and keys they will fill.

    `promised` are the ranks, by request id, of those whose pages are free in the next step.
    """

    slots: np.ndarray
    pages: np.ndarray
    keys: set[Key] = dataclasses.field(default_factory=set)
    promised: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Need:
    """What a sequence needs on a rank: the cached pages of its prefix, new ones, and the key of the first new one."""

    rank: int
    cached: list[int]
    missing: int
    key: Key | None


class Preemption:
    """Pre-empts running requests for waiting ones of a lower priority number, before a step is planned.

    Batch work has a high number. It holds up a waiting request for one step at most, since the pages of a pre-empted
    request are free once the step in flight has been collected. Nothing keeps later work from starving. `preempt` sends
    a running request back to the queue.
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
        """Returns whether somebody runs who gives way to the first that waits."""
        first = self._queue.first_priority
        return first is not None and first < self._slots.latest_priority

    def preempt_for(self, asks_store: bool) -> dict[int, int]:
        """Sends back as little as waiting requests need; returns the rank of each that has its pages one step later.

        Those that have a store to ask first need no room yet. When one fits nowhere, even so, nobody of a higher number
        goes on running: whatever it waits for must not wait in turn.
        """
        if self._slots.are_mixed:
            self._keep_reserves()
        self._claimed[:] = 0
        if not self.is_possible():
            return {}
        claims = _Claims(np.zeros(self._cfg.num_ranks, np.int64), np.zeros(self._cfg.num_ranks, np.int64))
        looked: list[Sequence] = []
        tokens = 0
        while tokens < slice_tokens(self._cfg) and self.is_possible() and (sequence := self._queue.pop()) is not None:
            if not looked:
                self._first_claim = sequence.priority
            looked.append(sequence)
            tokens += len(sequence.tokens)
            if asks_store and sequence.lookup is None:
                continue
            if not self._claim(sequence, claims):
                break
        for sequence in looked:
            self._queue.push(sequence)
        margin = (self._slots.running + claims.slots) // 2  # what admission wants to be free besides
        self._claimed = np.where(claims.slots > 0, claims.pages + margin, 0)
        return claims.promised

    def left_by(self, rank: int, priority: int) -> int:
        """Returns how many pages of `rank` a running request of `priority` leaves free when it needs another one.

        One for each running request of a lower number, and those that waiting requests of lower numbers have claimed.
        """
        claimed = int(self._claimed[rank]) if priority > self._first_claim else 0
        return self._slots.num_before(rank, priority) + claimed

    def left_by_last(self) -> list[int]:
        """Returns how many pages of each rank a running request of the highest number leaves free."""
        latest = self._slots.latest_priority
        if not self._slots.are_mixed and latest <= self._first_claim:
            return [0] * self._cfg.num_ranks
        return [self.left_by(rank, latest) for rank in range(self._cfg.num_ranks)]

    def _claim(self, sequence: Sequence, claims: _Claims) -> bool:
        """Sees to room for one request, on the rank that it asks for or that with the least work not to give way."""
        busy = self._slots.running_before(sequence.priority) + claims.slots
        asked, chosen = sequence.request.rank, None
        for rank in np.argsort(busy, kind="stable").tolist() if asked is None else (asked,):
            if chosen is not None and busy[rank] > busy[chosen.rank]:
                break
            need = self._need(sequence, rank)
            if self._waits_for_page(sequence, need, claims):
                return True
            if self._fits_now(need, claims):
                self._note(need, claims)
                return True
            if chosen is None and self._may_fit(sequence, need, claims):
                chosen = need
        if chosen is None and asked is not None:
            return True  # nobody gives way in vain, and the others can go elsewhere
        if chosen is None:
            self._clear(sequence.priority)
            return False
        return self._make_room(sequence, chosen, claims)

    def _make_room(self, sequence: Sequence, need: _Need, claims: _Claims) -> bool:
        """Sends back requests of one rank until this one fits; False where more is shared there than it seemed."""
        later = self._slots.later_on_rank(need.rank, sequence.priority)
        reserve = RESERVE * (self._slots.num_running(need.rank) - len(later) + 1)
        while later and not self._fits_next(need, claims, reserve):
            self._preempt(later.pop())
        if not self._fits_now(need, claims):
            if not self._fits_next(need, claims, self._slots.num_running(need.rank) // 2):
                return False
            claims.promised[sequence.id] = need.rank
        self._note(need, claims)
        return True

    def _need(self, sequence: Sequence, rank: int) -> _Need:
        useful = sequence.keys[: useful_pages(sequence, self._cfg.page_size)]
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
        lacking = need.missing + cache.num_parked(need.cached) + margin
        return self._has_slot(need.rank, claims) and cache.available - claims.pages[need.rank] >= lacking

    def _fits_next(self, need: _Need, claims: _Claims, margin: int) -> bool:
        """Returns whether a request fits once the step in flight is collected; others may take `margin` pages first."""
        cache, coming = self._pages.caches[need.rank], self._pages.coming(need.rank)
        lacking = need.missing + cache.num_parked(need.cached) + len(coming.intersection(need.cached)) + margin
        free = cache.available + len(coming) - claims.pages[need.rank]
        return self._has_slot(need.rank, claims) and free >= lacking

    def _may_fit(self, sequence: Sequence, need: _Need, claims: _Claims) -> bool:
        """Returns whether a request may fit on a rank once nobody later runs there; shared pages count twice."""
        later = self._slots.later_on_rank(need.rank, sequence.priority)
        free = self._slots.num_free_on(need.rank) + len(later) - claims.slots[need.rank]
        pages = self._pages.caches[need.rank].available + len(self._pages.coming(need.rank))
        pages += sum(len(each.pages) for each in later) - int(claims.pages[need.rank])
        margin = (self._slots.num_running(need.rank) - len(later)) // 2
        return free > 0 and pages >= need.missing + margin

    def _has_slot(self, rank: int, claims: _Claims) -> bool:
        return self._slots.num_free_on(rank) > claims.slots[rank]

    def _note(self, need: _Need, claims: _Claims) -> None:
        claims.slots[need.rank] += 1
        claims.pages[need.rank] += need.missing + self._pages.caches[need.rank].num_parked(need.cached)
        if need.key is not None:
            claims.keys.add(need.key)

    def _keep_reserves(self) -> None:
        """Sends back the last on each rank where running requests of lower numbers might lack pages because of it."""
        before = self._slots.num_before_last()
        for rank in before.nonzero()[0].tolist():
            cache, reserve = self._pages.caches[rank], RESERVE * int(before[rank])
            while reserve > cache.available and reserve > cache.available + len(self._pages.coming(rank)):
                self._preempt(max(self._slots.on_rank(rank), key=lambda s: s.turn))
                reserve = RESERVE * int(self._slots.num_before_last()[rank])

    def _clear(self, priority: int) -> None:
        """Sends back all that give way to `priority`."""
        for rank in range(self._cfg.num_ranks):
            for each in reversed(self._slots.later_on_rank(rank, priority)):
                self._preempt(each)


_STORE = -1  # in the place of a rank, for those that wait for the store
_ROOM: Key = b""  # in the place of a key, for those that wait for room on the rank that they ask for


class Admission:
    """Serves by priority, then first come, first served, on the rank with room on which a request costs least.

    Two exceptions to the order. A prompt whose next pages a running prefill is computing waits for them, and the others
    may pass. It is parked under the last of these pages, so that it costs nothing until then. It does not wait for
    later work, which would itself wait for it. A request that asks for a rank is parked until that has room, and none
    behind it takes the room.
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
        self.yielding = Preemption(cfg, slots, pages, queue, preempt)
        self._asked_for: dict[int, tuple[int, int]] = {}  # ranks that parked requests ask for: whose turn is the first
        self._promised: dict[int, int] = {}  # ranks, by ids of those whose pages are free in the next step
        self._taken: set[int] = set()  # ranks where one of these comes before whoever else is admitted
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0  # of these, found
        self.tiers: HostTiers | Hosts | None = None
        self.asking: list[Sequence] = []  # parked until the store says what it has of their prefix

    def admit(self) -> list[Sequence]:
        """Gives slots and pages to as many waiting sequences as fit, up to `slice_tokens` at once; returns them."""
        started: list[Sequence] = []
        waiting: list[Sequence] = []  # for pages that were promised, and so in nobody's way but that of later work
        tokens = 0
        for rank in [rank for rank in self._asked_for if self._slots.num_free_on(rank)]:
            self._wake_next(rank)
        self._taken.clear()
        most = slice_tokens(self._cfg)
        while tokens < most and self._may_start and (sequence := self._queue.pop()) is not None:
            if not tokens:
                self.balancer.begin()
            tokens += len(sequence.tokens)
            if self._asks_store(sequence):
                continue
            if (promised := self._promised.get(sequence.id)) is not None:
                self._taken.add(promised)
                waiting.append(sequence)
                continue
            choice = self._choose_rank(sequence)
            if choice is None and sequence.request.rank is not None:
                self._wait_for_rank(sequence, sequence.request.rank, waiting)
                continue
            if choice is None or (waiting and sequence.priority > waiting[-1].priority):
                waiting.append(sequence)
                break
            rank, cached = choice
            if self._asks_elsewhere(sequence, rank):
                continue
            awaited = self._last_pending(sequence, rank, len(cached))
            if awaited is not None:
                self._queue.park(sequence, rank, awaited)
            else:
                self._start(sequence, rank, cached)
                started.append(sequence)
            if sequence.request.rank is not None:
                self._wake_next(rank)
        for sequence in waiting:
            self._queue.push(sequence)
        return started

    def preempt_for(self) -> None:
        """Has running requests give way to waiting ones of a lower priority number; comes before a step is planned."""
        self._promised = self.yielding.preempt_for(self.tiers is not None)

    def _wait_for_rank(self, sequence: Sequence, rank: int, waiting: list[Sequence]) -> None:
        """Parks a request until the rank that it asks for has room; one that others give way to keeps its turn."""
        if self._slots.later_on_rank(rank, sequence.priority):
            waiting.append(sequence)
            return
        self._asked_for[rank] = min(sequence.turn, self._asked_for.get(rank, sequence.turn))
        self._queue.park(sequence, rank, _ROOM)

    def _wake_next(self, rank: int) -> None:
        """Lets the first request have its turn that waits for room on a rank, and notes whose turn is the next.

        The first may never come back: its client hangs up while it waits behind others.
        """
        behind = self._queue.wake_first(rank, _ROOM)
        if behind is None:
            self._asked_for.pop(rank, None)
        else:
            self._asked_for[rank] = behind.turn

    @property
    def _may_start(self) -> bool:
        """Whether the first that waits may find a slot, now or in the next step."""
        return self._slots.num_free > 0 or self.yielding.is_possible()

    def take_answers(self) -> None:
        """Lets requests have their turn again once the store has answered, or has had its time."""
        for sequence in [s for s in self.asking if s.lookup is None or s.lookup.is_over]:
            self.asking.remove(sequence)
            if sequence.lookup is not None:
                sequence.lookup.end()
            self._queue.wake(_STORE, (_own_key(sequence),))

    def _asks_store(self, sequence: Sequence) -> bool:
        """Returns whether a sequence now waits: for pages of another instance, or for what the store says it has.

        Each asks once, on the host where it would start now.
        """
        if self.tiers is None or sequence.lookup is not None:
            return False
        useful, rank = sequence.keys[: useful_pages(sequence, self._cfg.page_size)], sequence.request.rank
        ranks = self.balancer.ranked(sequence, useful) if rank is None else iter((rank,))
        return self._asks(sequence, useful, self.tiers.nearest(ranks))

    def _asks_elsewhere(self, sequence: Sequence, rank: int) -> bool:
        """Returns whether a sequence asks once more: others have taken the room of the host where it has asked."""
        before = sequence.lookup
        if self.tiers is None or before is None or before.is_second or before.tiers is self.tiers.of(rank):
            return False
        before.is_second = True
        return self._asks(sequence, sequence.keys[: useful_pages(sequence, self._cfg.page_size)], self.tiers.of(rank))

    def _asks(self, sequence: Sequence, useful: list[Key], tiers: HostTiers | None) -> bool:
        """Asks the tiers of a host, and has the sequence wait for them; False where there is nothing to ask."""
        assert self.tiers is not None
        if tiers is None:
            return False
        ranks = [rank for rank in range(len(self._pages.caches)) if self.tiers.of(rank) is tiers]
        on_device = self._pages.found(useful, ranks)
        source, is_second = sequence.request.pages_from, sequence.lookup is not None
        lookup = tiers.ask_peer(source, useful, on_device) if source else tiers.lookup(useful, on_device)
        if lookup is None:
            return False
        lookup.is_second = is_second
        sequence.lookup = lookup
        self.asking.append(sequence)
        self._queue.park(sequence, _STORE, _own_key(sequence))
        return True

    def _choose_rank(self, sequence: Sequence) -> tuple[int, list[int]] | None:
        """Returns the rank for a request and the cached pages of its prefix there; None where it fits on no rank now.

        That of least cost with a slot and pages enough, or the one that it asks for.
        """
        useful = sequence.keys[: useful_pages(sequence, self._cfg.page_size)]
        asked = sequence.request.rank
        for rank in self.balancer.ranked(sequence, useful) if asked is None else (asked,):
            if rank in self._taken or self._asked_for.get(rank, sequence.turn) < sequence.turn:
                continue
            cached = self._cached_if_it_fits(sequence, rank, useful)
            if cached is not None:
                return rank, cached
        return None

    def _cached_if_it_fits(self, sequence: Sequence, rank: int, useful: list[Key]) -> list[int] | None:
        """Returns the cached pages of a sequence on a rank, None where it does not fit there.

        Pages: those of all known tokens and of the drafts behind them, and half a page per running request, so that
        these do not pre-empt the newcomer at once; `RESERVE` for each of a lower priority number.
        """
        if not self._slots.num_free_on(rank):
            return None
        cache = self._pages.caches[rank]
        cached = cache.match(useful)
        missing = self._cfg.pages_for(len(sequence.tokens) + self._cfg.tokens_ahead) - len(cached)
        margin = max(self._slots.num_running(rank) // 2, RESERVE * self._slots.num_before(rank, sequence.priority))
        spare = cache.available - cache.num_parked(cached) - missing - margin
        return cached if spare >= 0 else None

    def _last_pending(self, sequence: Sequence, rank: int, matched: int) -> Key | None:
        """Returns the key of the last page after `matched` that a running prefill of `rank` is about to fill.

        Pages of one prompt are filled in their order, the first of them by the earliest work, so those to wait for are
        a run: found by bisection.
        """
        pending, keys = self._pages.pending[rank], sequence.keys

        def is_awaited(page: int) -> bool:
            owner = pending.get(keys[page])
            return owner is not None and owner.priority <= sequence.priority

        low, high = matched, min(useful_pages(sequence, self._cfg.page_size), len(keys))
        if low >= high or not is_awaited(low):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_awaited(middle) else (low, middle)
        return keys[low]

    def _start(self, sequence: Sequence, rank: int, cached: list[int]) -> None:
        """Gives a request a slot and the pages of all its known tokens, and of the drafts behind them."""
        cache = self._pages.caches[rank]
        cache.retain(cached)
        needed = self._cfg.pages_for(len(sequence.tokens) + self._cfg.tokens_ahead)
        sequence.pages = [*cached, *cache.allocate_several(needed - len(cached))]
        sequence.page_row = np.array(sequence.pages, np.int32)
        sequence.found = sequence.published = len(cached)
        sequence.prefilled = len(cached) * self._cfg.page_size
        sequence.load_stop = len(cached) + self._within_reach(sequence, rank, len(cached))
        if sequence.queue_seconds is None:
            sequence.queue_seconds = perf_counter() - sequence.queued_at
        if self._cfg.enable_prefix_caching:
            self._begin_filling(sequence, rank, len(cached))
            self._count_prefix(sequence)
        self._slots.enter(sequence, rank)
        if sequence.load_stop > len(cached):
            sequence.state = SequenceStatus.LOADING
        self.balancer.charge(sequence)

    def _begin_filling(self, sequence: Sequence, rank: int, cached: int) -> None:
        """Notes the pages after the `cached` ones as this request's to fill, also those that later work has begun."""
        pending, keys = self._pages.pending[rank], set(sequence.keys[cached:])
        for key in keys & pending.keys():
            if (owner := pending[key]).priority > sequence.priority:
                owner.pending.discard(key)
            else:
                keys.discard(key)
        sequence.pending = keys
        pending.update(dict.fromkeys(keys, sequence))

    def _within_reach(self, sequence: Sequence, rank: int, cached: int) -> int:
        """Returns how many pages behind the cached ones a tier has, and gives sooner than they are computed."""
        if self.tiers is None:
            return 0
        useful = sequence.keys[: useful_pages(sequence, self._cfg.page_size)]
        tiers, lookup = self.tiers.of(rank), sequence.lookup
        tiers.note_query(len(useful) - cached)
        found = lookup.found if lookup is not None and lookup.tiers is tiers else 0
        return tiers.within_reach(useful, cached, found)

    def _count_prefix(self, sequence: Sequence) -> None:
        if sequence.started:
            return
        sequence.num_cached = min(sequence.prefilled, sequence.prompt_length)
        self.prefix_queries += sequence.prompt_length
        self.prefix_hits += sequence.num_cached


def _own_key(sequence: Sequence) -> Key:
    """Returns a key that only this sequence waits for."""
    return sequence.arrival.to_bytes(8, "little")
