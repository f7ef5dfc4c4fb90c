"""What a model's output is made of, for those who show it: pieces, each of one kind.

A new kind is a class here and a member of `Piece`; the parser that makes it is `dsv3.text.parser`.
"""

import itertools

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer itself, or text that no parser has looked at yet."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text the model wrote while it was thinking."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """The beginning of call number `index` of an answer, from 0; `ToolArguments` of the same number follow."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True, gc=False):
    """The next part of a call's arguments; all parts joined are JSON, unless the answer was cut off."""

    index: int
    text: str


Piece = Text | Reasoning | ToolCallStart | ToolArguments


class Marker(msgspec.Struct, frozen=True, gc=False):
    """A token that structures an answer, on its way to the parser: `text` is how it is spelled."""

    token_id: int
    text: str


Raw = Text | Marker
"""What a model writes, before a parser has looked at it."""


def joined(pieces: list[Piece]) -> list[Piece]:
    """Returns pieces of which no two texts of one kind follow each other."""
    if len(pieces) < 2:
        return pieces
    result: list[Piece] = []
    for _, group in itertools.groupby(pieces, _kind):
        first, *others = group
        if others:  # joined at once: a resumed answer may have 100,000 pieces of one kind
            text = "".join(piece.text for piece in (first, *others))  # type: ignore[union-attr]
            first = msgspec.structs.replace(first, text=text)
        result.append(first)
    return result


def _kind(piece: Piece) -> tuple[object, ...]:
    """Returns what two pieces have in common whose texts may be joined."""
    if isinstance(piece, ToolCallStart):
        return (id(piece),)
    return type(piece), piece.index if isinstance(piece, ToolArguments) else None
