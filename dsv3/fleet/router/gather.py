"""The events of a streamed answer: what they tell, what the client is told of it, and where others may go on."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

from dsv3.api.answers.errors import ApiError
from dsv3.fleet.router.asked import Asked

DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 2**26
# Events of an instance before a choice's first token (its role, its echo). One that tells no tokens has more of them.
_MAX_HELD = 4

_encode = msgspec.json.Encoder().encode


class Unreadable(Exception):
    """What comes is no stream of events."""


class Failed(Exception):
    """An event tells of an error, which ends the stream; `is_ours`: another instance may do better."""

    def __init__(self, error: ApiError, *, is_ours: bool):
        super().__init__(str(error))
        self.error, self.is_ours = error, is_ours


class Events:
    """Cuts a body into the data of its server-sent events."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def push(self, data: bytes) -> Iterator[bytes]:
        """Yields the data of each event that is complete; raises Unreadable for one that has no end."""
        self._buffer += data
        *whole, rest = bytes(self._buffer).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise Unreadable(f"an event has more than {MAX_EVENT_BYTES} bytes")
        self._buffer = bytearray(rest)
        for event in whole:
            lines = [line.removeprefix(b"data:").strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


@dataclasses.dataclass
class _Choice:
    tokens: list[int]
    num_without: int = 0
    has_ended: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether another instance would go on with it, and not begin again."""
        return bool(self.tokens) or self.has_ended


class Gathered:
    """A streamed answer, over all the instances that tell parts of it.

    Events before a choice's first token are held back until it comes: an instance that begins a choice again tells its
    role and its echo again. So whatever the client has been told, the tokens of `tokens` have told.
    """

    def __init__(self, asked: Asked):
        self.is_tracked = asked.is_resumable
        self.is_done = False
        self._wants_ids = asked.wants_ids
        self._choices = [_Choice(list(each)) for each in asked.given]
        self._held: list[tuple[frozenset[int], dict[str, Any]]] = []
        self._first: dict[str, Any] = {}

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of each choice so far."""
        return [choice.tokens for choice in self._choices]

    def take(self, data: bytes) -> tuple[list[bytes], int]:
        """Returns what the client is told of one event, and its number of tokens; raises Unreadable and Failed."""
        if data == b"[DONE]":
            self.is_done = True
            return [*map(_line, self._release()), DONE], 0
        event = read_event(data)
        if not self.is_tracked:
            return [_line(event)], 1
        before = sum(len(choice.tokens) for choice in self._choices)
        told = [_line(each) for each in self._told(event)]
        return told, sum(len(choice.tokens) for choice in self._choices) - before

    def broke(self) -> None:
        """Forgets what was held back: it comes again, as do the events without tokens."""
        self._held.clear()
        for choice in self._choices:
            choice.num_without = 0

    def _told(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        self._name(event)
        had_choices = bool(event.get("choices"))
        choices = [choice for choice in event.get("choices") or [] if self._take_choice(choice)]
        if had_choices and not choices and event.get("usage") is None:
            return []
        event["choices"] = choices
        if not self._wants_ids:
            event.pop("prompt_token_ids", None)
        places = frozenset(choice["index"] for choice in choices)
        if places and self.is_tracked and not any(self._choices[place].has_begun for place in places):
            self._held.append((places, event))
            return []
        return [*self._release(places), event]

    def _name(self, event: dict[str, Any]) -> None:
        """Gives all events the id and the time of the first one."""
        for name in ("id", "created"):
            if name in event:
                event[name] = self._first.setdefault(name, event[name])

    def _take_choice(self, told: Any) -> bool:
        """Notes what an event tells of a choice; returns whether the client is to hear of it."""
        place = told.get("index") if isinstance(told, dict) else None
        if type(place) is not int or not 0 <= place < len(self._choices):
            raise Unreadable(f"an event has a choice {place!r} of {len(self._choices)}")
        choice = self._choices[place]
        if choice.has_ended:
            return False
        ids = told.get("token_ids") or []
        choice.tokens += ids
        choice.has_ended = told.get("finish_reason") is not None
        choice.num_without += not ids and not choice.has_begun
        self.is_tracked &= choice.num_without <= _MAX_HELD
        if not self._wants_ids:
            told.pop("token_ids", None)
            told.pop("prompt_token_ids", None)
        return choice.has_ended or self._wants_ids or _says(told) or not choice.has_begun

    def _release(self, places: frozenset[int] | None = None) -> list[dict[str, Any]]:
        """Returns what was held back, of these choices or of all."""
        out = [event for where, event in self._held if places is None or not self.is_tracked or where & places]
        self._held = [held for held in self._held if not any(held[1] is event for event in out)]
        return out


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


def _failed(told: Any) -> Failed:
    found = told if isinstance(told, dict) else {}
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    kind = texts.get("type", "server_error")
    status = 500 if kind == "server_error" else 400
    words = texts.get("message", "the request failed")
    error = ApiError(status, words, kind=kind, param=texts.get("param"), code=texts.get("code"))
    return Failed(error, is_ours=kind == "server_error")


def _says(told: dict[str, Any]) -> bool:
    """Returns whether a choice of an event has anything but token ids: those alone come only because we asked."""
    delta = told.get("delta")
    values = delta.values() if isinstance(delta, dict) else [told.get("text")]
    return any(value not in ("", None) for value in values) or told.get("logprobs") is not None


def _line(event: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % _encode(event)
