"""Answers as a series of sections, one after the other, as the Responses and the Messages API tell them.

A section is a stretch of text, a stretch of reasoning, or a call with its arguments. Only the last one is open.
"""

import io
from collections.abc import Iterable
from typing import Literal, NamedTuple

from dsv3.text.pieces import Piece, Reasoning, Text, ToolArguments, ToolCall

Kind = Literal["text", "reasoning", "call"]


class Section:
    """One section; `call` says whose arguments its text is."""

    def __init__(self, index: int, kind: Kind, call: ToolCall | None = None):
        self.index, self.kind, self.call = index, kind, call
        self.is_open = True
        self._text = io.StringIO()

    @property
    def text(self) -> str:
        """All of the section so far."""
        return self._text.getvalue()

    def add(self, text: str) -> None:
        """Takes more of the section."""
        self._text.write(text)


class Opened(NamedTuple):
    """A section begins."""

    section: Section


class Grown(NamedTuple):
    """A section has got more text."""

    section: Section
    text: str


class Closed(NamedTuple):
    """A section is complete."""

    section: Section


Change = Opened | Grown | Closed


class Sections:
    """The sections of one answer; `all` are those so far."""

    def __init__(self) -> None:
        self.all: list[Section] = []

    def take(self, pieces: Iterable[Piece]) -> list[Change]:
        """Returns what pieces change."""
        return [change for piece in pieces for change in self._take(piece)]

    def end(self) -> list[Change]:
        """Returns what the end of the answer changes."""
        if not self.all or not self.all[-1].is_open:
            return []
        self.all[-1].is_open = False
        return [Closed(self.all[-1])]

    def _take(self, piece: Piece) -> list[Change]:
        match piece:
            case ToolCall():
                return self._open("call", piece)
            case ToolArguments():
                return [self._grow(piece.text)]
            case Text() | Reasoning():
                kind: Kind = "text" if isinstance(piece, Text) else "reasoning"
                goes_on = bool(self.all) and self.all[-1].is_open and self.all[-1].kind == kind
                return [*([] if goes_on else self._open(kind)), self._grow(piece.text)]

    def _open(self, kind: Kind, call: ToolCall | None = None) -> list[Change]:
        changes = self.end()
        self.all.append(Section(len(self.all), kind, call))
        return [*changes, Opened(self.all[-1])]

    def _grow(self, text: str) -> Grown:
        self.all[-1].add(text)
        return Grown(self.all[-1], text)
