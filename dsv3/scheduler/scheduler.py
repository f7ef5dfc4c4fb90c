"""The scheduler: queues requests, allocates slots and pages, preempts, and finishes requests. Imports no jax.

Every decision assumes that each launched step completes as planned; results arrive one step late through
`process_results`. So a request may have one step too many in flight when it finishes: that step's tokens are dropped,
and the pages it may still write are freed only after its results have arrived. The jobs of a step (`dsv3.engine.jobs`)
schedule their work with this class.
"""

import functools
import itertools
import os
import weakref
from collections import deque
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.kv_cache.events import Cleared, EventQueue, EventSource, PageTokens
from dsv3.kv_cache.page_keys import (
    KEY_BYTES,
    Key,
    extend_keys,
    next_keys,
    root_for_weights,
    root_key,
    window_keys,
)
from dsv3.kv_cache.tiers.hosts import Hosts
from dsv3.kv_cache.tiers.tiers import HostTiers
from dsv3.scheduler.admission import Admission
from dsv3.scheduler.balance import Balancer
from dsv3.scheduler.batch_slots import BatchSlots, DraftCounts, RankPages
from dsv3.scheduler.cost import KEYS_PER_TOKEN
from dsv3.scheduler.request import FIRST_VERSION
from dsv3.scheduler.routed_experts import PageExperts, RequestExperts
from dsv3.scheduler.sequence import Sequence, SequenceStatus, WaitingQueue

if TYPE_CHECKING:
    from dsv3.kv_cache.transfer.server import BootstrapRooms


class Offload(NamedTuple):
    """A page to offload, under its key; or one part of the window page of that key, under the part's."""

    rank: int
    key: Key
    page: int
    part: int | None = None


