"""Compiles grammars on a thread, while requests that need them wait; those used last are kept."""

import dataclasses
import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from dsv3.scheduler.sequence import Sequence
from dsv3.text.matcher import GrammarError, Matcher, Vocabulary

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

    How long a grammar takes is bounded by what `Vocabulary.compile` allows; a server has its fronts compile each one
    in a process that can be killed, before it comes here.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
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
