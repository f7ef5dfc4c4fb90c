"""The deltas of an answer, each of one kind: text, reasoning, the start of a call, arguments.

A new kind is a class here and a member of `AnswerDelta`; `dsv3.text.parser` makes it.
"""

import itertools

import msgspec


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer's content, or text that is not parsed yet."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """Text of the model's reasoning."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """The start of call number `index` of an answer, from 0; its `ToolArgumentsDelta` follow."""

    index: int
    id: str
    name: str


class ToolArgumentsDelta(msgspec.Struct, frozen=True, gc=False):
    """The next part of a call's arguments; all parts joined are JSON, unless the answer is cut off."""

    index: int
    text: str


AnswerDelta = TextDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta


class SpecialToken(msgspec.Struct, frozen=True, gc=False):
    """A marker of the dialect that is a token, before the parser; `text` is its text in the vocabulary."""

    token_id: int
    text: str


RawDelta = TextDelta | SpecialToken
"""A model's output before the parser."""


def merge_deltas(deltas: list[AnswerDelta]) -> list[AnswerDelta]:
    """Merges adjacent deltas of the same kind."""
    if len(deltas) < 2:
        return deltas
    result: list[AnswerDelta] = []
    for _, group in itertools.groupby(deltas, _kind):
        first, *others = group
        if others:  # joined at once: a resumed answer may have 100,000 deltas of one kind
            text = "".join(delta.text for delta in (first, *others))  # type: ignore[union-attr]
            first = msgspec.structs.replace(first, text=text)
        result.append(first)
    return result


def _kind(delta: AnswerDelta) -> tuple[object, ...]:
    """Returns a key that is equal for deltas that may be merged."""
    if isinstance(delta, ToolCallStart):
        return (id(delta),)
    return type(delta), delta.index if isinstance(delta, ToolArgumentsDelta) else None