class Scheduler:
    """Continuous batching with chunked prefill over the ranks' slots and pages."""

    def __init__(self, cfg: EngineConfig, vocab_size: int, keys_per_token: float = KEYS_PER_TOKEN) -> None:
        self.cfg = cfg
        self.slots = BatchSlots(cfg, vocab_size)
        self.pages = RankPages(cfg)
        self.caches = self.pages.caches
        self.queue = WaitingQueue()
        self.balancer = Balancer(cfg, self.slots, self.pages, keys_per_token)
        # A cycle would keep the host memory of an engine that is gone until garbage is collected.
        preempt = functools.partial(Scheduler._preempt, weakref.proxy(self))
        self.admission = Admission(cfg, self.slots, self.pages, self.queue, self.balancer, preempt)
        self.windows = self.admission.windows
        self.tiers: HostTiers | Hosts | None = None  # of pages below the devices
        self.page_experts = PageExperts(cfg.num_pages * cfg.num_ranks, cfg.page_size)
        self.sequences: dict[int, Sequence] = {}  # every request that has not ended
        # In the order of priority, then admission.
        self.prefilling: list[list[Sequence]] = [[] for _ in range(cfg.num_ranks)]
        self.loading: list[Sequence] = []  # whose prefix is loaded from a tier
        self.offload_queue: deque[Offload] = deque()  # of pages that the tiers lack
        self.invalidated: set[Key] = set()  # of pages that may be on their way to a tier
        self.num_flushes = 0
        self.events: EventQueue | None = None
        self._common_root = root_key(cfg.fingerprint, "")  # of requests without a salt
        self.weights, self.weight_version = "", FIRST_VERSION
        self.num_preemptions = 0
        self.prompt_tokens = 0  # computed, not found in the cache
        self.generated_tokens = 0
        self.bootstrap_rooms: BootstrapRooms | None = None  # of requests whose pages another instance waits for
        self.drafts = DraftCounts(np.zeros(cfg.tokens_per_row - 1, np.int64))
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether requests are unfinished, or page offloads, orders to tiers or a step's results are outstanding."""
        has_orders = self.tiers is not None and self.tiers.has_orders
        return bool(self.sequences or self.offload_queue) or self.pages.has_deferred or has_orders

    @property
    def waits_only_for_tiers(self) -> bool:
        """Whether no request can advance before a tier has answered."""
        return bool(self.loading or self.admission.awaiting_lookup) and not any(self.prefilling)

    @property
    def waiting(self) -> list[Sequence]:
        """The waiting requests, in the order of their turns."""
        return list(self.queue)

    def add(self, sequence: Sequence) -> None:
        """Queues a request, behind all others of its priority."""
        if sequence.request.weights != self.weights:  # prepared before they changed
            self.rekey(sequence)
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.timing.enter("queue")
        if sequence.sampling.return_routed_experts:
            given = sequence.request.prompt_experts
            sequence.routed = RequestExperts(self.page_experts, given, sends_each_step=bool(sequence.sampling.stop))
        self.sequences[sequence.id] = sequence
        self.queue.push(sequence)
        if self.bootstrap_rooms is not None:
            self.bootstrap_rooms.update(sequence.request.bootstrap_room, "queued")

    def admit(self) -> None:
        """Starts as many waiting requests as fit."""
        for sequence in self.admission.admit():
            if self.bootstrap_rooms is not None:
                self.bootstrap_rooms.update(sequence.request.bootstrap_room, "begun")
            if self.windows is not None and self.tiers is not None:  # it was provisional, so no tier may have it
                rank = self.slots.rank_of(sequence.slot)
                self._queue_window_offload(rank, self.windows.continued(sequence))
            if sequence.state is SequenceStatus.LOADING:
                _insert_by_priority(self.loading, sequence)
            else:
                _insert_by_priority(self.prefilling[self.slots.rank_of(sequence.slot)], sequence)

    def on_loaded(self, sequence: Sequence, pages: int) -> None:
        """Records that a step loads the next `pages` pages of a request that waits for them."""
        sequence.prefilled += pages * self.cfg.page_size
        sequence.num_found += pages
        self.balancer.charge(sequence)
        if not sequence.started:
            sequence.num_cached = min(sequence.prefilled, sequence.prompt_length)

    def begin_prefill(self, sequence: Sequence) -> None:
        """Starts the prefill of a request once no tier has more of its prefix.

        What was loaded of a prefix cannot be continued without its window page, which belongs to the last page: then
        the request starts again, and loads nothing.
        """
        if self.windows is not None and sequence.prefilled < sequence.load_stop * self.cfg.page_size:
            sequence.may_load = False
            self._requeue(sequence)
            return
        self.loading.remove(sequence)
        self.admission.record_loaded(sequence)
        sequence.state = SequenceStatus.PREFILLING
        _insert_by_priority(self.prefilling[self.slots.rank_of(sequence.slot)], sequence)

    def on_computed(self, sequence: Sequence, stop: int) -> None:
        """Publishes the pages of a prompt whose first `stop` tokens are computed; releases what it needs no longer."""
        self.publish(sequence, stop)
        if self.windows is not None:
            self.windows.release_before(sequence, stop)

    def recompute(self, sequence: Sequence, start: int) -> None:
        """Recomputes the tokens of a running request from `start` on: results of launched steps are void for it."""
        line = self.prefilling[self.slots.rank_of(sequence.slot)]
        if sequence not in line:
            line.insert(next((i for i, s in enumerate(line) if s.priority >= sequence.priority), len(line)), sequence)
        self.slots.reset(sequence.slot)
        if self.windows is not None:  # what is void has overwritten rows of the window of the page that it began in
            start -= start % self.cfg.page_size
        sequence.state, sequence.prefilled = SequenceStatus.PREFILLING, start
        self.balancer.charge(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Removes a finished or aborted request; its pages are freed once no launched step can write them."""
        del self.sequences[sequence.id]
        sequence.timing.ended_at = monotonic()
        if self.bootstrap_rooms is not None:
            self.bootstrap_rooms.update(sequence.request.bootstrap_room, "gone")
        if sequence.slot >= 0:
            self._release(sequence, SequenceStatus.ENDED)
        else:
            self.queue.remove(sequence)

    def invalidate_pages(self, sequence: Sequence) -> None:
        """Removes the pages that a request has written from all caches: its logits were not finite.

        Pages that it found in the prefix cache stay: other requests wrote them, and removing them would let one tenant
        empty the cache for all.
        """
        sequence.has_finite_logits = False
        rank = self.slots.rank_of(sequence.slot)
        self.caches[rank].invalidate(sequence.pages[sequence.num_found :])
        if self.windows is not None:
            self.windows.invalidate(sequence, rank)
        if self.tiers is not None:
            keys = sequence.keys[sequence.num_found : sequence.num_published]
            keys += [part for key in keys for part in window_keys(key, self.tiers.of(rank).window_parts)]
            self.invalidated.update(keys)
            self.tiers.of(rank).invalidate(keys)

    def flush(self) -> None:
        """Empties the prefix cache and the host pool; running requests keep their pages.

        Pages of which a step in flight makes copies for a tier do not get there (`num_flushes` has changed).
        """
        self.num_flushes += 1
        if self.events is not None:
            self.events.append(Cleared())
        for cache in self.caches:
            cache.clear()
        self.page_experts.clear()
        self.offload_queue.clear()
        if self.tiers is not None:
            self.tiers.clear()

    def retract_all(self) -> None:
        """Moves all running requests back to the queue: their known tokens are computed again."""
        for rank in range(self.cfg.num_ranks):
            for sequence in self.slots.on_rank(rank):
                sequence.timing.retractions += 1
                self._requeue(sequence)

    def change_weights(self, weights: str, version: str) -> list[Sequence]:
        """Gives every request the prefix keys of other weights, and empties the caches; no step may be in flight.

        A running request keeps its pages, which none may find: they are partly of the weights before. Returns the
        requests that have tokens of these.
        """
        self.weights, self.weight_version = weights, version
        self._common_root = root_for_weights(root_key(self.cfg.fingerprint, ""), weights)
        for sequence in self.sequences.values():
            if sequence.slot >= 0:
                self._wake_waiting_for(sequence, self.slots.rank_of(sequence.slot), tuple(sequence.pending))
            self.rekey(sequence, private=sequence.slot >= 0)
            if sequence.routed is not None:
                sequence.routed.on_other_weights()
        self.flush()
        return [sequence for sequence in self.sequences.values() if sequence.started]

    def rekey(self, sequence: Sequence, *, private: bool = False) -> None:
        """Computes the keys of a request under the present weights, or keys that no other request has."""
        sequence.request = msgspec.structs.replace(sequence.request, weights=self.weights)
        sequence.root = os.urandom(KEY_BYTES) if private else sequence.request.key_root
        sequence.keys = []
        if self.cfg.enable_prefix_caching:
            extend_keys(sequence.root, sequence.keys, sequence.tokens, self.cfg.page_size)

    def publish(self, sequence: Sequence, cached: int) -> None:
        """Inserts the pages of a running request's first `cached` tokens into the prefix cache.

        Their latents are on the device. Pages of a prompt are published chunk by chunk, since others may wait for them;
        those of an answer when the request leaves its slot: page by page they took half of a step's host time.
        """
        count = cached // self.cfg.page_size
        if not self.cfg.enable_prefix_caching or not sequence.has_finite_logits or count <= sequence.num_published:
            return
        if count > len(sequence.keys):
            known, last = len(sequence.keys), sequence.keys[-1] if sequence.keys else sequence.root
            answer = self.slots.history.read(sequence.slot, known * self.cfg.page_size, count * self.cfg.page_size)
            sequence.keys += next_keys(last, answer, self.cfg.page_size)
        rank, first = self.slots.rank_of(sequence.slot), sequence.num_published
        keys, pages = sequence.keys[first:count], sequence.pages[first:count]
        if sequence.routed is not None:
            sequence.routed.keep(first, keys)
        fresh = self.caches[rank].publish(keys, pages)
        sequence.num_published = count
        if self.tiers is not None:
            self._queue_offload(rank, keys, pages)
        if self.windows is not None:
            inserted = self.windows.publish(sequence, rank, count)
            if self.tiers is not None:
                self._queue_window_offload(rank, inserted)
        self._wake_waiting_for(sequence, rank, keys)
        if self.events is not None:
            self._publish_stored(sequence, rank, [first + i for i in fresh])

    def _queue_offload(self, rank: int, keys: list[Key], pages: list[int]) -> None:
        """Queues the pages that the tiers lack to be offloaded."""
        assert self.tiers is not None
        lacks = self.tiers.of(rank).lacks
        for key, page in zip(keys, pages, strict=True):
            if lacks(key):
                self.invalidated.discard(key)
                self.offload_queue.append(Offload(rank, key, page))

    def _queue_window_offload(self, rank: int, pages: list[tuple[Key, int]]) -> None:
        """Queues window pages to be offloaded, in parts that have keys of their own."""
        assert self.tiers is not None
        tiers = self.tiers.of(rank)
        for key, page in pages:
            for number, part in enumerate(window_keys(key, tiers.window_parts)):
                if tiers.lacks(part):
                    self.invalidated.discard(part)
                    self.offload_queue.append(Offload(rank, key, page, number))

    def _wake_waiting_for(self, sequence: Sequence, rank: int, keys: Iterable[Key]) -> None:
        """Wakes requests that waited for pages which this sequence was to fill."""
        filled = sequence.pending.intersection(keys)
        if not filled:
            return
        sequence.pending -= filled
        pending = self.pages.pending[rank]
        for key in filled:
            del pending[key]
        self.queue.wake(rank, filled)

    def attach_tiers(self, tiers: HostTiers | Hosts, bootstrap_rooms: "BootstrapRooms | None" = None) -> None:
        """Loads pages from `tiers` and offloads to them from now on; updates the stages of `bootstrap_rooms`."""
        self.tiers = self.admission.tiers = self.balancer.tiers = tiers
        self.bootstrap_rooms = bootstrap_rooms

    def publish_events_to(self, queue: EventQueue) -> None:
        """Publishes KV events of the devices' pages to `queue` from now on."""
        self.events = queue
        for rank, cache in enumerate(self.caches):
            cache.index.events = EventSource(queue, "GPU", rank)

    def publish_token_ids(self, sequence: Sequence, first: int, stop: int) -> None:
        """Publishes the token ids of a request's pages `first` to `stop`, which a tier may report by key soon."""
        if self.events is not None:
            self.events.append(self._page_tokens(sequence, first, stop))

    def _publish_stored(self, sequence: Sequence, rank: int, indices: list[int]) -> None:
        """Publishes that pages of a running request are cached, contiguous ones in one event."""
        events = self.caches[rank].index.events
        assert events is not None
        breaks = [i for i in range(1, len(indices)) if indices[i] != indices[i - 1] + 1]
        for start, end in itertools.pairwise([0, *breaks, len(indices)]):
            if end > start:
                page_tokens = self._page_tokens(sequence, indices[start], indices[end - 1] + 1)
                events.stored(page_tokens.keys, page_tokens)

    def _page_tokens(self, sequence: Sequence, first: int, stop: int) -> PageTokens:
        tokens = self.slots.history.read(sequence.slot, first * self.cfg.page_size, stop * self.cfg.page_size)
        salted_root = None if sequence.root == self._common_root else sequence.root
        return PageTokens(sequence.keys[first:stop], sequence.keys[first - 1] if first else None, tokens, salted_root)

    def allocate_next_pages(self, short: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Allocates one more page to each of the slots `short`; preempts where a rank has too few.

        Returns the slots that got one, their new pages, and the slots that skip this step for lack of pages.
        """
        waiting: list[int] = []
        if self.windows is not None:
            fits = self.windows.affordable(short)
            short, waiting = short[fits], short[~fits].tolist()
        rank = short // self.cfg.max_num_seqs
        wanted = np.bincount(rank, minlength=self.cfg.num_ranks)
        each = zip(wanted.tolist(), self.admission.preemption.reserved_pages_by_rank(), self.caches, strict=True)
        scarce = [r for r, (count, left, cache) in enumerate(each) if count and count > cache.available - left]
        if not scarce:
            return short, self._append_pages(short, rank), waiting
        contested = np.isin(rank, scarce)
        others = short[~contested]
        pages = dict(zip(others.tolist(), self._append_pages(others, rank[~contested]).tolist(), strict=True))
        found, stalled = self._allocate_in_priority_order(short[contested])
        pages |= found
        stalled += [slot for slot in waiting if self.slots.decoding[slot]]
        return np.fromiter(pages, np.int64, len(pages)), np.fromiter(pages.values(), np.int64, len(pages)), stalled

    def _append_pages(self, slots: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Allocates a page to each of the ascending `slots`, whose ranks `rank` have enough; returns the pages."""
        wanted, sequences = np.bincount(rank, minlength=1).tolist(), self.slots.sequences
        pages: list[int] = []
        for cache, count in zip(self.caches, wanted, strict=False):
            if count:
                pages += cache.allocate(count)
        for sequence, page in zip(map(sequences.__getitem__, slots.tolist()), pages, strict=True):
            assert sequence is not None
            sequence.pages.append(page)
            if self.windows is not None:
                self.windows.extend(sequence)
        self.slots.capacity[slots] += self.cfg.page_size
        return np.array(pages, np.int64)

    def _allocate_in_priority_order(self, short: np.ndarray) -> tuple[dict[int, int], list[int]]:
        """Allocates pages to slots of ranks without enough, in the order of the requests' turns.

        Without a free page the last request of the rank is preempted: the youngest of the highest priority number. The
        step in flight may still write its pages, so the request in need skips this step. Pages reserved for lower
        numbers stay free.

        Returns new pages by slot, and the slots that skip the step.
        """
        pages: dict[int, int] = {}
        stalled: list[int] = []
        demand = [0] * self.cfg.num_ranks
        sequences = [self.slots.sequences[slot] for slot in short.tolist()]
        for sequence in sorted((s for s in sequences if s is not None), key=_by_turn):
            slot = sequence.slot
            if slot < 0:
                continue  # preempted for an older one
            if self._preempt_until_free(sequence, demand):
                [pages[slot]] = self._append_pages(np.array([slot]), np.array([self.slots.rank_of(slot)])).tolist()
            elif sequence.slot >= 0:
                stalled.append(slot)
        return pages, [slot for slot in stalled if self.slots.decoding[slot]]

    def _preempt_until_free(self, sequence: Sequence, demand: list[int]) -> bool:
        """Preempts as little as a free page on the request's rank needs; returns whether one is free now."""
        rank = self.slots.rank_of(sequence.slot)
        cache, left = self.caches[rank], self.admission.preemption.reserved_pages(rank, sequence.priority)
        demand[rank] += cache.available <= left
        while cache.available <= left and self.pages.num_deferred(rank) < demand[rank] + left - cache.available:
            last = max(self.slots.on_rank(rank), key=_by_turn)
            self._preempt(last)
            if last is sequence:
                return False
            demand[rank] -= cache.available > left
        return cache.available > left

    def _preempt(self, sequence: Sequence) -> None:
        """Preempts a running request: another needs its slot or pages."""
        self.num_preemptions += 1
        sequence.timing.preemptions += 1
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Moves a running request back to the queue; its known tokens will be recomputed."""
        slot = sequence.slot
        tokens = self.slots.history.read(slot, 0, int(self.slots.known[slot]))
        self._release(sequence, SequenceStatus.WAITING)
        sequence.timing.on_requeued(sequence.started)
        sequence.tokens = tokens
        if self.cfg.enable_prefix_caching:
            extend_keys(sequence.root, sequence.keys, tokens, self.cfg.page_size)
        self.queue.push(sequence)

    def _release(self, sequence: Sequence, state: SequenceStatus) -> None:
        """Releases slot and pages of a running request, and wakes requests that waited for its pages."""
        rank, known = self.slots.rank_of(sequence.slot), int(self.slots.known[sequence.slot])
        if known > len(sequence.tokens):  # it has sampled a token, so all of its prompt is in the cache
            self.publish(sequence, known - 1)
        if sequence in self.loading:
            self.loading.remove(sequence)
        if sequence in self.prefilling[rank]:
            self.prefilling[rank].remove(sequence)
        self._wake_waiting_for(sequence, rank, sequence.pending)
        self.balancer.discharge(sequence)
        self.slots.free(sequence, state)
        pages, sequence.pages = sequence.pages, []
        self.pages.free(self.caches[rank], pages)
        if self.windows is not None:
            self.windows.release(sequence, rank)


def _by_turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.turn


def _insert_by_priority(line: list[Sequence], sequence: Sequence) -> None:
    """Inserts a sequence behind all those of its priority number or a lower one."""
    index = len(line)
    while index and line[index - 1].priority > sequence.priority:
        index -= 1
    line.insert(index, sequence)
