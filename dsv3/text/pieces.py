"""What a model's output is made of, for those who show it: pieces, each of one kind.

A new kind is a class here and a member of `Piece`; the parser that makes it is registered in `dsv3.text.parsers`.
"""

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer itself, or text that no parser has looked at yet."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text the model wrote while it was thinking."""

    text: str


Piece = Text | Reasoning
