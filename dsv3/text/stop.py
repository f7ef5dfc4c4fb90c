"""Stop strings: finds strings in text that arrives piece by piece, in linear time, and ends the text there."""

import functools
from collections import deque
from collections.abc import Sequence

from dsv3.text.pieces import Raw, Text


class _Automaton:
    """The automaton of Aho and Corasick: its states stand for the beginnings of some patterns, 0 for the empty one.

    `steps` leads from a state over a character to a longer beginning, and `falls` to the longest beginning that the
    state's text ends with. `ends` has the longest pattern that a state's text ends with, None for none, and `held` how
    many of its last characters may be part of a pattern that is yet to come.
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
        self.falls, self.held = [0] * len(self.steps), [0] * len(self.steps)
        self._fill()

    def _fill(self) -> None:
        """Goes through the states, the shorter ones first: what a state falls to is known before the state is."""
        waiting = deque([(0, 0)])
        while waiting:
            state, depth = waiting.popleft()
            fall = self.falls[state]
            self.ends[state] = self.ends[state] or self.ends[fall]
            self.held[state] = depth if self.steps[state] else self.held[fall]
            for char, longer in self.steps[state].items():
                self.falls[longer] = self.after(fall, char) if state else 0
                waiting.append((longer, depth + 1))

    def after(self, state: int, char: str) -> int:
        """Returns the state behind one more character."""
        while (longer := self.steps[state].get(char)) is None and state:
            state = self.falls[state]
        return longer or 0


_automaton = functools.lru_cache(maxsize=16)(_Automaton)  # the choices of a request share one: 16,384 states take 20 ms


class StopMatcher:
    """Watches a text for the first end of any of `patterns`, which may stretch over pieces.

    A character costs amortised constant time, whatever the text and however many patterns there are.
    """

    def __init__(self, patterns: Sequence[str]):
        if any(not pattern for pattern in patterns):
            raise ValueError("a pattern is empty")
        self._automaton = _automaton(tuple(patterns))
        self._state = 0

    @property
    def held(self) -> int:
        """The number of trailing characters so far that may belong to a match to come."""
        return self._automaton.held[self._state]

    def find(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Reads `text[start:]`; at the first match returns the index after it and the pattern, longest first.

        Reading stops there: call again with that index to go on.
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
    """Ends an answer at the first end of a stop string; the string is left out unless `include`.

    A stop string that ends while `is_armed` is false is text like any other. Markers count as the text they are spelled
    with; one that a stop string ends inside of is left out.
    """

    def __init__(self, strings: Sequence[str], include: bool):
        self._matcher = StopMatcher(strings)
        self._include = include
        self._held: list[Raw] = []
        self.is_armed = True
        self.found: str | None = None
        """The stop string that has ended the answer."""

    def push(self, piece: Raw) -> list[Raw]:
        """Returns what may be shown."""
        text, position = piece.text, 0
        while (match := self._matcher.find(text, position)) is not None:
            position, found = match
            if self.is_armed:
                self.found = found
                held, self._held = self._held, []
                rest = len(text) - position
                return _split(_with(held, piece), rest if self._include else rest + len(found))[0]
        self._held = _with(self._held, piece)
        shown, self._held = _split(self._held, self._matcher.held)
        return shown

    def finish(self) -> list[Raw]:
        """Returns what was held back."""
        held, self._held = self._held, []
        return held


def _with(pieces: list[Raw], piece: Raw) -> list[Raw]:
    """Returns pieces with one more; text is joined to text."""
    if pieces and isinstance(piece, Text) and isinstance(pieces[-1], Text):
        return [*pieces[:-1], Text(pieces[-1].text + piece.text)]
    return [*pieces, piece]


def _split(pieces: list[Raw], num_chars: int) -> tuple[list[Raw], list[Raw]]:
    """Returns pieces without their last characters, and these; a marker that is cut belongs to the latter."""
    front, tail = list(pieces), []
    while num_chars > 0:
        piece = front.pop()
        cut = len(piece.text) - num_chars
        num_chars -= len(piece.text)
        if cut > 0 and isinstance(piece, Text):
            front.append(Text(piece.text[:cut]))
            piece = Text(piece.text[cut:])
        tail.append(piece)
    return front, tail[::-1]
