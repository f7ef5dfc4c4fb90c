"""Batch slots: the running requests as numpy columns, so that a step's bookkeeping is a few vector operations.

The slots of all ranks form one flat range: slot s of rank r is `r * max_num_seqs + s`.
"""

import collections.abc
import dataclasses
import heapq
from collections import Counter, deque

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.kv_cache.page_cache import PageCache, RankPrefixIndex
from dsv3.kv_cache.page_keys import Key
from dsv3.scheduler.sequence import Sequence, SequenceStatus

# Codes that a sampler returns instead of a token id, in descending order.
NOT_FINITE = -1
"""The row's logits are not finite."""
NOTHING = -2
"""A rejected draft, behind the accepted tokens of a row. As the first token: padding, or a step that is retried."""
UNDRAFTED = -3
"""A position behind the accepted tokens for which no draft was proposed."""

_CHUNK = 256  # tokens that move from the ring to `_full` at once; with 64, moving took twice as long as writing
_RING = 2 * _CHUNK  # a row of drafts may reach into the next chunk
_RING_MASK = _RING - 1  # numpy divides integers 20 times as slowly as it masks them
_NO_TOKENS = np.empty(0, np.int32)


class History:
    """Token ids by slot. Recent ones lie in a ring of 512 per slot; older ones in a buffer of the request.

    One array for the longest request of every slot took 12 GB for 18,432 slots of 163,840 tokens, and each step wrote
    all over it.
    """

    def __init__(self, num_slots: int) -> None:
        self._recent = np.zeros((num_slots, _RING), np.int32)
        self._flat, self._starts = self._recent.reshape(-1), np.arange(num_slots, dtype=np.int64) * _RING
        self._bytes = memoryview(self._flat).cast("B")
        self._prefix = [_NO_TOKENS] * num_slots  # what a request has when it gets its slot
        self._full = [bytearray()] * num_slots  # whole chunks behind the last whole chunk of `_prefix`

    def begin(self, slot: int, tokens: np.ndarray) -> None:
        """Sets the initial tokens `[n]` of a slot's new request; keeps a reference, not a copy."""
        self._prefix[slot], self._full[slot] = tokens, bytearray()
        first = len(tokens) // _CHUNK * _CHUNK
        offset = first & _RING_MASK
        self._recent[slot, offset : offset + len(tokens) - first] = tokens[first:]

    def clear(self, slot: int) -> None:
        """Drops the tokens of a slot."""
        self._prefix[slot], self._full[slot] = _NO_TOKENS, bytearray()

    def append(self, slots: np.ndarray, before: np.ndarray, known: np.ndarray, tokens: np.ndarray) -> None:
        """Writes `tokens` `[n, S]` behind the first `before` `[n]` of `slots` `[n]`; those below `known` `[n]` count.

        Later calls overwrite the others. S is far below a page.
        """
        starts = self._starts[slots]
        if tokens.shape[1] == 1:
            self._flat[starts + (before & _RING_MASK)] = tokens[:, 0]
        else:
            self._flat[starts[:, None] + ((before[:, None] + np.arange(tokens.shape[1])) & _RING_MASK)] = tokens
        filled = ((before ^ known) >= _CHUNK).nonzero()[0]
        mine, firsts = slots[filled], starts[filled] + (before[filled] & _RING_MASK & -_CHUNK)
        for slot, first in zip(mine.tolist(), (firsts * self._recent.itemsize).tolist(), strict=True):
            self._full[slot] += self._bytes[first : first + _CHUNK * self._recent.itemsize]

    def read(self, slot: int, start: int, stop: int) -> np.ndarray:
        """Returns a slot's tokens `start` to `stop` as a new array int32."""
        prefix, full = self._prefix[slot], self._full[slot]
        base = len(prefix) // _CHUNK * _CHUNK
        first = base + len(full) // prefix.itemsize  # of the chunk that is being filled
        parts = [prefix[start : min(stop, base)]]
        if full and stop > base:
            parts.append(np.frombuffer(full, np.int32)[max(start - base, 0) : stop - base])
        if stop > first:
            offset = first & _RING_MASK
            parts.append(self._recent[slot, offset + max(start - first, 0) : offset + stop - first])
        return np.concatenate(parts)


NO_PRIORITY = -(2**63)
"""The priority of a free slot."""


