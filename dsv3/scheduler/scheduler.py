"""Owns the requests: takes them in, gives them slots and pages, notes their tokens, lets them go. Imports no jax.

Every decision assumes that each launched step goes on as planned; results arrive one step late through
`process_results`. So a request may have one step too many in flight when it stops: that step's tokens are dropped, and
the pages it may still write are held back from new owners until it has been collected. The jobs of a step
(`dsv3.engine.jobs`) plan with this.
"""

import itertools
from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.kv_cache.events import Cleared, EventQueue, EventSource, Spelled
from dsv3.kv_cache.page_cache import PageCache
from dsv3.kv_cache.page_keys import Key, extend_keys, keys_behind, root_key
from dsv3.kv_cache.tiers.hosts import Hosts
from dsv3.kv_cache.tiers.tiers import HostTiers
from dsv3.scheduler.admission import Admission
from dsv3.scheduler.balance import Balancer
from dsv3.scheduler.batch_slots import BatchSlots, DraftCounts, RankPages
from dsv3.scheduler.cost import KEYS_PER_TOKEN
from dsv3.scheduler.sequence import Sequence, SequenceStatus, WaitingQueue

if TYPE_CHECKING:
    from dsv3.kv_cache.transfer.server import BootstrapRooms


class Scheduler:
    """Continuous batching with chunked prefill over the ranks' slots and pages."""

    def __init__(self, cfg: EngineConfig, vocab_size: int, keys_per_token: float = KEYS_PER_TOKEN) -> None:
        self.cfg = cfg
        self.slots = BatchSlots(cfg, vocab_size)
        self.pages = RankPages(cfg)
        self.queue = WaitingQueue()
        balancer = Balancer(cfg, self.slots, self.pages, keys_per_token)
        self.admission = Admission(cfg, self.slots, self.pages, self.queue, balancer, self._preempt)
        self.sequences: dict[int, Sequence] = {}  # every request that has not ended
        # By priority, then in order of admission; and those whose prefix comes from a tier.
        self.prefilling: list[list[Sequence]] = [[] for _ in range(cfg.num_ranks)]
        self.loading: list[Sequence] = []
        self.outgoing: deque[tuple[int, Key, int]] = deque()  # rank, key and page of what the tiers lack
        self.distrusted: set[Key] = set()  # of pages that may be on their way to a tier
        self.events: EventQueue | None = None  # hears which pages can be found, where somebody wants to know
        self._common_root = root_key(cfg.fingerprint, "")  # of requests without a salt
        self.num_preemptions = 0
        self.prompt_tokens = 0  # computed, not found in the cache
        self.generated_tokens = 0
        self.bootstrap_rooms: BootstrapRooms | None = None  # hears of requests whose pages another instance waits for
        self.drafts = DraftCounts(np.zeros(cfg.tokens_per_row - 1, np.int64))
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or pages, or orders about them, wait to leave or for a step's results."""
        told = self.tiers is None or not self.tiers.has_orders
        return bool(self.sequences or self.outgoing) or self.pages.holds_back or not told

    @property
    def tiers(self) -> HostTiers | Hosts | None:
        """Where pages go beyond the devices, if anywhere."""
        return self.admission.tiers

    @property
    def balancer(self) -> Balancer:
        """What spreads the work over the ranks."""
        return self.admission.balancer

    @property
    def only_waits_for_tiers(self) -> bool:
        """Whether nobody can go on before a tier has answered."""
        return bool(self.loading or self.admission.asking) and not any(self.prefilling)

    @property
    def waiting(self) -> list[Sequence]:
        """The queue, in the order of their turns."""
        return list(self.queue)

    @property
    def caches(self) -> list[PageCache]:
        """The page cache of each rank."""
        return self.pages.caches

    def add(self, sequence: Sequence) -> None:
        """Puts a request into the queue, behind all others of its priority."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.queued_at = perf_counter()
        self.sequences[sequence.id] = sequence
        self.queue.push(sequence)
        if self.bootstrap_rooms is not None:
            self.bootstrap_rooms.open(sequence.request.bootstrap_room)

    def begin_step(self) -> None:
        """Has running requests give way to waiting ones of a lower priority number, before anything is planned."""
        self.admission.preempt_for()

    def admit(self) -> None:
        """Starts as many waiting requests as fit."""
        for sequence in self.admission.admit():
            if self.bootstrap_rooms is not None:
                self.bootstrap_rooms.begin(sequence.request.bootstrap_room)
            if sequence.state is SequenceStatus.LOADING:
                _join(self.loading, sequence)
            else:
                _join(self.prefilling[self.slots.rank_of(sequence.slot)], sequence)

    def note_loaded(self, sequence: Sequence, pages: int) -> None:
        """Notes that a step loads the next `pages` pages of a request that waits for them."""
        sequence.prefilled += pages * self.cfg.page_size
        sequence.found += pages
        self.balancer.charge(sequence)
        if not sequence.started:
            sequence.num_cached = min(sequence.prefilled, sequence.prompt_length)

    def begin_prefill(self, sequence: Sequence) -> None:
        """Lets a request go on that has got all of its prefix that a tier could give."""
        self.loading.remove(sequence)
        sequence.state = SequenceStatus.PREFILLING
        _join(self.prefilling[self.slots.rank_of(sequence.slot)], sequence)

    def recompute(self, sequence: Sequence, start: int) -> None:
        """Has a running request compute its tokens from `start` on again: what launched steps did to them is void."""
        line = self.prefilling[self.slots.rank_of(sequence.slot)]
        if sequence not in line:
            line.insert(next((i for i, s in enumerate(line) if s.priority >= sequence.priority), len(line)), sequence)
        self.slots.reset(sequence.slot)
        sequence.state, sequence.prefilled = SequenceStatus.PREFILLING, start
        self.balancer.charge(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a request out wherever it is; its pages are free once no launched step can write them."""
        del self.sequences[sequence.id]
        if self.bootstrap_rooms is not None:
            self.bootstrap_rooms.leave(sequence.request.bootstrap_room)
        if sequence.slot >= 0:
            self._vacate(sequence, SequenceStatus.ENDED)
        else:
            self.queue.remove(sequence)

    def invalidate_pages(self, sequence: Sequence) -> None:
        """Keeps what a request has written from being shared: its logits were not finite.

        Pages that it found in the prefix cache are others'. Forgetting them let one tenant empty the cache for all.
        """
        sequence.is_sound = False
        rank = self.slots.rank_of(sequence.slot)
        self.caches[rank].forget(sequence.pages[sequence.found :])
        if self.tiers is not None:
            keys = sequence.keys[sequence.found : sequence.published]
            self.distrusted.update(keys)
            self.tiers.of(rank).forget(keys)

    def flush(self) -> None:
        """Empties the prefix cache, and the host's memory of pages; running requests keep theirs."""
        if self.events is not None:
            self.events.note(Cleared())
        for cache in self.caches:
            cache.clear()
        self.outgoing.clear()
        if self.tiers is not None:
            self.tiers.clear()

    def abandon(self) -> None:
        """Notes that no launched step will be collected any more."""
        self.pages.collect(self.pages.launched)

    def publish(self, sequence: Sequence, cached: int) -> None:
        """Makes the pages of a running request findable whose tokens are among the first `cached`.

        Their latents are in the cache. Pages of a prompt are published chunk by chunk, since others may wait for them;
        those of an answer when the request leaves its slot: a page at a time they took half of a step's host time.
        """
        count = cached // self.cfg.page_size
        if not self.cfg.enable_prefix_caching or not sequence.is_sound or count <= sequence.published:
            return
        if count > len(sequence.keys):
            known, last = len(sequence.keys), sequence.keys[-1] if sequence.keys else sequence.root
            behind = self.slots.history.read(sequence.slot, known * self.cfg.page_size, count * self.cfg.page_size)
            sequence.keys += keys_behind(last, behind, self.cfg.page_size)
        rank, first = self.slots.rank_of(sequence.slot), sequence.published
        keys, pages = sequence.keys[first:count], sequence.pages[first:count]
        fresh = self.caches[rank].publish(keys, pages)
        sequence.published = count
        if self.tiers is not None:
            self._pass_on(rank, keys, pages)
        self._filled(sequence, rank, keys)
        if self.events is not None:
            self._tell(sequence, rank, [first + i for i in fresh])

    def _pass_on(self, rank: int, keys: list[Key], pages: list[int]) -> None:
        """Notes which of some pages the tiers lack."""
        assert self.tiers is not None
        lacks = self.tiers.of(rank).lacks
        for key, page in zip(keys, pages, strict=True):
            if lacks(key):
                self.distrusted.discard(key)
                self.outgoing.append((rank, key, page))

    def _filled(self, sequence: Sequence, rank: int, keys: Iterable[Key]) -> None:
        """Lets those go on that waited for pages which this sequence was about to fill."""
        filled = sequence.pending.intersection(keys)
        if not filled:
            return
        sequence.pending -= filled
        pending = self.pages.pending[rank]
        for key in filled:
            del pending[key]
        self.queue.wake(rank, filled)

    def attach_tiers(self, tiers: HostTiers | Hosts, bootstrap_rooms: "BootstrapRooms | None" = None) -> None:
        """Reads pages from `tiers` and offloads to them from now on; `bootstrap_rooms` records who waits for pages."""
        self.admission.tiers = self.balancer.tiers = tiers
        self.bootstrap_rooms = bootstrap_rooms

    def tell_events_to(self, record: EventQueue) -> None:
        """Has `record` hear which pages can be found from now on."""
        self.events = record
        for rank, cache in enumerate(self.caches):
            cache.index.watch = EventSource(record, "GPU", rank)

    def spell(self, sequence: Sequence, first: int, stop: int) -> None:
        """Tells which tokens stand on a request's pages `first` to `stop`, which a tier may soon tell of."""
        if self.events is not None:
            self.events.note(self._spelled(sequence, first, stop))

    def _tell(self, sequence: Sequence, rank: int, indices: list[int]) -> None:
        """Tells that pages of a running request can be found now, those behind each other at once."""
        watch = self.caches[rank].index.watch
        assert watch is not None
        breaks = [i for i in range(1, len(indices)) if indices[i] != indices[i - 1] + 1]
        for start, end in itertools.pairwise([0, *breaks, len(indices)]):
            if end > start:
                spelled = self._spelled(sequence, indices[start], indices[end - 1] + 1)
                watch.stored(spelled.keys, spelled)

    def _spelled(self, sequence: Sequence, first: int, stop: int) -> Spelled:
        tokens = self.slots.history.read(sequence.slot, first * self.cfg.page_size, stop * self.cfg.page_size)
        tenant = None if sequence.root == self._common_root else sequence.root
        return Spelled(sequence.keys[first:stop], sequence.keys[first - 1] if first else None, tokens, tenant)

    def extend(self, short: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Gives one more page to each of the slots `short`.

        Returns the slots that got one, their new pages, and the slots that sit this step out for want of pages.
        """
        rank = short // self.cfg.max_num_seqs
        wanted = np.bincount(rank, minlength=self.cfg.num_ranks)
        each = zip(wanted.tolist(), self.admission.yielding.left_by_last(), self.caches, strict=True)
        scarce = [r for r, (count, left, cache) in enumerate(each) if count and count > cache.available - left]
        if not scarce:
            return short, self._give_pages(short, rank), []
        contested = np.isin(rank, scarce)
        others = short[~contested]
        pages = dict(zip(others.tolist(), self._give_pages(others, rank[~contested]).tolist(), strict=True))
        found, stalled = self._extend_oldest(short[contested])
        pages |= found
        return np.fromiter(pages, np.int64, len(pages)), np.fromiter(pages.values(), np.int64, len(pages)), stalled

    def _give_pages(self, slots: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Gives a page to each of the ascending `slots`, whose ranks `rank` have enough; returns the pages."""
        wanted, sequences = np.bincount(rank, minlength=1).tolist(), self.slots.sequences
        pages: list[int] = []
        for cache, count in zip(self.caches, wanted, strict=False):
            if count:
                pages += cache.allocate_several(count)
        for sequence, page in zip(map(sequences.__getitem__, slots.tolist()), pages, strict=True):
            assert sequence is not None  # only a running request asks
            sequence.pages.append(page)
        self.slots.capacity[slots] += self.cfg.page_size
        return np.array(pages, np.int64)

    def _extend_oldest(self, short: np.ndarray) -> tuple[dict[int, int], list[int]]:
        """Gives pages to slots of ranks without enough, in the order of the requests' turns.

        Without a free page the last one of the rank is pre-empted: of the highest priority number the youngest. Its
        pages may still be written by the step in flight, so the request in need sits this step out. What others of
        lower numbers may need is left to them.

        Returns new pages by slot, and the slots that sit out.
        """
        pages: dict[int, int] = {}
        stalled: list[int] = []
        demand = [0] * self.cfg.num_ranks
        sequences = [self.slots.sequences[slot] for slot in short.tolist()]
        for sequence in sorted((s for s in sequences if s is not None), key=_by_turn):
            slot = sequence.slot
            if slot < 0:
                continue  # pre-empted for an older one
            if self._make_room(sequence, demand):
                [pages[slot]] = self._give_pages(np.array([slot]), np.array([self.slots.rank_of(slot)])).tolist()
            elif sequence.slot >= 0:
                stalled.append(slot)
        return pages, [slot for slot in stalled if self.slots.decoding[slot]]

    def _make_room(self, sequence: Sequence, demand: list[int]) -> bool:
        """Sees to a free page on the request's rank, pre-empting as little as needed; False where it has to wait."""
        rank = self.slots.rank_of(sequence.slot)
        cache, left = self.caches[rank], self.admission.yielding.left_by(rank, sequence.priority)
        demand[rank] += cache.available <= left
        while cache.available <= left and self.pages.num_held[rank] < demand[rank] + left - cache.available:
            last = max(self.slots.on_rank(rank), key=_by_turn)
            self._preempt(last)
            if last is sequence:
                return False
            demand[rank] -= cache.available > left
        return cache.available > left

    def _preempt(self, sequence: Sequence) -> None:
        """Sends a running request back to the queue; it will compute its known tokens again."""
        slot = sequence.slot
        tokens = self.slots.history.read(slot, 0, int(self.slots.known[slot]))
        self._vacate(sequence, SequenceStatus.WAITING)
        sequence.tokens = tokens
        if self.cfg.enable_prefix_caching:
            extend_keys(sequence.root, sequence.keys, tokens, self.cfg.page_size)
        self.queue.push(sequence)
        self.num_preemptions += 1

    def _vacate(self, sequence: Sequence, state: SequenceStatus) -> None:
        """Takes slot and pages from a running request, and lets those go on that waited for its pages."""
        rank, known = self.slots.rank_of(sequence.slot), int(self.slots.known[sequence.slot])
        if known > len(sequence.tokens):  # it has got a token, so all of its prompt is in the cache
            self.publish(sequence, known - 1)
        if sequence in self.loading:
            self.loading.remove(sequence)
        if sequence in self.prefilling[rank]:
            self.prefilling[rank].remove(sequence)
        self._filled(sequence, rank, sequence.pending)
        self.balancer.discharge(sequence)
        self.slots.leave(sequence, state)
        pages, sequence.pages = sequence.pages, []
        self.pages.give_back(rank, pages)


def _by_turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.turn


def _join(line: list[Sequence], sequence: Sequence) -> None:
    """Puts a sequence behind all those of its priority or a lower one."""
    place = len(line)
    while place and line[place - 1].priority > sequence.priority:
        place -= 1
    line.insert(place, sequence)
