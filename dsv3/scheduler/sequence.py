"""A request inside the engine, and what the scheduler notes about it."""

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
from dsv3.text.matcher import Matcher

GREEDY, DRAWN, FILTERED, FULL = 0, 1, 2, 3
"""Variants of the sampler, each able to do all that the one before it does: the likeliest token, one drawn with a
temperature, one that passes filters (top_k, top_p, min_p), and one of changed logits."""


class SequenceStatus(enum.Enum):
    """Where a sequence stands."""

    WAITING = "in the queue"
    LOADING = "holds a slot; pages of its prefix are on their way from a tier"
    PREFILLING = "holds a slot; its known tokens are being computed"
    DECODING = "holds a slot; gets tokens"
    ENDED = "has left the engine"


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way.

    `tokens` are those known when it was last put into the queue: the prompt, and after a pre-emption the answer so far.
    `keys` are the prefix keys of their full pages. The other fields are the scheduler's, valid while it runs.
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
    state: SequenceStatus = SequenceStatus.WAITING
    arrival: int = 0
    slot: int = -1  # rank * max_num_seqs + slot within the rank
    pages: list[int] = dataclasses.field(default_factory=list)
    page_row: np.ndarray | None = None  # [n] int32, `pages` when it got its slot
    controls: bytes | None = None  # its packed row of `DecodeState.controls`, made with its first chunk
    prefilled: int = 0  # tokens whose latents a launched step has written or will write
    charge: int = 0  # what its prompt still costs its rank, in tokens (`dsv3.scheduler.cost`)
    pending: set[Key] = dataclasses.field(default_factory=set)  # keys of pages it is filling from its prompt
    found: int = 0  # of its pages, from the first on, those that it found in the prefix cache
    load_stop: int = 0  # of its pages, from the first on, those that the cache or a tier has
    lookup: Lookup | None = None  # what the store has been asked about its prefix
    published: int = 0  # of its pages, from the first on, those that are findable
    is_sound: bool = True  # False once its logits were not finite
    num_cached: int = 0
    queued_at: float = 0.0
    queue_seconds: float | None = None  # from the queue to the first slot
    matcher: Matcher | None = None  # what it is held to
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
        """What orders requests: the priority, then the arrival."""
        return self.request.priority, self.arrival

    @property
    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.sampling

    @property
    def tells_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be told: then all of the prompt is computed."""
        return not self.started and self.request.sampling.prompt_logprobs is not None


def sequence_of(request: PreparedRequest, keys: Iterable[Key] | None = None) -> Sequence:
    """Returns a request as the scheduler holds it; `keys` are its prefix keys where the caller has them apart."""
    tokens = request.prompt
    return Sequence(
        request=request,
        tokens=tokens,
        prompt_length=len(tokens) - request.num_answered,
        max_length=request.max_length,
        stop_ids=frozenset(request.stop_ids),
        seed=request.sampling.seed or 0,
        root=request.root,
        keys=request.prefix_keys if keys is None else list(keys),
        variant=_variant(request.sampling),
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


class WaitingQueue:
    """Gives the sequence of the lowest priority first, of these the oldest. A parked one costs nothing until `wake`.

    A sequence that ends while it waits is dropped when its turn comes, or when half of the entries are such.
    """

    def __init__(self) -> None:
        self._ready: list[tuple[tuple[int, int], Sequence]] = []  # a heap by turn
        self._parked: dict[int, dict[Key, list[Sequence]]] = {}  # by rank
        self._count = 0
        self._ended = 0  # entries that nobody waits for any more, at most

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Yields all that wait, in the order of their turns."""
        parked = [(s.turn, s) for mine in self._parked.values() for waiting in mine.values() for s in waiting]
        yield from (s for _, s in sorted([*self._ready, *parked]) if s.state is SequenceStatus.WAITING)

    @property
    def first_priority(self) -> int | None:
        """The lowest priority among those not parked, or lower where the first has ended; None where there is none."""
        return self._ready[0][0][0] if self._ready else None

    def push(self, sequence: Sequence) -> None:
        """Puts a sequence where its turn is."""
        sequence.state = SequenceStatus.WAITING
        heapq.heappush(self._ready, (sequence.turn, sequence))
        self._count += 1

    def pop(self) -> Sequence | None:
        """Takes the first sequence that is not parked."""
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
        """Has a sequence wait until `key` has been computed on `rank`, or will not be; others may pass it."""
        mine = self._parked.setdefault(rank, {})
        bisect.insort(mine.setdefault(key, []), sequence, key=lambda parked: parked.turn)
        self._count += 1

    def wake(self, rank: int, keys: Iterable[Key]) -> None:
        """Lets those that waited for one of `keys` have their turn again."""
        mine = self._parked.get(rank)
        if not mine:
            return
        for key in mine.keys() & keys:
            for sequence in mine.pop(key):
                if sequence.state is SequenceStatus.WAITING:
                    heapq.heappush(self._ready, (sequence.turn, sequence))

    def wake_first(self, rank: int, key: Key) -> Sequence | None:
        """Lets the first of those that waited for `key` have its turn again; returns the next, None without one."""
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
        """Drops the entries of ended sequences: clients that come and go while no slot is free leave nothing behind."""
        self._ready = [entry for entry in self._ready if entry[1].state is SequenceStatus.WAITING]
        heapq.heapify(self._ready)
        for mine in self._parked.values():
            for key, waiting in mine.items():
                mine[key] = [sequence for sequence in waiting if sequence.state is SequenceStatus.WAITING]
        self._ended = 0