class BatchSlots:
    """Columns over all slots. Six of them count a request's tokens:

    | column | counts |
    |---|---|
    | `known` | tokens that the host has seen |
    | `planned` | tokens once every launched step has finished, at most: drafts may be rejected |
    | `capacity` | tokens that its pages hold |
    | `limit` | tokens at which it ends |
    | `Sequence.prefilled` | tokens whose latents a launched step has written or will write, during prefill |
    | `Sequence.num_cached` | prompt tokens found in the prefix cache |

    `epoch` changes whenever a slot gets another request or its request is reset, and is unique over all slots: results
    of a step that was launched for an earlier epoch are recognized and dropped.
    """

    def __init__(self, cfg: EngineConfig, vocab_size: int) -> None:
        total = cfg.num_ranks * cfg.max_num_seqs
        self._per_rank, self._page_size, self._has_drafts = cfg.max_num_seqs, cfg.page_size, cfg.tokens_per_row > 1
        self.sequences: list[Sequence | None] = [None] * total
        self.ids = np.zeros(total, np.int64)  # of the requests
        self.planned = np.zeros(total, np.int64)
        self.known = np.zeros(total, np.int64)
        self.capacity = np.zeros(total, np.int64)
        self.limit = np.zeros(total, np.int64)
        self.epoch = np.arange(total, dtype=np.int64)
        self._next_epoch = total
        self.variant = np.zeros(total, np.int8)
        self.wants_logprobs = np.zeros(total, bool)
        self.wants_sampling_mask = np.zeros(total, bool)  # of those that want log-probabilities
        self.wants_routed_experts = np.zeros(total, bool)
        self.sends_routed_experts = np.zeros(total, bool)  # with every token
        self.constrained = np.zeros(total, bool)  # by a grammar
        self.started = np.zeros(total, bool)  # its first token has been reported
        self.decoding = np.zeros(total, bool)  # takes part in the next decode step
        self.drafts_proposed = np.zeros(total, np.int64)
        self.drafts_accepted = np.zeros(total, np.int64)
        self.history = History(total)
        # How many running requests each token stops or fails; the samplers' codes, below 0, index from the end.
        self.stop_counts = np.zeros(vocab_size - UNDRAFTED, np.int32)
        self.stop_counts[NOT_FINITE] = 1
        self.version = 0  # changes with `decoding`
        self.priority = np.full(total, NO_PRIORITY, np.int64)
        self._priorities: Counter[int] = Counter()  # of the running requests
        self.running = np.zeros(cfg.num_ranks, np.int64)  # slots in use, by rank
        self.total_running = 0  # on all ranks
        self._free = [list(range(r * self._per_rank, (r + 1) * self._per_rank)) for r in range(cfg.num_ranks)]

    def num_running(self, rank: int) -> int:
        """Returns how many slots of `rank` are in use."""
        return int(self.running[rank])

    @property
    def num_free(self) -> int:
        """Free slots on all ranks."""
        return len(self.sequences) - self.total_running

    def num_tokens(self) -> np.ndarray:
        """Returns the tokens of the running requests of each rank, `[X]` int64."""
        return self.planned.reshape(-1, self._per_rank).sum(1)

    def num_free_on(self, rank: int) -> int:
        """Returns how many slots of `rank` are free."""
        return len(self._free[rank])

    def rank_of(self, slot: int) -> int:
        """Returns the rank that a slot belongs to."""
        return slot // self._per_rank

    @property
    def lowest_priority(self) -> int:
        """The highest priority number of the running requests; `NO_PRIORITY` without one."""
        return max(self._priorities, default=NO_PRIORITY)

    @property
    def has_mixed_priorities(self) -> bool:
        """Whether requests of several priorities run."""
        return len(self._priorities) > 1

    def num_higher_priority(self, rank: int, priority: int) -> int:
        """Returns how many requests with a lower priority number than `priority` run on `rank`."""
        if min(self._priorities, default=priority) >= priority:
            return 0
        mine = self.priority[rank * self._per_rank : (rank + 1) * self._per_rank]
        return int(np.count_nonzero((mine < priority) & (mine != NO_PRIORITY)))

    def num_above_lowest_priority(self) -> np.ndarray:
        """Returns how many running requests of each rank have a lower priority number than its highest, `[ranks]`."""
        mine = self.priority.reshape(-1, self._per_rank)
        return np.count_nonzero((mine < mine.max(axis=1, keepdims=True)) & (mine != NO_PRIORITY), axis=1)

    def num_not_preemptible(self, priority: int) -> np.ndarray:
        """Returns how many running requests of each rank one of `priority` must not preempt, `[ranks]`."""
        if self.lowest_priority <= priority:
            return self.running
        later = (self.priority > priority).nonzero()[0]
        return self.running - np.bincount(later // self._per_rank, minlength=len(self.running))

    def preemptible_on_rank(self, rank: int, priority: int) -> list[Sequence]:
        """Returns the running requests on `rank` that one of `priority` may preempt; the last is preempted first."""
        return sorted((s for s in self.on_rank(rank) if s.priority > priority), key=lambda s: s.turn)

    def on_rank(self, rank: int) -> list[Sequence]:
        """Returns the running requests of `rank`."""
        start = rank * self._per_rank
        return [s for s in self.sequences[start : start + self._per_rank] if s is not None]

    def holds(self, sequence: Sequence, epoch: int) -> bool:
        """Returns whether a request still has the slot that something was launched for in this epoch."""
        return sequence.slot >= 0 and bool(self.epoch[sequence.slot] == epoch)

    def allocate(self, sequence: Sequence, rank: int) -> None:
        """Allocates the lowest free slot of `rank` to a sequence."""
        slot = heapq.heappop(self._free[rank])
        sequence.slot, sequence.state = slot, SequenceStatus.PREFILLING
        self.running[rank] += 1
        self.total_running += 1
        self.sequences[slot] = sequence
        self.ids[slot] = sequence.id
        self.priority[slot] = sequence.priority
        self._priorities[sequence.priority] += 1
        self.history.begin(slot, sequence.tokens)
        self.planned[slot] = self.known[slot] = len(sequence.tokens)
        self.capacity[slot] = len(sequence.pages) * self._page_size
        self.limit[slot] = sequence.max_length
        self.variant[slot] = sequence.variant
        self.wants_logprobs[slot] = sequence.sampling.logprobs is not None
        self.wants_sampling_mask[slot] = sequence.sampling.return_sampling_mask
        self.wants_routed_experts[slot] = sequence.routed is not None
        self.sends_routed_experts[slot] = sequence.routed is not None and sequence.routed.sends_each_step
        self.constrained[slot] = sequence.matcher is not None
        self.started[slot] = sequence.started
        if self._has_drafts:
            self.drafts_proposed[slot] = self.drafts_accepted[slot] = 0
        for token in sequence.stop_ids:
            self.stop_counts[token] += 1

    def start_decoding(self, slot: int) -> None:
        """Lets a slot decode: the last chunk of its prompt, which samples a token, has been launched."""
        self.planned[slot] += 1
        self.resume_decoding(np.array([slot]))

    def resume_decoding(self, slots: np.ndarray) -> None:
        """Includes `slots` in the next decode step."""
        self.decoding[slots] = True
        self.version += 1
        for slot in slots.tolist():
            sequence = self.sequences[slot]
            assert sequence is not None
            sequence.state = SequenceStatus.DECODING

    def stop_decoding(self, slots: np.ndarray) -> None:
        """Excludes `slots` from decode steps: all the tokens they may have are planned."""
        self.decoding[slots] = False
        self.version += 1

    def reset(self, slot: int) -> None:
        """Restarts a slot from its known tokens; results of steps that are in flight no longer apply to it."""
        self.planned[slot] = self.known[slot]
        self._change_epoch(slot)

    def _change_epoch(self, slot: int) -> None:
        self.epoch[slot] = self._next_epoch
        self._next_epoch += 1
        if self.decoding[slot]:
            self.decoding[slot] = False
            self.version += 1

    def free(self, sequence: Sequence, state: SequenceStatus) -> None:
        """Frees the slot of a sequence and sets the sequence's `state`."""
        slot, rank = sequence.slot, self.rank_of(sequence.slot)
        self.sequences[slot] = None
        self.history.clear(slot)
        self.planned[slot] = 0
        if self._has_drafts:
            sequence.timing.drafts_proposed += int(self.drafts_proposed[slot])
            sequence.timing.drafts_accepted += int(self.drafts_accepted[slot])
        self.priority[slot] = NO_PRIORITY
        self._priorities[sequence.priority] -= 1
        if not self._priorities[sequence.priority]:
            del self._priorities[sequence.priority]
        self.running[rank] -= 1
        self.total_running -= 1
        self._change_epoch(slot)
        for token in sequence.stop_ids:
            self.stop_counts[token] -= 1
        heapq.heappush(self._free[rank], slot)
        sequence.slot, sequence.state = -1, state


class RankPages:
    """The page caches of all ranks, and pages whose release waits for a step in flight.

    Steps run on the device in launch order. When a request leaves its slot while a step that contains it is in flight,
    its pages are freed only after the results of that step have arrived.
    """

    def __init__(self, cfg: EngineConfig) -> None:
        self.caches = [
            PageCache(
                cfg.num_pages,
                enable_prefix_caching=cfg.enable_prefix_caching,
                num_window_pages=cfg.num_window_pages,
            )
            for _ in range(cfg.num_ranks)
        ]
        self.rank_index = RankPrefixIndex(cfg.num_ranks)
        if cfg.num_ranks > 1:
            for rank, cache in enumerate(self.caches):
                cache.index.attach(self.rank_index, rank)
        # Keys of pages that running prefills will fill, with the request that does; see `Sequence.pending`.
        self.pending: list[dict[Key, Sequence]] = [{} for _ in range(cfg.num_ranks)]
        self._deferred: deque[tuple[int, PageCache, list[int]]] = deque()  # (step, cache, pages)
        self.launched = 0  # number of the last launched step
        self.collected = 0  # number of the last step whose results have arrived

    def longest_match(
        self, keys: collections.abc.Sequence[Key], ranks: collections.abc.Sequence[int] | None = None
    ) -> int:
        """Does a prefix cache lookup: returns the number of cached pages on the best of `ranks` (None: of all)."""
        if len(self.caches) == 1:
            return len(self.caches[0].match(keys))
        depths = self.depths(keys)
        if depths is None:
            return 0
        return int(depths.max() if ranks is None else depths[ranks].max())

    def depths(self, keys: collections.abc.Sequence[Key]) -> np.ndarray | None:
        """Returns how many leading `keys` each rank has cached and can continue, `[X]` int64; None if all are 0."""
        depths = self.rank_index.depths(keys)
        if depths is not None and self.caches[0].window is not None:
            for rank in depths.nonzero()[0].tolist():
                depths[rank] = len(self.caches[rank].match(keys[: depths[rank]]))
        return depths

    @property
    def has_deferred(self) -> bool:
        """Whether pages wait for a step's results to be freed."""
        return bool(self._deferred)

    @property
    def in_use(self) -> int:
        """Pages with an owner, on all ranks."""
        return sum(cache.in_use for cache in self.caches)

    def begin_step(self) -> int:
        """Returns the number of the step that is launched next."""
        self.launched += 1
        return self.launched

    def collect(self, step: int) -> None:
        """Records that `step` and all before it have finished, and frees the pages that waited for them."""
        self.collected = step
        while self._deferred and self._deferred[0][0] <= step:
            _, cache, pages = self._deferred.popleft()
            cache.release(pages)

    def num_deferred(self, rank: int) -> int:
        """Returns how many releases of pages of `rank` wait for a step's results."""
        return sum(len(pages) for _, cache, pages in self._deferred if cache is self.caches[rank])

    def deferred(self, rank: int) -> set[int]:
        """Returns the pages of `rank` that are free once the results of all launched steps have arrived."""
        mine = self.caches[rank]
        deferred = Counter(page for _, cache, pages in self._deferred if cache is mine for page in pages)
        return {page for page, count in deferred.items() if mine.pool.references(page) == count}

    def free(self, cache: PageCache, pages: list[int]) -> None:
        """Frees pages of a request, in one of `caches` or `window`, once no launched step can read or write them."""
        if self.launched > self.collected:
            self._deferred.append((self.launched, cache, pages))
        else:
            cache.release(pages)

    def window(self, rank: int) -> PageCache:
        """Returns the cache of a rank's window pages, for a model that has them."""
        window = self.caches[rank].window
        assert window is not None
        return window


@dataclasses.dataclass(frozen=True, slots=True)
class BatchRows:
    """Live rows of a batch: row i belongs to flat slot `slots[i]` and lies at `[rank[i], position[i]]`.

    `epochs` are the slots' epochs at launch. The object is replaced only when the set of rows changes.
    """

    slots: np.ndarray  # [n]
    rank: np.ndarray  # [n]
    position: np.ndarray  # [n]
    epochs: np.ndarray  # [n]
    ids: np.ndarray  # [n] int64, of their requests

    @classmethod
    def at(cls, table: BatchSlots, slots: np.ndarray, rank: np.ndarray, position: np.ndarray) -> "BatchRows":
        """Returns rows of `slots`, with their epochs and request ids."""
        return cls(slots, rank, position, table.epoch[slots], table.ids[slots])

    def only(self, keep: np.ndarray) -> "BatchRows":
        """Returns the rows where `keep` ([n] bool) is set."""
        return BatchRows(*(getattr(self, field.name)[keep] for field in dataclasses.fields(self)))


@dataclasses.dataclass
class DraftCounts:
    """Totals since the start: rows with drafts, their drafts, and accepted drafts by position in the row."""

    accepted: np.ndarray  # [S - 1] int64
    rows: int = 0
    tokens: int = 0

    def add(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Counts a step's results `tokens` `[n, S]`; returns each row's accepted tokens and its drafts, `[n]` int64."""
        counts, drafts = np.ones(len(tokens), np.int64), tokens.shape[1] - 1
        proposed = np.full(len(tokens), drafts)
        if not drafts:
            return counts, proposed
        for i, column in enumerate(tokens.T[1:]):  # numpy takes 15 times as long along the short axis
            right = column > NOTHING
            counts += right
            self.accepted[i] += np.count_nonzero(right)
        self.rows += len(tokens)
        self.tokens += len(tokens) * drafts
        missing = tokens == UNDRAFTED
        if absent := int(np.count_nonzero(missing)):
            self.rows -= int(np.count_nonzero(missing[:, 1]))  # a row's drafts have no gaps
            self.tokens -= absent
            proposed -= missing.sum(axis=1)
        return counts, proposed
