"""Which tokens the rows of a batch may take, for requests that are held to a grammar; imports no jax.

A request's matcher is a function of its answer as far as the host knows it. So nothing has to be undone after drafts
that were wrong, nor after a pre-emption: a matcher takes in what is new when the next mask is wanted.
"""

import dataclasses
import hashlib
import threading
from collections import Counter, OrderedDict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from time import perf_counter
from typing import NamedTuple

import numpy as np

from dsv3.scheduler.batch_slots import BatchRows
from dsv3.scheduler.request import EngineOutput, FinishReason, HostTime, StepOutputs
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import Sequence
from dsv3.text.matcher import GrammarError, GrammarVocabulary, Matcher, without

MAX_KEPT = 64
_IDLE_WAIT_S = 2e-3


@dataclasses.dataclass(frozen=True)
class GrammarStats:
    """Totals since the start: grammars that were compiled, and times that one was kept already; how many are kept."""

    num_compiled: int
    num_found: int
    num_kept: int


class Grammars:
    """Gives sequences their matchers. One thread asks, and a second one compiles; what is kept is there at once.

    A sequence whose matcher came a step late would have its prompt computed in a step of its own: with half of 16
    requests held, that was most of what they cost (benchmarks/structured.py).

    How long a grammar takes is bounded by what `GrammarVocabulary.compile` allows; a server has its fronts compile each
    one in a process that can be killed, before it comes here.
    """

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._thread, self._lock = ThreadPoolExecutor(1, "grammars"), threading.Lock()
        self._kept: OrderedDict[bytes, Matcher] = OrderedDict()
        self._waiting: dict[int, tuple[Sequence, Future[Matcher]]] = {}
        self.num_compiled = self._num_found = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def check(self, grammar: str) -> None:
        """Compiles a grammar, and waits for that; raises GrammarError."""
        self._thread.submit(self._matcher, grammar).result()

    def begin(self, sequence: Sequence) -> None:
        """Begins to compile what a sequence is held to, unless it is kept."""
        grammar, future = sequence.request.grammar, Future[Matcher]()
        if (kept := self._find(_key(grammar))) is not None:
            future.set_result(kept.copy())
        else:
            future = self._thread.submit(self._matcher, grammar)
        self._waiting[sequence.id] = sequence, future

    def take(self) -> tuple[list[Sequence], list[tuple[Sequence, str]]]:
        """Returns the sequences that have their matcher now, and those that get none, with the reason."""
        ready: list[Sequence] = []
        failed: list[tuple[Sequence, str]] = []
        for sequence, future in [entry for entry in self._waiting.values() if entry[1].done()]:
            del self._waiting[sequence.id]
            error = future.exception()
            if error is None:
                sequence.matcher = future.result()
                ready.append(sequence)
            elif isinstance(error, GrammarError):
                failed.append((sequence, str(error)))
            else:
                raise error
        return ready, failed

    def drop(self, request_id: int) -> bool:
        """Forgets a sequence that waits; returns whether it did."""
        return self._waiting.pop(request_id, None) is not None

    def drop_all(self) -> list[Sequence]:
        """Forgets all that wait, and returns them."""
        waiting, self._waiting = self._waiting, {}
        return [sequence for sequence, _ in waiting.values()]

    def stats(self) -> GrammarStats:
        """Returns the numbers so far; any thread may ask."""
        return GrammarStats(self.num_compiled, self._num_found, len(self._kept))

    def wait(self) -> None:
        """Waits a moment for the next one."""
        wait([future for _, future in self._waiting.values()], _IDLE_WAIT_S, FIRST_COMPLETED)

    def _matcher(self, grammar: str) -> Matcher:
        """Returns a matcher of one's own; runs on the thread."""
        key = _key(grammar)
        kept = self._find(key)
        if kept is None:
            kept = self.vocabulary.compile(grammar)
            with self._lock:
                self.num_compiled += 1
                self._kept[key] = kept
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        return kept.copy()

    def _find(self, key: bytes) -> Matcher | None:
        """Returns what is kept of a grammar, which nobody advances, None if nothing is."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                self._num_found += 1
            return kept


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()


ALL = np.uint32(0xFFFFFFFF)
"""A word of a mask that allows everything."""

# One and a half times what 8 ranks of 256 rows of 4 tokens take, over a vocabulary of 129,280.
MAX_PROCESS_BYTES = 192 * 2**20
"""What the masks of one job may take that another process gets: a step's two such jobs fit a message with the rest."""


@dataclasses.dataclass(frozen=True)
class MaskStats:
    """Totals since the start: rows that got a mask, the seconds that took, requests that were given up.

    `counts` is the histogram, over `HOST_TIME_BOUNDS`, of the seconds per step that had such rows.
    """

    num_rows: int
    seconds: float
    num_failed: int
    counts: tuple[int, ...]


class _Held(NamedTuple):
    """A row whose request is held: its slot, rank and row of the batch, the tokens known of it, and its matcher."""

    slot: int
    place: tuple[int, int]
    known: int
    sequence: Sequence
    matcher: Matcher


