"""What the faces of a conversation share: a request is read as another vendor's, and answered as a chat.

Their answers are a series of sections, one after the other: a stretch of text, a stretch of reasoning, or a call with
its arguments. Only the last one is open.
"""

import abc
import io
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from dsv3.server.protocol.errors import ApiError
from dsv3.server.protocol.openai import ChatMessage, ChatRequest, TextPart
from dsv3.server.serving.chat import ChatHandler
from dsv3.server.serving.generation import Update
from dsv3.server.serving.handler import to_json
from dsv3.server.serving.request_parsing import converted, read_request
from dsv3.server.serving.service import Service
from dsv3.server.tenants import Tenant
from dsv3.text.pieces import Piece, Reasoning, Text, ToolArguments, ToolCallStart

Kind = Literal["text", "reasoning", "call"]


class Section:
    """One section; `call` says whose arguments its text is."""

    def __init__(self, index: int, kind: Kind, call: ToolCallStart | None = None):
        self.index, self.kind, self.call = index, kind, call
        self.is_open = True
        self._text = io.StringIO()

    @property
    def text(self) -> str:
        """All of the section so far."""
        return self._text.getvalue()

    def add(self, text: str) -> None:
        """Takes more of the section."""
        self._text.write(text)


class SectionChange(NamedTuple):
    """A section begins, has got more `text`, or is complete."""

    what: Literal["opened", "grown", "closed"]
    section: Section
    text: str = ""


class Sections:
    """The sections of one answer; `all` are those so far."""

    def __init__(self) -> None:
        self.all: list[Section] = []

    def take(self, pieces: Iterable[Piece]) -> list[SectionChange]:
        """Returns what pieces change."""
        return [change for piece in pieces for change in self._take(piece)]

    def end(self) -> list[SectionChange]:
        """Returns what the end of the answer changes."""
        if not self.all or not self.all[-1].is_open:
            return []
        self.all[-1].is_open = False
        return [SectionChange("closed", self.all[-1])]

    def _take(self, piece: Piece) -> list[SectionChange]:
        match piece:
            case ToolCallStart():
                return self._open("call", piece)
            case ToolArguments():
                return [self._grow(piece.text)]
            case Text() | Reasoning():
                kind: Kind = "text" if isinstance(piece, Text) else "reasoning"
                goes_on = bool(self.all) and self.all[-1].is_open and self.all[-1].kind == kind
                return [*([] if goes_on else self._open(kind)), self._grow(piece.text)]

    def _open(self, kind: Kind, call: ToolCallStart | None = None) -> list[SectionChange]:
        changes = self.end()
        self.all.append(Section(len(self.all), kind, call))
        return [*changes, SectionChange("opened", self.all[-1])]

    def _grow(self, text: str) -> SectionChange:
        self.all[-1].add(text)
        return SectionChange("grown", self.all[-1], text)


class ConversationHandler[Asked: msgspec.Struct](ChatHandler):
    """The answer to a conversation in another vendor's JSON.

    `names` maps a field of a `ChatRequest` to the vendor's name of it, for errors.
    """

    asked_type: type[Asked]
    names: ClassVar[Mapping[str, str]]
    farewell = b""
    asked: Asked

    def __init__(self, service: Service, body: bytes | bytearray, tenant: Tenant | None = None):
        super().__init__(service, body, tenant)
        self.sections = Sections()
        self._has_begun = False

    async def prepare(self) -> None:
        """Does what a chat does; errors name the fields as the client does."""
        try:
            await super().prepare()
        except ApiError as error:
            raise in_their_names(error, self.names) from None

    async def read(self) -> ChatRequest:
        self.asked = await read_request(self.service, self.asked_type, self._body)
        return self.as_chat(self.asked)

    async def whole(self) -> bytes:
        """Returns the JSON of the complete answer; raises ApiError."""
        last: list[Update] = []

        def take(update: Update) -> None:
            self.sections.take(update.pieces)
            last[:] = [update]

        await self.generation.run(self.parser, take)
        return to_json(self.complete(last[0]))

    def events(self, update: Update) -> list[bytes]:
        """Returns the events of one update; the first one of an answer is greeted, the last one bidden farewell."""
        lines = [] if self._has_begun else self.opening()
        self._has_begun = True
        changes = self.sections.take(update.pieces)
        if update.finish_reason is not None:
            changes += self.sections.end()
        lines += [line for change in changes for line in self.told(change)]
        return lines if update.finish_reason is None else [*lines, *self.closing(update)]

    @abc.abstractmethod
    def as_chat(self, asked: Asked) -> ChatRequest:
        """Returns the same request as a chat's; raises ApiError for what a chat has not."""

    @abc.abstractmethod
    def complete(self, last: Update) -> msgspec.Struct:
        """Returns the complete answer, whose last update says why it ended."""

    @abc.abstractmethod
    def opening(self) -> list[bytes]:
        """Returns the events before all sections."""

    @abc.abstractmethod
    def told(self, change: SectionChange) -> list[bytes]:
        """Returns the events that tell of a change."""

    @abc.abstractmethod
    def closing(self, last: Update) -> list[bytes]:
        """Returns the events behind all sections."""


def chat_request(fields: Mapping[str, Any], messages: list[ChatMessage]) -> ChatRequest:
    """Returns a chat's request with the fields that are not None; raises ApiError as for a chat's body."""
    request = converted(ChatRequest, fields)
    request.messages = messages
    return request


def in_their_names(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Returns an error with the vendor's names of fields; a tool's function has no level of its own there."""
    path, colon, text = error.body.message.partition(": ")
    if colon and path.startswith("tools["):
        inner = re.sub(r"\.function\b", "", path).replace(".parameters", f".{names.get('parameters', 'parameters')}")
        body = msgspec.structs.replace(error.body, message=f"{inner}: {text}")
        return ApiError(error.status, body.message, kind=body.type, param=body.param, code=body.code)
    return error.renamed(names)


def text_parts(texts: list[str]) -> list[TextPart]:
    """Returns texts as the parts of a message."""
    return [TextPart("text", text) for text in texts]
