"""A request inside the engine with the scheduler's bookkeeping, and the waiting queue."""

import bisect
import dataclasses
import enum
import heapq
from collections.abc import Iterable, Iterator

import numpy as np

from dsv3.kv_cache.page_keys import Key
from dsv3.kv_cache.tiers.tiers import Lookup
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import PreparedRequest
from dsv3.scheduler.routed_experts import RequestExperts
from dsv3.scheduler.timing import RequestTiming, begin_timing
from dsv3.text.matcher import Matcher

GREEDY, DRAWN, FILTERED, FULL = 0, 1, 2, 3
"""Variants of the sampler, each a superset of the one before: greedy, with a temperature, with filters (top_k, top_p,
min_p), and with adjusted logits (penalties, bias)."""


class SequenceStatus(enum.Enum):
    """The state of a sequence."""

    WAITING = "in the queue"
    LOADING = "in a slot; pages of its prefix are being loaded from a tier"
    PREFILLING = "in a slot; its known tokens are being computed"
    DECODING = "in a slot; samples tokens"
    ENDED = "finished or aborted"


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine.

    `tokens` are those known when it was last queued: the prompt, and after a preemption the answer so far. `keys` are
    the block hashes of their full pages. The other fields are the scheduler's, valid while it runs.
    """

    request: PreparedRequest
    tokens: np.ndarray  # [n] int32
    prompt_length: int
    max_length: int
    stop_ids: frozenset[int]
    seed: int
    root: Key
    keys: list[Key]
    variant: int
    timing: RequestTiming
    state: SequenceStatus = SequenceStatus.WAITING
    arrival: int = 0
    slot: int = -1  # rank * max_num_seqs + slot within the rank
    pages: list[int] = dataclasses.field(default_factory=list)
    page_row: np.ndarray | None = None  # [n] int32, `pages` as allocated with its slot
    window_pages: dict[int, int] = dataclasses.field(default_factory=dict)  # by the index of the page beside
    snapshots: set[int] = dataclasses.field(default_factory=set)  # indices at which its prompt leaves a window page
    controls: bytes | None = None  # its packed row of `DecodeState.controls`, made with its first chunk
    prefilled: int = 0  # tokens whose latents a launched step has written or will write
    charge: int = 0  # what its prompt still costs its rank, in tokens (`dsv3.scheduler.cost`)
    pending: set[Key] = dataclasses.field(default_factory=set)  # keys of pages it is filling from its prompt
    num_found: int = 0  # leading pages that it has from the prefix cache or a tier
    load_stop: int = 0  # leading pages that the cache or a tier has
    lookup: Lookup | None = None  # of its prefix, in a store or another instance
    may_load: bool = True  # pages of its prefix from a tier: until a load breaks off that cannot be continued
    num_published: int = 0  # leading pages that are in the prefix cache
    has_finite_logits: bool = True
    num_cached: int = 0
    looked_up: tuple[int, int] = 0, 0  # from the first to behind the last page that its lookup has found
    matcher: Matcher | None = None  # of the grammar that constrains it
    routed: RequestExperts | None = None  # experts of its tokens, where it wants them
    started: bool = False  # its first token has been reported

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.request_id

    @property
    def priority(self) -> int:
        """The request's priority; lower is earlier."""
        return self.request.priority

    @property
    def turn(self) -> tuple[int, int]:
        """The sort key of requests: the priority, then the arrival."""
        return self.request.priority, self.arrival

    @property
    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.sampling

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be returned: then all of the prompt is computed."""
        return not self.started and self.request.sampling.prompt_logprobs is not None


def make_sequence(request: PreparedRequest, keys: Iterable[Key] | None = None) -> Sequence:
    """Returns the scheduler's form of a request; `keys` are its prefix keys where the caller has them already."""
    tokens = request.prompt
    return Sequence(
        request=request,
        tokens=tokens,
        prompt_length=len(tokens) - request.num_answered,
        max_length=request.max_length,
        stop_ids=frozenset(request.stop_ids),
        seed=request.sampling.seed or 0,
        root=request.key_root,
        keys=request.prefix_keys if keys is None else list(keys),
        variant=_variant(request.sampling),
        timing=begin_timing("grammar" if request.grammar else "queue"),
    )