class Masks:
    """Makes masks when the tokens of the step before are known."""

    def __init__(self, scheduler: Scheduler, vocabulary: GrammarVocabulary) -> None:
        self._scheduler, self._vocabulary = scheduler, vocabulary
        self.words = vocabulary.words
        self._time, self._num_rows, self._num_failed = HostTime(), 0, 0
        total, drafts = len(scheduler.slots.epoch), scheduler.cfg.tokens_per_row - 1
        self._drafts = np.full((total, drafts), -1, np.int32)
        self._drafted = np.full(total, -1, np.int64)  # by slot: the epoch whose drafts these are

    def stats(self) -> MaskStats:
        """Returns the numbers so far; any thread may ask."""
        return MaskStats(self._num_rows, self._time.total, self._num_failed, tuple(self._time.counts))

    def note_drafts(self, rows: BatchRows, drafts: np.ndarray) -> None:
        """Notes what was proposed behind the last tokens of `rows`: `drafts` `[ranks, B, S - 1]`, negative for none."""
        self._drafts[rows.slots] = drafts[rows.rank, rows.position]
        self._drafted[rows.slots] = rows.epochs

    def of(self, rows: BatchRows, width: int, outputs: StepOutputs) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places `[n, 2]` int32 (rank, row) and masks `[n, width, words]` uint32 of held rows.

        Requests that have ended meanwhile have none. Those whose grammar allows nothing more end here, with an entry in
        `outputs`.
        """
        started = perf_counter()
        held = self._fitting([row for row in self._held(rows) if self._goes_on(row, outputs)], width, outputs)
        masks = np.full((len(held), width, self.words), ALL, np.uint32)
        if held:
            self._vocabulary.fill([(row.matcher, self._drafts_of(row, width)) for row in held], masks)
        for row, mask in zip(held, masks, strict=True):
            self._finish(row, mask, outputs)
        self._num_rows += len(held)
        self._time.observe(perf_counter() - started)
        return np.array([row.place for row in held], np.int32).reshape(-1, 2), masks

    def _held(self, rows: BatchRows) -> list["_Held"]:
        """Returns the rows of requests that are held and have not ended."""
        table = self._scheduler.slots
        live = (table.held[rows.slots] & (table.epoch[rows.slots] == rows.epochs)).nonzero()[0]
        slots, known = rows.slots[live], table.known[rows.slots[live]]
        columns = (each.tolist() for each in (slots, rows.rank[live], rows.position[live], known))
        found = []
        for slot, rank, position, length in zip(*columns, strict=True):
            sequence = table.sequences[slot]
            assert sequence is not None and sequence.matcher is not None  # its slot is held
            found.append(_Held(slot, (rank, position), length, sequence, sequence.matcher))
        return found

    def _goes_on(self, row: "_Held", outputs: StepOutputs) -> bool:
        """Returns whether a request may have another token; ends it if not."""
        matcher, begin = row.matcher, row.sequence.prompt_length
        matcher.advance(self._scheduler.slots.history.read(row.slot, begin, row.known))
        if not matcher.is_over:
            return True
        if matcher.error is not None:
            self._fail(row.sequence, matcher.error, outputs)
            return False
        if self._has_one_end(row.slot):
            self._end(row.sequence, outputs, "stop", self._vocabulary.end_ids)
            return False
        return True

    def _fitting(self, held: list["_Held"], width: int, outputs: StepOutputs) -> list["_Held"]:
        """Returns the rows whose masks fit what a process may be sent for one job; ends the requests of the others."""
        cfg = self._scheduler.cfg
        most, each = MAX_PROCESS_BYTES // (4 * width * self.words), cfg.num_ranks // cfg.num_processes
        if cfg.num_processes == 1 or len(held) <= most:
            return held
        counts, fitting = Counter[int](), []
        for row in held:
            process = row.place[0] // each
            counts[process] += 1
            if counts[process] <= most:
                fitting.append(row)
            else:
                error = f"{most} others in its process are held to grammars, and no more can be"
                self._fail(row.sequence, error, outputs)
        return fitting

    def _has_one_end(self, slot: int) -> bool:
        """Returns whether it is clear what would be drawn where nothing but an end is allowed, and nobody asks more."""
        ends = self._vocabulary.end_ids
        return not ends or (len(ends) == 1 and not self._scheduler.slots.wants_logprobs[slot])

    def _drafts_of(self, row: "_Held", width: int) -> list[int]:
        """Returns the drafts of a row that may be drawn, up to one that ends the answer."""
        if width == 1 or self._drafted[row.slot] != self._scheduler.slots.epoch[row.slot]:
            return []
        stop_ids, drafts = row.sequence.stop_ids, self._drafts[row.slot, : width - 1].tolist()
        ends = (at for at, token in enumerate(drafts) if token < 0 or token in stop_ids)
        return drafts[: next(ends, len(drafts))]

    def _finish(self, row: "_Held", masks: np.ndarray, outputs: StepOutputs) -> None:
        """Takes ends out of a row's masks `[S, words]` that come too early; ends a request whose mask failed."""
        if row.matcher.is_over and row.matcher.error is not None:
            self._fail(row.sequence, row.matcher.error, outputs)
            return
        sampling = row.sequence.sampling
        early = len(masks) if sampling.ignore_eos else sampling.min_tokens - row.matcher.seen
        for i in range(min(early, len(masks))):
            masks[i] = without(masks[i], row.sequence.stop_ids)

    def _fail(self, sequence: Sequence, error: str, outputs: StepOutputs) -> None:
        self._num_failed += 1
        self._end(sequence, outputs, "error", (), f"the answer could not be held to its grammar: {error}")

    def _end(
        self,
        sequence: Sequence,
        outputs: StepOutputs,
        reason: FinishReason,
        tokens: tuple[int, ...],
        error: str | None = None,
    ) -> None:
        """Ends a request, with an end token where there is one."""
        self._scheduler.remove(sequence)
        self._scheduler.generated_tokens += len(tokens)
        outputs.details.append(
            EngineOutput(
                request_id=sequence.id,
                token_ids=list(tokens),
                finish_reason=reason,
                stop_token_id=tokens[-1] if tokens else None,
                error=error,
            )
        )
