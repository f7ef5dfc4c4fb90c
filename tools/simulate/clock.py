"""Virtual time: what is due next, in an order that depends on nothing but what was asked for."""

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Calls what is due, the earliest first, equals in the order in which they were asked for. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Has `call` called at a time that has not passed."""
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), call))

    def run(self, until: float | None = None, is_over: Callable[[], bool] = lambda: False) -> None:
        """Calls what is due up to a time, or all that ever is, or what is due before it `is_over`."""
        while self._due and (until is None or self._due[0][0] <= until) and not is_over():
            self.now, _, call = heapq.heappop(self._due)
            call()
        if until is not None:
            self.now = max(self.now, until)
