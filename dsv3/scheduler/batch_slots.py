"""The running requests as numpy columns, so that a step's bookkeeping is a few vector operations and no loop.

Slots of all ranks stand in one flat range: slot s of rank r is `r * max_num_seqs + s`.
"""

import collections.abc
import dataclasses
import heapq
from collections import Counter, deque

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.kv_cache.page_cache import Holders, PageCache
from dsv3.kv_cache.page_keys import Key
from dsv3.scheduler.sequence import Sequence, SequenceStatus

# What a sampler gives for a place where no token of the vocabulary stands, in descending order.
NOT_FINITE = -1
"""Sampled for a row whose logits are not finite."""
NOTHING = -2
"""Fills a row of several tokens behind those that were accepted, where there was a draft.

It stands first in a row that shall not sample: of padding, or of a step that is computed again."""
UNDRAFTED = -3
"""Does so where there was none."""


_PART = 256  # tokens that leave a row at once: 64 by 64, that took twice as long as writing them
_WIDTH = 2 * _PART  # a row of drafts may reach into the next part
_IN_ROW = _WIDTH - 1  # the bits of a place in a row: numpy divides integers 20 times as slowly
_NONE = np.empty(0, np.int32)


class History:
    """Tokens by slot. Those that a step writes lie close together: a row of 512 per slot, which it goes round in.

    One array of every slot's longest request had 12 GB for 18,432 slots of 163,840 tokens, all of which came into use,
    and each step wrote all over it. What leaves a row lies in a buffer of its request.
    """

    def __init__(self, num_slots: int) -> None:
        self._recent = np.zeros((num_slots, _WIDTH), np.int32)
        self._flat, self._starts = self._recent.reshape(-1), np.arange(num_slots, dtype=np.int64) * _WIDTH
        self._bytes = memoryview(self._flat).cast("B")
        self._begun = [_NONE] * num_slots  # what a request has when it enters
        self._full = [bytearray()] * num_slots  # whole parts behind the last whole part of that

    def enter(self, slot: int, tokens: np.ndarray) -> None:
        """Notes the tokens `[n]` that a slot's new request begins with; they are kept, not copied."""
        self._begun[slot], self._full[slot] = tokens, bytearray()
        first = len(tokens) // _PART * _PART
        place = first & _IN_ROW
        self._recent[slot, place : place + len(tokens) - first] = tokens[first:]

    def leave(self, slot: int) -> None:
        """Forgets the tokens of a slot."""
        self._begun[slot], self._full[slot] = _NONE, bytearray()

    def note(self, slots: np.ndarray, before: np.ndarray, known: np.ndarray, tokens: np.ndarray) -> None:
        """Enters `tokens` `[n, S]` behind the `before` `[n]` of `slots` `[n]`; those up to `known` `[n]` are valid.

        What lies behind is written over by the next ones. S is far below a page.
        """
        starts = self._starts[slots]
        if tokens.shape[1] == 1:
            self._flat[starts + (before & _IN_ROW)] = tokens[:, 0]
        else:
            self._flat[starts[:, None] + ((before[:, None] + np.arange(tokens.shape[1])) & _IN_ROW)] = tokens
        filled = ((before ^ known) >= _PART).nonzero()[0]
        mine, firsts = slots[filled], starts[filled] + (before[filled] & _IN_ROW & -_PART)
        for slot, first in zip(mine.tolist(), (firsts * self._recent.itemsize).tolist(), strict=True):
            self._full[slot] += self._bytes[first : first + _PART * self._recent.itemsize]

    def read(self, slot: int, start: int, stop: int) -> np.ndarray:
        """Returns a slot's tokens `start` to `stop`, which have been noted, as a new array int32."""
        begun, full = self._begun[slot], self._full[slot]
        base = len(begun) // _PART * _PART
        first = base + len(full) // begun.itemsize  # of the part that is being filled
        parts = [begun[start : min(stop, base)]]
        if full and stop > base:
            parts.append(np.frombuffer(full, np.int32)[max(start - base, 0) : stop - base])
        if stop > first:
            place = first & _IN_ROW
            parts.append(self._recent[slot, place + max(start - first, 0) : place + stop - first])
        return np.concatenate(parts)


NOBODY = -(2**63)
"""Stands for the priority of a free slot."""


