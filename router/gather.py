"""The events of a streamed answer: what they tell, what the client is told of it, and where others may go on."""

import array
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from dsv3.http_client import ServerSentEvents
from dsv3.server.protocol.errors import ApiError
from router.request import ParsedRequest

DONE = b"data: [DONE]\n\n"
Events = functools.partial(ServerSentEvents, 2**26)
"""Cuts the body of a stream into events; one has 64 MiB at most."""
# Events of a choice that may wait for its tokens: from an instance that does not tell them, and from one that does.
_MAX_SILENT, _MAX_HELD = 4, 1024

_encode = msgspec.json.Encoder().encode


class Unreadable(Exception):
    """What comes is no stream of events."""


class ErrorEvent(Exception):
    """An event tells of an error, which ends the stream; `is_ours`: another instance may do better."""

    def __init__(self, error: ApiError, *, is_ours: bool):
        super().__init__(str(error))
        self.error, self.is_ours = error, is_ours


@dataclasses.dataclass
class _ChoiceState:
    """`held` are its events that no tokens cover yet; `num_silent` are those of them without a list of tokens."""

    tokens: array.array[int]
    held: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    num_silent: int = 0
    has_ended: bool = False


class Gathered:
    """A streamed answer, over all the instances that tell parts of it.

    An instance may tell several events of some tokens and name these with the last one alone. So the events of a choice
    are held back until one comes with tokens, or ends it; then all go out. Whatever the client has been told, `tokens`
    cover, and whatever these cover, it has been told: another instance that goes on behind them tells nothing twice and
    leaves nothing out.
    """

    def __init__(self, asked: ParsedRequest):
        self.is_tracked = asked.is_resumable
        self.is_done = False
        self._wants_ids = asked.wants_ids
        self._choices = [_ChoiceState(array.array("i", each)) for each in asked.given]
        self._first: dict[str, Any] = {}

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of each choice so far."""
        return [choice.tokens.tolist() for choice in self._choices]

    def take(self, data: bytes) -> tuple[list[bytes], int]:
        """Returns what the client is told of one event, and its number of tokens; raises Unreadable and Failed."""
        if data == b"[DONE]":
            self.is_done = True
            return [*map(_line, self._released(self._choices)), DONE], 0
        event = read_event(data)
        if not self._choices:  # nobody else could go on with it
            return [_line(event)], 1
        self._name(event)
        before = sum(len(choice.tokens) for choice in self._choices)
        told = [_line(each) for each in self._told(event)]
        return told, sum(len(choice.tokens) for choice in self._choices) - before

    def broke(self) -> None:
        """Forgets what was held back: it comes again."""
        for choice in self._choices:
            choice.held, choice.num_silent = [], 0

    def _name(self, event: dict[str, Any]) -> None:
        """Gives all events the id and the time of the first one."""
        for name in ("id", "created"):
            if name in event:
                event[name] = self._first.setdefault(name, event[name])

    def _told(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns what goes out with an event. Each choice has an event of its own: it may have to wait alone."""
        if not self._wants_ids:
            event.pop("prompt_token_ids", None)
        told = event.get("choices") or []
        if not isinstance(told, list):
            raise Unreadable("an event has choices that are no list")
        if not told:
            return [event]
        read = [self._read(part) for part in told]  # all of them, before any of their tokens count
        parts = zip(read, told, strict=True)
        return [each for (choice, ids), part in parts for each in self._take(choice, ids, part, event)]

    def _read(self, told: Any) -> tuple[_ChoiceState, array.array[int] | None]:
        """Returns the choice that a part of an event is about, and its tokens, None where it has no list of them."""
        place = told.get("index") if isinstance(told, dict) else None
        if type(place) is not int or not 0 <= place < len(self._choices):
            raise Unreadable(f"an event has a choice {place!r} of {len(self._choices)}")
        ids = told.get("token_ids")
        try:
            return self._choices[place], None if ids is None else array.array("i", ids)
        except (TypeError, OverflowError):
            raise Unreadable("an event has tokens that are none") from None

    def _take(
        self, choice: _ChoiceState, ids: array.array[int] | None, told: dict[str, Any], event: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Returns what goes out with a part of an event."""
        if choice.has_ended:
            return []
        choice.has_ended = told.get("finish_reason") is not None
        if self._wants_ids or choice.has_ended or _says(told) or event.get("usage") is not None:
            choice.held.append(event | {"choices": [told]})
        if not self._wants_ids:
            told.pop("token_ids", None)
            told.pop("prompt_token_ids", None)
        choice.num_silent += ids is None
        if choice.num_silent > _MAX_SILENT or len(choice.held) > _MAX_HELD:
            self.is_tracked = False  # it does not tell the tokens
        if ids or choice.has_ended:
            choice.tokens += ids or array.array("i")
            return self._released([choice])
        return [] if self.is_tracked else self._released(self._choices)

    @staticmethod
    def _released(choices: Sequence[_ChoiceState]) -> list[dict[str, Any]]:
        """Returns what was held back of some choices, which is held no more."""
        told = [event for choice in choices for event in choice.held]
        for choice in choices:
            choice.held, choice.num_silent = [], 0
        return told


def read_event(data: bytes) -> dict[str, Any]:
    """Returns the JSON object of an event; raises Unreadable, and Failed for one that tells of an error."""
    try:
        event = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Unreadable("an event is not JSON") from None
    if not isinstance(event, dict):
        raise Unreadable("an event is not a JSON object")
    if "error" in event and "choices" not in event:
        raise _failed(event["error"])
    return event


def _failed(told: Any) -> ErrorEvent:
    found = told if isinstance(told, dict) else {}
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    kind = texts.get("type", "server_error")
    status = 500 if kind == "server_error" else 400
    words = texts.get("message", "the request failed")
    error = ApiError(status, words, kind=kind, param=texts.get("param"), code=texts.get("code"))
    return ErrorEvent(error, is_ours=kind == "server_error")


def _says(told: dict[str, Any]) -> bool:
    """Returns whether a choice of an event has anything but token ids: those alone come only because we asked."""
    delta = told.get("delta")
    values = delta.values() if isinstance(delta, dict) else [told.get("text")]
    return any(value not in ("", None) for value in values) or told.get("logprobs") is not None


def _line(event: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % _encode(event)
