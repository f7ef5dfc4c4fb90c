"""A streamed response on its way through the router: events in, events out, and the tokens to resume behind."""

import array
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from dsv3.http_client import RequestFailed, ServerSentEvents
from dsv3.server.protocol.errors import ApiError
from router.request import ParsedRequest

DONE = b"data: [DONE]\n\n"
Events = functools.partial(ServerSentEvents, 2**26)
"""Cuts the body of a stream into events; one has 64 MiB at most."""
# Pending events of a choice: from an instance that sends no token ids, and from one that does.
_MAX_WITHOUT_IDS, _MAX_PENDING = 4, 1024

_encode = msgspec.json.Encoder().encode


@dataclasses.dataclass
class _RelayedChoice:
    """`pending` are events that wait for token ids; `num_without_ids` of them have no list of ids."""

    tokens: array.array[int]
    pending: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    num_without_ids: int = 0
    has_ended: bool = False


class RelayedStream:
    """A streamed response over all the instances that send parts of it.

    An instance may send several events for some tokens and list the ids only in the last one. So the events of a choice
    are pending until one has ids, or ends the choice; then all are sent. `tokens` are exactly those that the client has
    events of, so an instance that resumes behind them repeats nothing and omits nothing.
    """

    def __init__(self, request: ParsedRequest):
        self.is_tracked = request.is_resumable
        self.is_done = False
        self._wants_ids = request.wants_ids
        self._choices = [_RelayedChoice(array.array("i", each)) for each in request.given]
        self._first: dict[str, Any] = {}

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of each choice so far."""
        return [choice.tokens.tolist() for choice in self._choices]

    def push(self, data: bytes) -> tuple[list[bytes], int]:
        """Returns what the client is sent for one event, and its number of tokens.

        Raises RequestFailed for what is no event of a stream, and ApiError for an event that carries an error.
        """
        if data == b"[DONE]":
            self.is_done = True
            return [*map(_line, self._flush(self._choices)), DONE], 0
        event = _read_event(data)
        if not self._choices:  # no instance could resume it
            return [_line(event)], 1
        self._set_identity(event)
        before = sum(len(choice.tokens) for choice in self._choices)
        lines = [_line(each) for each in self._outgoing(event)]
        return lines, sum(len(choice.tokens) for choice in self._choices) - before

    def reset(self) -> None:
        """Drops pending events: the next instance sends them again."""
        for choice in self._choices:
            choice.pending, choice.num_without_ids = [], 0

    def _set_identity(self, event: dict[str, Any]) -> None:
        """Gives all events the id and the time of the first one."""
        for name in ("id", "created"):
            if name in event:
                event[name] = self._first.setdefault(name, event[name])

    def _outgoing(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the events to send for one. Each choice gets its own event, since choices wait apart."""
        if not self._wants_ids:
            event.pop("prompt_token_ids", None)
        parts = event.get("choices") or []
        if not isinstance(parts, list):
            raise _malformed("an event's choices are not a list")
        if not parts:
            return [event]
        parsed = [self._parse(part) for part in parts]  # all of them, before any of their tokens count
        both = zip(parsed, parts, strict=True)
        return [each for (choice, ids), part in both for each in self._append(choice, ids, part, event)]

    def _parse(self, part: Any) -> tuple[_RelayedChoice, array.array[int] | None]:
        """Returns the choice of a part of an event, and its token ids, None where it lists none."""
        index = part.get("index") if isinstance(part, dict) else None
        if type(index) is not int or not 0 <= index < len(self._choices):
            raise _malformed(f"an event has a choice {index!r} of {len(self._choices)}")
        ids = part.get("token_ids")
        try:
            return self._choices[index], None if ids is None else array.array("i", ids)
        except (TypeError, OverflowError):
            raise _malformed("an event's token_ids are not a list of 32-bit integers") from None

    def _append(
        self, choice: _RelayedChoice, ids: array.array[int] | None, part: dict[str, Any], event: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Appends a part of an event to its choice; returns the events to send."""
        if choice.has_ended:
            return []
        choice.has_ended = part.get("finish_reason") is not None
        if self._wants_ids or choice.has_ended or _has_content(part) or event.get("usage") is not None:
            choice.pending.append(event | {"choices": [part]})
        if not self._wants_ids:
            part.pop("token_ids", None)
            part.pop("prompt_token_ids", None)
        choice.num_without_ids += ids is None
        if choice.num_without_ids > _MAX_WITHOUT_IDS or len(choice.pending) > _MAX_PENDING:
            self.is_tracked = False  # the instance sends no token ids
        if ids or choice.has_ended:
            choice.tokens += ids or array.array("i")
            return self._flush([choice])
        return [] if self.is_tracked else self._flush(self._choices)

    @staticmethod
    def _flush(choices: Sequence[_RelayedChoice]) -> list[dict[str, Any]]:
        """Returns and clears the pending events of some choices."""
        events = [event for choice in choices for event in choice.pending]
        for choice in choices:
            choice.pending, choice.num_without_ids = [], 0
        return events


def _malformed(text: str) -> RequestFailed:
    return RequestFailed("malformed", text)


def _read_event(data: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _malformed("an event is not JSON") from None
    if not isinstance(event, dict):
        raise _malformed("an event is not a JSON object")
    if "error" in event and "choices" not in event:
        raise _error_of(event["error"])
    return event


def _error_of(error: Any) -> ApiError:
    found = error if isinstance(error, dict) else {}
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    kind = texts.get("type", "server_error")
    status = 500 if kind == "server_error" else 400
    words = texts.get("message", "the request failed")
    return ApiError(status, words, kind=kind, param=texts.get("param"), code=texts.get("code"))


def _has_content(part: dict[str, Any]) -> bool:
    """Returns whether a part has anything but token ids, which come only because the router requests them."""
    delta = part.get("delta")
    values = delta.values() if isinstance(delta, dict) else [part.get("text")]
    return any(value not in ("", None) for value in values) or part.get("logprobs") is not None


def _line(event: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % _encode(event)
