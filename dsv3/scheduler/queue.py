"""Sequences that wait for a slot, by priority and arrival; some wait until a page of theirs has been computed."""

import bisect
import heapq
from collections.abc import Iterable, Iterator

from dsv3.kv_cache.keys import Key
from dsv3.scheduler.sequence import Sequence, State

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
        yield from (s for _, s in sorted([*self._ready, *parked]) if s.state is State.WAITING)

    @property
    def first_priority(self) -> int | None:
        """The lowest priority among those not parked, or lower where the first has ended; None where there is none."""
        return self._ready[0][0][0] if self._ready else None

    def push(self, sequence: Sequence) -> None:
        """Puts a sequence where its turn is."""
        sequence.state = State.WAITING
        heapq.heappush(self._ready, (sequence.turn, sequence))
        self._count += 1

    def pop(self) -> Sequence | None:
        """Takes the first sequence that is not parked."""
        while self._ready:
            _, sequence = heapq.heappop(self._ready)
            if sequence.state is State.WAITING:
                self._count -= 1
                return sequence
        return None

    def remove(self, sequence: Sequence) -> None:
        """Ends a waiting sequence."""
        sequence.state = State.ENDED
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
                if sequence.state is State.WAITING:
                    heapq.heappush(self._ready, (sequence.turn, sequence))

    def wake_first(self, rank: int, key: Key) -> Sequence | None:
        """Lets the first of those that waited for `key` have its turn again; returns the next, None without one."""
        mine = self._parked.get(rank, {})
        waiting = mine.get(key, [])
        is_awake = False
        while waiting and not (is_awake and waiting[0].state is State.WAITING):
            sequence = waiting.pop(0)
            if sequence.state is State.WAITING:
                heapq.heappush(self._ready, (sequence.turn, sequence))
                is_awake = True
        if not waiting:
            mine.pop(key, None)
            return None
        return waiting[0]

    def _sweep(self) -> None:
        """Drops the entries of ended sequences: clients that come and go while no slot is free leave nothing behind."""
        self._ready = [entry for entry in self._ready if entry[1].state is State.WAITING]
        heapq.heapify(self._ready)
        for mine in self._parked.values():
            for key, waiting in mine.items():
                mine[key] = [sequence for sequence in waiting if sequence.state is State.WAITING]
        self._ended = 0
