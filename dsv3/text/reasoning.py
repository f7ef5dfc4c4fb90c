"""Splits what a reasoning model writes into its reasoning and its answer, as it comes and in linear time.

DeepSeek-R1 and V3.1 write `reasoning</think>answer`. Newer chat templates put `<think>` (or, with thinking off,
`</think>`) at the end of the prompt, so only the closing marker is written; with older ones the model writes both.
"""

from typing import Literal

from dsv3.text.pieces import Piece, Reasoning, Text
from dsv3.text.stop import StopMatcher

OPEN, CLOSE = "<think>", "</think>"
Parser = Literal["auto", "deepseek_r1", "none"]

# Characters held back while they are white space or part of `<think>`; a flood of white space is not held.
_MAX_OPENING = 64

State = Literal["undecided", "reasoning", "answer"]


def parser_after(prompt: str, parser: str) -> "ReasoningParser | None":
    """Returns the parser of an answer to `prompt`; None where the answer can hold no reasoning."""
    state = start_state(prompt, parser)
    return None if state == "answer" else ReasoningParser(state)


def start_state(prompt: str, parser: str) -> State:
    """Returns where the model stands after `prompt`.

    A prompt that ends with a marker decides. Otherwise the text is reasoning until `</think>` with the parser
    "deepseek_r1" (a model that always thinks), and with "auto" only if it begins with `<think>`.
    """
    tail = prompt[-64:].rstrip()
    if parser == "none" or tail.endswith(CLOSE):
        return "answer"
    if parser == "deepseek_r1" or tail.endswith(OPEN):
        return "reasoning"
    return "undecided"


def writes_reasoning(chat_template: str | None) -> bool:
    """Returns whether a template knows the markers."""
    return chat_template is not None and CLOSE in chat_template


class ReasoningParser:
    """Splits text into reasoning and answer; the markers are dropped, all other characters are kept as they are.

    Only the first `</think>` ends the reasoning; markers in the answer are text. See `dsv3.text.parsers.OutputParser`.
    """

    def __init__(self, state: State):
        self._state: State = state
        self._at_start = state != "answer"
        self._held = ""
        self._close = StopMatcher([CLOSE])

    @property
    def is_done(self) -> bool:
        """Whether the answer has begun."""
        return self._state == "answer" and not self._at_start

    def push(self, piece: Piece) -> list[Piece]:
        """Returns the new reasoning and the new answer."""
        if not isinstance(piece, Text):
            return [piece]
        text = piece.text
        if self._at_start:
            text = self._read_opening(text)
        if self._at_start:
            return []
        if self._state == "reasoning":
            return self._read_reasoning(text)
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        """Returns what was held back."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held) if self._state == "reasoning" else Text(held)]

    def _read_opening(self, text: str) -> str:
        """Decides by the first characters that are not white space; returns the text after an opening marker."""
        text = self._held + text
        body = text.lstrip()
        if len(text) <= _MAX_OPENING and len(body) < len(OPEN) and OPEN.startswith(body):
            self._held = text
            return ""
        self._held = ""
        self._at_start = False
        if body.startswith(OPEN):
            self._state = "reasoning"
            return body[len(OPEN) :]
        if self._state == "undecided":
            self._state = "answer"
        return text

    def _read_reasoning(self, text: str) -> list[Piece]:
        match = self._close.find(text)
        text = self._held + text
        if match is None:
            cut = len(text) - self._close.held
            self._held = text[cut:]
            return [Reasoning(text[:cut])] if cut else []
        end = len(self._held) + match[0]
        self._state, self._held = "answer", ""
        reasoning, answer = text[: end - len(CLOSE)], text[end:]
        return [piece(part) for piece, part in ((Reasoning, reasoning), (Text, answer)) if part]