def _variant(sampling: SamplingParams) -> int:
    adjusts = (
        sampling.logit_bias
        or sampling.min_tokens
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )
    if adjusts:
        return FULL
    if sampling.temperature <= 0:
        return GREEDY
    filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return FILTERED if filters else DRAWN


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `stop` of a sequence; the last chunk samples the first token of the answer."""

    sequence: Sequence
    epoch: int
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether all of the sequence's known tokens are computed with this chunk."""
        return self.stop == len(self.sequence.tokens)


_MIN_SWEEP = 64
CAPACITY: Key = b""
"""Parks requests that wait for capacity on the rank that they require, instead of a key."""


class WaitingQueue:
    """Returns the sequence of the lowest priority number first, among equals the oldest; parked ones wait for `wake`.

    A parked sequence costs nothing. One that ends while it waits is dropped at its turn, or when half of the entries
    have ended.
    """

    def __init__(self) -> None:
        self._ready: list[tuple[tuple[int, int], Sequence]] = []  # a heap by turn
        self._parked: dict[int, dict[Key, list[Sequence]]] = {}  # by rank
        self._count = 0
        self._ended = 0  # upper bound of the entries whose sequence has ended

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Yields all waiting sequences in the order of their turns."""
        parked = [(s.turn, s) for mine in self._parked.values() for waiting in mine.values() for s in waiting]
        yield from (s for _, s in sorted([*self._ready, *parked]) if s.state is SequenceStatus.WAITING)

    @property
    def first_priority(self) -> int | None:
        """A lower bound of the priority numbers of those not parked; None without any."""
        return self._ready[0][0][0] if self._ready else None

    def push(self, sequence: Sequence) -> None:
        """Inserts a sequence at its turn."""
        sequence.state = SequenceStatus.WAITING
        heapq.heappush(self._ready, (sequence.turn, sequence))
        self._count += 1

    def pop(self) -> Sequence | None:
        """Removes and returns the first sequence that is not parked; None without one."""
        while self._ready:
            _, sequence = heapq.heappop(self._ready)
            if sequence.state is SequenceStatus.WAITING:
                self._count -= 1
                return sequence
        return None

    def remove(self, sequence: Sequence) -> None:
        """Ends a waiting sequence."""
        sequence.state = SequenceStatus.ENDED
        self._count -= 1
        self._ended += 1
        if self._ended > _MIN_SWEEP and self._ended > self._count:
            self._sweep()

    def park(self, sequence: Sequence, rank: int, key: Key) -> None:
        """Parks a sequence until `wake` is called with this `rank` and `key`; others may pass it."""
        mine = self._parked.setdefault(rank, {})
        bisect.insort(mine.setdefault(key, []), sequence, key=lambda parked: parked.turn)
        self._count += 1

    def parked_ranks(self) -> dict[int, bool]:
        """Returns, by request id, the parked requests: whether each waits for capacity on its rank, not for a page."""
        parked = (each.items() for each in self._parked.values())
        return {s.id: key == CAPACITY for mine in parked for key, waiting in mine for s in waiting}

    def wake(self, rank: int, keys: Iterable[Key]) -> None:
        """Returns the sequences that were parked under one of `keys` to their turns."""
        mine = self._parked.get(rank)
        if not mine:
            return
        for key in mine.keys() & keys:
            for sequence in mine.pop(key):
                if sequence.state is SequenceStatus.WAITING:
                    heapq.heappush(self._ready, (sequence.turn, sequence))

    def wake_first(self, rank: int, key: Key) -> Sequence | None:
        """Wakes the first sequence that is parked under `key`; returns the next parked one, None without one."""
        mine = self._parked.get(rank, {})
        waiting = mine.get(key, [])
        is_awake = False
        while waiting and not (is_awake and waiting[0].state is SequenceStatus.WAITING):
            sequence = waiting.pop(0)
            if sequence.state is SequenceStatus.WAITING:
                heapq.heappush(self._ready, (sequence.turn, sequence))
                is_awake = True
        if not waiting:
            mine.pop(key, None)
            return None
        return waiting[0]

    def _sweep(self) -> None:
        """Drops the entries of ended sequences: aborted requests leave nothing behind while no slot is free."""
        self._ready = [entry for entry in self._ready if entry[1].state is SequenceStatus.WAITING]
        heapq.heapify(self._ready)
        for mine in self._parked.values():
            for key, waiting in mine.items():
                mine[key] = [sequence for sequence in waiting if sequence.state is SequenceStatus.WAITING]
        self._ended = 0
