"""Structured output (guided decoding): grammar matchers and token bitmasks of constrained requests; imports no jax.

A request's matcher is a function of its answer as far as the host knows it. So nothing has to be undone after rejected
drafts or a preemption: a matcher advances over the new tokens when the next bitmask is needed.
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
from dsv3.scheduler.request import HOST_TIME_BOUNDS, EngineOutput, FinishReason, Histogram, StepOutputs
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import Sequence
from dsv3.text.matcher import GrammarError, GrammarVocabulary, Matcher, without_tokens

MAX_CACHED = 64
_IDLE_WAIT_S = 2e-3


@dataclasses.dataclass(frozen=True)
class GrammarStats:
    """Totals since the start: grammars compiled, cache hits; and how many grammars are cached now."""

    num_compiled: int
    num_found: int
    num_kept: int


class Grammars:
    """Compiles grammars on a thread, caches them, and gives each sequence a matcher of its own.

    A cached grammar is ready at once: if its matcher arrived a step later, its prompt would be computed in a separate
    step: that was most of the cost when half of 16 requests were constrained (benchmarks/structured.py).

    `GrammarVocabulary.compile` bounds the time that a grammar takes. Before it comes here, the API server processes of
    a server compile it in a process that can be killed.
    """

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._thread, self._lock = ThreadPoolExecutor(1, "grammars"), threading.Lock()
        self._cached: OrderedDict[bytes, Matcher] = OrderedDict()
        self._waiting: dict[int, tuple[Sequence, Future[Matcher]]] = {}
        self.num_compiled = self._num_found = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def check(self, grammar: str) -> None:
        """Compiles a grammar and waits for it; raises GrammarError."""
        self._thread.submit(self._matcher, grammar).result()

    def submit(self, sequence: Sequence) -> None:
        """Starts to compile the grammar of a sequence, unless it is cached."""
        grammar, future = sequence.request.grammar, Future[Matcher]()
        if (cached := self._find(_key(grammar))) is not None:
            future.set_result(cached.copy())
        else:
            future = self._thread.submit(self._matcher, grammar)
        self._waiting[sequence.id] = sequence, future

    def pop_compiled(self) -> tuple[list[Sequence], list[tuple[Sequence, str]]]:
        """Returns the sequences that have their matcher now, and those whose grammar failed, with the reason."""
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

    @property
    def waiting(self) -> list[Sequence]:
        """The sequences that wait for their matcher."""
        return [sequence for sequence, _ in self._waiting.values()]

    def cancel(self, request_id: int) -> bool:
        """Removes a sequence that waits for its matcher; returns whether it did."""
        return self._waiting.pop(request_id, None) is not None

    def cancel_all(self) -> list[Sequence]:
        """Removes and returns all sequences that wait."""
        waiting, self._waiting = self.waiting, {}
        return waiting

    def stats(self) -> GrammarStats:
        """Returns the statistics; any thread may call."""
        return GrammarStats(self.num_compiled, self._num_found, len(self._cached))

    def wait(self) -> None:
        """Waits up to 2 ms for the next matcher."""
        wait([future for _, future in self._waiting.values()], _IDLE_WAIT_S, FIRST_COMPLETED)

    def _matcher(self, grammar: str) -> Matcher:
        """Returns a new matcher; runs on the thread."""
        key = _key(grammar)
        cached = self._find(key)
        if cached is None:
            cached = self.vocabulary.compile(grammar)
            with self._lock:
                self.num_compiled += 1
                self._cached[key] = cached
                if len(self._cached) > MAX_CACHED:
                    self._cached.popitem(last=False)
        return cached.copy()

    def _find(self, key: bytes) -> Matcher | None:
        """Returns the cached matcher of a grammar, to be copied; None without one."""
        with self._lock:
            cached = self._cached.get(key)
            if cached is not None:
                self._cached.move_to_end(key)
                self._num_found += 1
            return cached


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()


ALL = np.uint32(0xFFFFFFFF)
"""A word of a bitmask that allows every token."""

# One and a half times what 8 ranks of 256 rows of 4 tokens take, over a vocabulary of 129,280.
MAX_PROCESS_BYTES = 192 * 2**20
"""Limit of the bitmasks of one job that a follower receives: a step's two such jobs fit a message with the rest."""


@dataclasses.dataclass(frozen=True)
class MaskStats:
    """Totals since the start: rows with a bitmask, the seconds to compute them, requests that failed.

    `counts` is the histogram, over `HOST_TIME_BOUNDS`, of the seconds per step with such rows.
    """

    num_rows: int
    seconds: float
    num_failed: int
    counts: tuple[int, ...]


class _ConstrainedRow(NamedTuple):
    """A constrained row: its slot, its (rank, row) in the batch, its known tokens, and its matcher."""

    slot: int
    position: tuple[int, int]
    known: int
    sequence: Sequence
    matcher: Matcher


