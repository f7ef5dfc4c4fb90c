"""Has running requests give way to waiting ones of a lower priority number, before a step is planned.

Batch work is what has a high number. A waiting request is held up by it for one step at most: the pages of a pre-empted
request are free once the step in flight has been collected. Nothing keeps later work from starving.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.kv_cache.keys import Key
from dsv3.scheduler.pages import RankPages
from dsv3.scheduler.queue import WaitingQueue
from dsv3.scheduler.sequence import Sequence
from dsv3.scheduler.slots import SlotTable

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


class Yielding:
    """Pre-empts by `preempt`, which sends a running request back to the queue."""

    def __init__(
        self,
        cfg: EngineConfig,
        slots: SlotTable,
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

    def make_way(self, asks_store: bool) -> dict[int, int]:
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
            if asks_store and sequence.look_up is None:
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
