"""The parsers that a model's text passes through after its stop strings, and how to register one.

A parser maps pieces to pieces. It is a small class in a file of its own, and one line of `_CHAIN`: a function that
returns the parser for an answer, or None where the answer needs none.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from dsv3.text.pieces import Piece
from dsv3.text.reasoning import Parser as ReasoningParserName
from dsv3.text.reasoning import parser_after


class OutputParser(Protocol):
    """Maps one answer's pieces, in their order.

    What may be part of a marker is held back until it is decided. Pieces of a kind that a parser does not know pass
    unchanged. `is_done` says that nothing is held and all later pieces would pass unchanged: the parser may be dropped.
    """

    @property
    def is_done(self) -> bool: ...

    def push(self, piece: Piece) -> list[Piece]:
        """Returns what can be told after one more piece."""

    def finish(self) -> list[Piece]:
        """Returns what was held back, now that no more pieces will come."""


class ParserOptions(msgspec.Struct, frozen=True):
    """What a server's user may choose of the parsers."""

    reasoning: ReasoningParserName = "none"


def parsers_for(prompt: str, options: ParserOptions) -> list[OutputParser]:
    """Returns new parsers for one answer to `prompt`, in the order in which its text passes them."""
    return [parser for make in _CHAIN if (parser := make(prompt, options)) is not None]


_CHAIN: tuple[Callable[[str, ParserOptions], OutputParser | None], ...] = (
    lambda prompt, options: parser_after(prompt, options.reasoning),
)
