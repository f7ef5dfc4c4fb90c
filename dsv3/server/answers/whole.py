"""Puts complete answers together: what comes is kept as text and JSON, and joined without keeping the event loop."""

import array
import asyncio
import io
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from dsv3.server.answers.generation import Update
from dsv3.server.answers.responses import FinishReason
from dsv3.text.pieces import Reasoning, Text, ToolArguments, ToolCall

# Bytes that are joined before others of the event loop have their turn: 1 ms where they come in records of 1 KiB.
_SLICE_BYTES = 2**20
_GAP = b"\x01"  # no JSON has it: control characters are escaped

GAP, LIST_OF_GAP = msgspec.Raw(_GAP), msgspec.Raw(b"[%s]" % _GAP)
"""Stand in a response for what is put there later: a value, the items of a list."""


class WholeChoice:
    """All that came for one choice; `columns` are the JSON of its log-probabilities, as far as they are asked for."""

    def __init__(self, index: int):
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.columns: list[list[bytes]] = []
        self._text, self._reasoning = io.StringIO(), io.StringIO()
        self._calls: list[tuple[ToolCall, io.StringIO]] = []
        self._token_ids = array.array("i")

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def reasoning(self) -> str:
        return self._reasoning.getvalue()

    @property
    def calls(self) -> list[tuple[ToolCall, str]]:
        """The calls with their arguments."""
        return [(call, arguments.getvalue()) for call, arguments in self._calls]

    @property
    def token_ids(self) -> list[int]:
        return self._token_ids.tolist()

    def add(self, update: Update, columns: Sequence[bytes]) -> None:
        """Takes what one update brings; `columns` are those of its log-probabilities."""
        for piece in update.pieces:
            match piece:
                case Text():
                    self._text.write(piece.text)
                case Reasoning():
                    self._reasoning.write(piece.text)
                case ToolCall():
                    self._calls.append((piece, io.StringIO()))
                case ToolArguments():
                    self._calls[piece.index][1].write(piece.text)
        self._token_ids.extend(update.token_ids)
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        self.columns = self.columns or [[] for _ in columns]
        for column, items in zip(self.columns, columns, strict=True):
            if items:
                column.append(items)


def with_commas(items: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the items of a JSON list, commas between them."""
    for i, item in enumerate(items):
        if i:
            yield b","
        yield item


def filled(json: bytes, gaps: Sequence[Iterable[bytes]]) -> Iterator[bytes]:
    """Yields JSON with the pieces of each gap in its place."""
    head, *tails = json.split(_GAP)
    yield head
    for pieces, tail in zip(gaps, tails, strict=True):
        yield from pieces
        yield tail


async def joined(pieces: Iterable[bytes]) -> bytes:
    """Returns the pieces as one; the event loop looks around after each slice of them."""
    whole, since = io.BytesIO(), 0
    for piece in pieces:
        since += whole.write(piece)
        if since >= _SLICE_BYTES:
            since = 0
            await asyncio.sleep(0)
    return whole.getvalue()  # not copied: a BytesIO holds a bytes object
