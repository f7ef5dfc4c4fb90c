"""Stop strings: finds them in text that arrives in parts, in linear time, and ends the answer there."""

import functools
from collections import deque
from collections.abc import Sequence

from dsv3.text.deltas import RawDelta, TextDelta


class _AhoCorasick:
    """The Aho-Corasick automaton: each state is a prefix of some pattern, 0 the empty one.

    `steps` has a state's successor for a character, `falls` the state of the longest prefix that is a suffix of the
    state's text. `ends` has the longest pattern that the state's text ends with, or None; `num_pending` the number of
    its last characters that may begin a later match.
    """

    def __init__(self, patterns: Sequence[str]):
        self.steps: list[dict[str, int]] = [{}]
        self.ends: list[str | None] = [None]
        for pattern in patterns:
            state = 0
            for char in pattern:
                state = self.steps[state].setdefault(char, len(self.steps))
                if state == len(self.steps):
                    self.steps.append({})
                    self.ends.append(None)
            self.ends[state] = pattern
        self.falls, self.num_pending = [0] * len(self.steps), [0] * len(self.steps)
        self._fill()

    def _fill(self) -> None:
        """Computes `falls`, `ends` and `num_pending` in breadth-first order: a state needs those of shorter ones."""
        queue = deque([(0, 0)])
        while queue:
            state, depth = queue.popleft()
            fall = self.falls[state]
            self.ends[state] = self.ends[state] or self.ends[fall]
            self.num_pending[state] = depth if self.steps[state] else self.num_pending[fall]
            for char, longer in self.steps[state].items():
                self.falls[longer] = self.after(fall, char) if state else 0
                queue.append((longer, depth + 1))

    def after(self, state: int, char: str) -> int:
        """Returns the state after one more character."""
        while (longer := self.steps[state].get(char)) is None and state:
            state = self.falls[state]
        return longer or 0


# The choices of a request share an automaton: one with 16,384 states takes 20 ms.
_automaton = functools.lru_cache(maxsize=16)(_AhoCorasick)


class StopMatcher:
    """Searches text that arrives in parts for `patterns`.

    A character costs amortized constant time for any number of patterns.
    """

    def __init__(self, patterns: Sequence[str]):
        if any(not pattern for pattern in patterns):
            raise ValueError("a pattern is empty")
        self._automaton = _automaton(tuple(patterns))
        self._state = 0

    @property
    def num_pending(self) -> int:
        """The number of trailing characters that may belong to a later match."""
        return self._automaton.num_pending[self._state]

    def find(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Searches `text[start:]`; returns the index after the first match and its pattern, longest first.

        Stops at the match: call again with that index to continue.
        """
        after, ends, state = self._automaton.after, self._automaton.ends, self._state
        for i in range(start, len(text)):
            state = after(state, text[i])
            if (pattern := ends[state]) is not None:
                self._state = state
                return i + 1, pattern
        self._state = state
        return None


class StopStrings:
    """Finds stop strings and ends an answer at the first one, which is dropped unless `include`.

    A match that ends while `is_armed` is false is ordinary text. Markers count as their text; one in which a stop
    string ends is dropped.
    """

    def __init__(self, strings: Sequence[str], include: bool):
        self._matcher = StopMatcher(strings)
        self._include = include
        self._pending: list[RawDelta] = []
        self.is_armed = True
        self.found: str | None = None
        """The stop string that ended the answer."""

    def push(self, delta: RawDelta) -> list[RawDelta]:
        """Returns the deltas that cannot be part of a later match."""
        text, position = delta.text, 0
        while (match := self._matcher.find(text, position)) is not None:
            position, found = match
            if self.is_armed:
                self.found = found
                pending, self._pending = self._pending, []
                rest = len(text) - position
                return _split(_append(pending, delta), rest if self._include else rest + len(found))[0]
        self._pending = _append(self._pending, delta)
        shown, self._pending = _split(self._pending, self._matcher.num_pending)
        return shown

    def finish(self) -> list[RawDelta]:
        """Returns the pending deltas."""
        pending, self._pending = self._pending, []
        return pending


def _append(deltas: list[RawDelta], delta: RawDelta) -> list[RawDelta]:
    """Returns deltas with one more; adjacent text is joined."""
    if deltas and isinstance(delta, TextDelta) and isinstance(deltas[-1], TextDelta):
        return [*deltas[:-1], TextDelta(deltas[-1].text + delta.text)]
    return [*deltas, delta]


def _split(deltas: list[RawDelta], num_chars: int) -> tuple[list[RawDelta], list[RawDelta]]:
    """Splits deltas before their last `num_chars` characters; a marker that is cut goes to the second part."""
    head, tail = list(deltas), []
    while num_chars > 0:
        delta = head.pop()
        cut = len(delta.text) - num_chars
        num_chars -= len(delta.text)
        if cut > 0 and isinstance(delta, TextDelta):
            head.append(TextDelta(delta.text[:cut]))
            delta = TextDelta(delta.text[cut:])
        tail.append(delta)
    return head, tail[::-1]