class Masks:
    """Computes token bitmasks once the tokens of the step before are known."""

    def __init__(self, scheduler: Scheduler, vocabulary: GrammarVocabulary) -> None:
        self._scheduler, self._vocabulary = scheduler, vocabulary
        self.words = vocabulary.words
        self._time, self._num_rows, self._num_failed = Histogram(HOST_TIME_BOUNDS), 0, 0
        total, drafts = len(scheduler.slots.epoch), scheduler.cfg.tokens_per_row - 1
        self._drafts = np.full((total, drafts), -1, np.int32)
        self._drafted = np.full(total, -1, np.int64)  # by slot: the epoch whose drafts these are

    def stats(self) -> MaskStats:
        """Returns the statistics; any thread may call."""
        return MaskStats(self._num_rows, self._time.total, self._num_failed, tuple(self._time.counts))

    def record_drafts(self, rows: BatchRows, drafts: np.ndarray) -> None:
        """Records the drafts behind the last tokens of `rows`: `drafts` `[ranks, B, S - 1]`, negative for none."""
        self._drafts[rows.slots] = drafts[rows.rank, rows.position]
        self._drafted[rows.slots] = rows.epochs

    def compute(self, rows: BatchRows, width: int, outputs: StepOutputs) -> tuple[np.ndarray, np.ndarray]:
        """Returns (rank, row) `[n, 2]` int32 and bitmasks `[n, width, words]` uint32 of the constrained rows.

        Requests that have ended since have none, nor have those whose grammar allows every token now. Those whose
        grammar allows no more tokens finish here, with an output.
        """
        started = perf_counter()
        constrained = self._fit_message(
            [row for row in self._constrained_rows(rows) if self._advance(row, outputs)], width, outputs
        )
        masks = np.full((len(constrained), width, self.words), ALL, np.uint32)
        if constrained:
            self._vocabulary.fill([(row.matcher, self._drafts_of(row, width)) for row in constrained], masks)
        for row, mask in zip(constrained, masks, strict=True):
            self._finish(row, mask, outputs)
        excludes = (self._vocabulary.everything & ~masks).any(axis=(1, 2))
        positions = np.array([row.position for row in constrained], np.int32).reshape(-1, 2)
        self._num_rows += len(constrained)
        self._time.observe(perf_counter() - started)
        return (positions, masks) if excludes.all() else (positions[excludes], masks[excludes])

    def _constrained_rows(self, rows: BatchRows) -> list["_ConstrainedRow"]:
        """Returns the rows of constrained requests that have not ended."""
        table = self._scheduler.slots
        live = (table.constrained[rows.slots] & (table.epoch[rows.slots] == rows.epochs)).nonzero()[0]
        slots, known = rows.slots[live], table.known[rows.slots[live]]
        columns = (each.tolist() for each in (slots, rows.rank[live], rows.position[live], known))
        found = []
        for slot, rank, position, length in zip(*columns, strict=True):
            sequence = table.sequences[slot]
            assert sequence is not None and sequence.matcher is not None
            found.append(_ConstrainedRow(slot, (rank, position), length, sequence, sequence.matcher))
        return found

    def _advance(self, row: "_ConstrainedRow", outputs: StepOutputs) -> bool:
        """Advances a matcher to the known tokens; returns whether another token may follow, else ends the request."""
        matcher = row.matcher
        matcher.advance(self._scheduler.slots.history.read(row.slot, row.sequence.prompt_length, row.known))
        if not matcher.is_over:
            return True
        if matcher.error is not None:
            self._fail(row.sequence, matcher.error, outputs)
            return False
        if self._has_single_end(row.slot):
            self._end(row.sequence, outputs, "stop", self._vocabulary.end_ids)
            return False
        return True

    def _fit_message(
        self, constrained: list["_ConstrainedRow"], width: int, outputs: StepOutputs
    ) -> list["_ConstrainedRow"]:
        """Returns the rows whose bitmasks fit the message to a follower; the requests of the others fail."""
        cfg = self._scheduler.cfg
        most, each = MAX_PROCESS_BYTES // (4 * width * self.words), cfg.num_ranks // cfg.num_processes
        if cfg.num_processes == 1 or len(constrained) <= most:
            return constrained
        counts, fitting = Counter[int](), []
        for row in constrained:
            process = row.position[0] // each
            counts[process] += 1
            if counts[process] <= most:
                fitting.append(row)
            else:
                error = f"{most} others in its process have a grammar, which is the limit; send fewer at once"
                self._fail(row.sequence, error, outputs)
        return fitting

    def _has_single_end(self, slot: int) -> bool:
        """Returns whether an end token would be certain and its log-probabilities are not wanted."""
        ends = self._vocabulary.end_ids
        return not ends or (len(ends) == 1 and not self._scheduler.slots.wants_logprobs[slot])

    def _drafts_of(self, row: "_ConstrainedRow", width: int) -> list[int]:
        """Returns the drafts of a row that may be sampled, up to one that ends the answer."""
        if width == 1 or self._drafted[row.slot] != self._scheduler.slots.epoch[row.slot]:
            return []
        stop_ids, drafts = row.sequence.stop_ids, self._drafts[row.slot, : width - 1].tolist()
        ends = (at for at, token in enumerate(drafts) if token < 0 or token in stop_ids)
        return drafts[: next(ends, len(drafts))]

    def _finish(self, row: "_ConstrainedRow", masks: np.ndarray, outputs: StepOutputs) -> None:
        """Clears end tokens that come too early from a row's bitmasks `[S, words]`; fails it if its matcher failed."""
        if row.matcher.is_over and row.matcher.error is not None:
            self._fail(row.sequence, row.matcher.error, outputs)
            return
        sampling = row.sequence.sampling
        early = len(masks) if sampling.ignore_eos else sampling.min_tokens - row.matcher.seen
        for i in range(min(early, len(masks))):
            masks[i] = without_tokens(masks[i], row.sequence.stop_ids)

    def _fail(self, sequence: Sequence, error: str, outputs: StepOutputs) -> None:
        self._num_failed += 1
        self._end(sequence, outputs, "error", (), f"the answer could not be constrained by its grammar: {error}")

    def _end(
        self,
        sequence: Sequence,
        outputs: StepOutputs,
        reason: FinishReason,
        tokens: tuple[int, ...],
        error: str | None = None,
    ) -> None:
        """Finishes a request, with an end token where there is one."""
        self._scheduler.finish(sequence)
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
