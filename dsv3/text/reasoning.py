"""Splits what a reasoning model writes into its reasoning and its answer, as it comes and in linear time.

DeepSeek-R1 and V3.1 write `reasoning</think>answer`. Newer chat templates put `<think>` (or, with thinking off,
`</think>`) at the end of the prompt, so only the closing marker is written; with older ones the model writes both.
"""

from typing import Literal

from dsv3.text.stop import StopMatcher

OPEN, CLOSE = "<think>", "</think>"
Parser = Literal["auto", "deepseek_r1", "none"]

# Characters held back while they are white space or part of `<think>`; a flood of white space is not held.
_MAX_OPENING = 64

State = Literal["undecided", "reasoning", "answer"]


def start_state(prompt: str, parser: str) -> State:
    """Where the model stands after `prompt`.

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
    """Whether a template knows the markers."""
    return chat_template is not None and CLOSE in chat_template


class ReasoningSplitter:
    """Takes text piece by piece; the markers are dropped, all other characters are kept as they are.

    Only the first `</think>` ends the reasoning; markers in the answer are text.
    """

    def __init__(self, state: State):
        self._state: State = state
        self._at_start = True
        self._held = ""
        self._close = StopMatcher([CLOSE])

    def push(self, text: str) -> tuple[str, str]:
        """The new reasoning and the new answer; text that may be part of a marker is held back."""
        if self._at_start and self._state != "answer":
            text = self._read_opening(text)
        if self._state == "reasoning" and not self._at_start:
            return self._read_reasoning(text)
        return ("", text) if self._state == "answer" else ("", "")

    def finish(self) -> tuple[str, str]:
        """What was held back, now that no more text will come."""
        held, self._held = self._held, ""
        return (held, "") if self._state == "reasoning" else ("", held)

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

    def _read_reasoning(self, text: str) -> tuple[str, str]:
        match = self._close.find(text)
        text = self._held + text
        if match is not None:
            reasoning_end = len(self._held) + match[0]
            self._state, self._held = "answer", ""
            return text[: reasoning_end - len(CLOSE)], text[reasoning_end:]
        cut = len(text) - self._close.held
        self._held = text[cut:]
        return text[:cut], ""