class BatchSlots:
    """Columns over all slots. Six of them count a request's tokens:

    | column | counts |
    |---|---|
    | `known` | tokens that the host has seen |
    | `planned` | tokens once every launched step has finished, at most: rows of several tokens may give fewer |
    | `capacity` | tokens that its pages hold |
    | `limit` | tokens at which it ends |
    | `Sequence.prefilled` | tokens whose latents a launched step has written or will write, while it is prefilling |
    | `Sequence.num_cached` | prompt tokens found in the prefix cache |

    `epoch` is another number each time a slot changes hands or begins anew, and no two slots ever have the same one:
    results of a step launched for an earlier epoch are recognised and dropped, wherever the request is by then.
    """

    def __init__(self, cfg: EngineConfig, vocab_size: int) -> None:
        total = cfg.num_ranks * cfg.max_num_seqs
        self._per_rank, self._page_size = cfg.max_num_seqs, cfg.page_size
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
        self.held = np.zeros(total, bool)  # to a grammar
        self.started = np.zeros(total, bool)  # its first token has been reported
        self.decoding = np.zeros(total, bool)  # takes part in the next decode step
        self.history = History(total)
        # Running requests that a token would stop, or fail; the codes, below 0, are indices from the end.
        self.ends = np.zeros(vocab_size - UNDRAFTED, np.int32)
        self.ends[NOT_FINITE] = 1
        self.version = 0  # changes with `decoding`
        self.priority = np.full(total, NOBODY, np.int64)  # of the requests; `NOBODY` in a free slot
        self._priorities: Counter[int] = Counter()  # of those that run
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
        """Returns the tokens that the running requests of each rank hold, `[X]` int64."""
        return self.planned.reshape(-1, self._per_rank).sum(1)

    def num_free_on(self, rank: int) -> int:
        """Returns how many slots of `rank` are free."""
        return len(self._free[rank])

    def rank_of(self, slot: int) -> int:
        """Returns the rank that a slot belongs to."""
        return slot // self._per_rank

    @property
    def latest_priority(self) -> int:
        """The highest number among the running requests' priorities, `NOBODY` where none runs."""
        return max(self._priorities, default=NOBODY)

    @property
    def are_mixed(self) -> bool:
        """Whether requests of several priorities run."""
        return len(self._priorities) > 1

    def num_before(self, rank: int, priority: int) -> int:
        """Returns how many requests of lower priority numbers run on `rank`."""
        if min(self._priorities, default=priority) >= priority:
            return 0
        mine = self.priority[rank * self._per_rank : (rank + 1) * self._per_rank]
        return int(np.count_nonzero((mine < priority) & (mine != NOBODY)))

    def num_before_last(self) -> np.ndarray:
        """Returns for each rank how many running requests have lower numbers than its highest, `[ranks]`."""
        mine = self.priority.reshape(-1, self._per_rank)
        return np.count_nonzero((mine < mine.max(axis=1, keepdims=True)) & (mine != NOBODY), axis=1)

    def running_before(self, priority: int) -> np.ndarray:
        """Returns how many slots of each rank do not have to give way to a request of `priority`, `[ranks]`."""
        if self.latest_priority <= priority:
            return self.running
        later = (self.priority > priority).nonzero()[0]
        return self.running - np.bincount(later // self._per_rank, minlength=len(self.running))

    def later_on_rank(self, rank: int, priority: int) -> list[Sequence]:
        """Returns the requests on `rank` that give way to one of `priority`, in the order of their turns."""
        return sorted((s for s in self.on_rank(rank) if s.priority > priority), key=lambda s: s.turn)

    def on_rank(self, rank: int) -> list[Sequence]:
        """Returns the requests that hold a slot of `rank`."""
        start = rank * self._per_rank
        return [s for s in self.sequences[start : start + self._per_rank] if s is not None]

    def enter(self, sequence: Sequence, rank: int) -> None:
        """Gives a sequence the lowest free slot of `rank`."""
        slot = heapq.heappop(self._free[rank])
        sequence.slot, sequence.state = slot, SequenceStatus.PREFILLING
        self.running[rank] += 1
        self.total_running += 1
        self.sequences[slot] = sequence
        self.ids[slot] = sequence.id
        self.priority[slot] = sequence.priority
        self._priorities[sequence.priority] += 1
        self.history.enter(slot, sequence.tokens)
        self.planned[slot] = self.known[slot] = len(sequence.tokens)
        self.capacity[slot] = len(sequence.pages) * self._page_size
        self.limit[slot] = sequence.max_length
        self.variant[slot] = sequence.variant
        self.wants_logprobs[slot] = sequence.sampling.logprobs is not None
        self.held[slot] = sequence.matcher is not None
        self.started[slot] = sequence.started
        for token in sequence.stop_ids:
            self.ends[token] += 1

    def start_decoding(self, slot: int) -> None:
        """Notes that the prompt's last chunk, which samples a token, has been launched."""
        self.planned[slot] += 1
        self.resume(np.array([slot]))

    def resume(self, slots: np.ndarray) -> None:
        """Has `slots` take part in the next decode step."""
        self.decoding[slots] = True
        self.version += 1
        for slot in slots.tolist():
            sequence = self.sequences[slot]
            assert sequence is not None  # only a running request decodes
            sequence.state = SequenceStatus.DECODING

    def pause(self, slots: np.ndarray) -> None:
        """Leaves `slots` out of decode steps: all the tokens they may have are planned."""
        self.decoding[slots] = False
        self.version += 1

    def reset(self, slot: int) -> None:
        """Has a slot begin anew with the tokens that are known: results of launched steps are not its owner's."""
        self.planned[slot] = self.known[slot]
        self._change_epoch(slot)

    def _change_epoch(self, slot: int) -> None:
        self.epoch[slot] = self._next_epoch
        self._next_epoch += 1
        if self.decoding[slot]:
            self.decoding[slot] = False
            self.version += 1

    def leave(self, sequence: Sequence, state: SequenceStatus) -> None:
        """Frees the slot of a sequence, which is in `state` from now on."""
        slot, rank = sequence.slot, self.rank_of(sequence.slot)
        self.sequences[slot] = None
        self.history.leave(slot)
        self.planned[slot] = 0
        self.priority[slot] = NOBODY
        self._priorities[sequence.priority] -= 1
        if not self._priorities[sequence.priority]:
            del self._priorities[sequence.priority]
        self.running[rank] -= 1
        self.total_running -= 1
        self._change_epoch(slot)
        for token in sequence.stop_ids:
            self.ends[token] -= 1
        heapq.heappush(self._free[rank], slot)
        sequence.slot, sequence.state = -1, state


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
        self.pending: list[dict[Key, Sequence]] = [{} for _ in range(cfg.num_ranks)]
        self.num_held = [0] * cfg.num_ranks
        self._held: deque[tuple[int, int, list[int]]] = deque()  # (step, rank, pages)
        self.launched = 0  # number of the last launched step
        self.collected = 0  # number of the last one whose results are here

    def found(self, keys: collections.abc.Sequence[Key], ranks: collections.abc.Sequence[int] | None = None) -> int:
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


@dataclasses.dataclass(frozen=True, slots=True)
class BatchRows:
    """Live rows of a batch: row i belongs to flat slot `slots[i]` and stands at `[rank[i], position[i]]`.

    `epochs` are the slots' epochs at launch. Made anew only when the set of rows changes.
    """

    slots: np.ndarray  # [n]
    rank: np.ndarray  # [n]
    position: np.ndarray  # [n]
    epochs: np.ndarray  # [n]
    ids: np.ndarray  # [n] int64, of their requests

    @classmethod
    def at(cls, table: BatchSlots, slots: np.ndarray, rank: np.ndarray, position: np.ndarray) -> "BatchRows":
        """Returns rows of `slots`, with what the table knows of them."""
        return cls(slots, rank, position, table.epoch[slots], table.ids[slots])

    def only(self, keep: np.ndarray) -> "BatchRows":
        """Returns the rows where `keep` ([n] bool) is set."""
        return BatchRows(*(getattr(self, field.name)[keep] for field in dataclasses.fields(self)))


@dataclasses.dataclass
class DraftCounts:
    """Totals since the start: rows that brought drafts, their drafts, and by place in the row those that were right."""

    accepted: np.ndarray  # [S - 1] int64
    rows: int = 0
    tokens: int = 0

    def add(self, tokens: np.ndarray) -> np.ndarray:
        """Counts the rows of a step with results `tokens` `[n, S]`; returns how many each accepted, `[n]` int64."""
        counts, drafts = np.ones(len(tokens), np.int64), tokens.shape[1] - 1
        if not drafts:
            return counts
        for i, column in enumerate(tokens.T[1:]):  # numpy takes 15 times as long along so short an axis
            right = column > NOTHING
            counts += right
            self.accepted[i] += np.count_nonzero(right)
        self.rows += len(tokens)
        self.tokens += len(tokens) * drafts
        missing = tokens == UNDRAFTED
        if absent := int(np.count_nonzero(missing)):
            self.rows -= int(np.count_nonzero(missing[:, 1]))  # a row's drafts have no gaps
            self.tokens -= absent
        return counts
