"""`ConversationHandler`: protocol adapters of other vendors' chat APIs, which are served as chat completions.

An answer is a series of sections, one after the other: a stretch of text, a stretch of reasoning, or a call with its
arguments. Only the last one is open.
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
from dsv3.server.serving.generation import ChoiceUpdate
from dsv3.server.serving.handler import to_json
from dsv3.server.serving.request_parsing import converted, read_request
from dsv3.server.serving.service import Service
from dsv3.server.tenants import Tenant
from dsv3.text.deltas import AnswerDelta, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart

Kind = Literal["text", "reasoning", "call"]


class Section:
    """One section; `call` is the call whose arguments are its text."""

    def __init__(self, index: int, kind: Kind, call: ToolCallStart | None = None):
        self.index, self.kind, self.call = index, kind, call
        self.is_open = True
        self.written = io.StringIO()

    @property
    def text(self) -> str:
        """The section's text so far."""
        return self.written.getvalue()


class SectionChange(NamedTuple):
    """A section has been opened, has grown by `text`, or has been closed."""

    what: Literal["opened", "grown", "closed"]
    section: Section
    text: str = ""


class Sections:
    """The sections of one answer so far."""

    def __init__(self) -> None:
        self.all: list[Section] = []

    def add(self, deltas: Iterable[AnswerDelta]) -> list[SectionChange]:
        """Appends deltas; returns the changes."""
        return [change for delta in deltas for change in self._add(delta)]

    def end(self) -> list[SectionChange]:
        """Closes the last section; returns the change."""
        if not self.all or not self.all[-1].is_open:
            return []
        self.all[-1].is_open = False
        return [SectionChange("closed", self.all[-1])]

    def _add(self, delta: AnswerDelta) -> list[SectionChange]:
        match delta:
            case ToolCallStart():
                return self._open("call", delta)
            case ToolArgumentsDelta():
                return [self._grow(delta.text)]
            case TextDelta() | ReasoningDelta():
                kind: Kind = "text" if isinstance(delta, TextDelta) else "reasoning"
                goes_on = bool(self.all) and self.all[-1].is_open and self.all[-1].kind == kind
                return [*([] if goes_on else self._open(kind)), self._grow(delta.text)]

    def _open(self, kind: Kind, call: ToolCallStart | None = None) -> list[SectionChange]:
        changes = self.end()
        self.all.append(Section(len(self.all), kind, call))
        return [*changes, SectionChange("opened", self.all[-1])]

    def _grow(self, text: str) -> SectionChange:
        self.all[-1].written.write(text)
        return SectionChange("grown", self.all[-1], text)


class ConversationHandler[VendorRequest: msgspec.Struct](ChatHandler):
    """Handles a conversation in another vendor's JSON.

    `names` maps a field of a `ChatRequest` to the vendor's name of it, for errors.
    """

    vendor_type: type[VendorRequest]
    names: ClassVar[Mapping[str, str]]
    stream_end = b""
    vendor_request: VendorRequest

    def __init__(self, service: Service, body: bytes | bytearray, tenant: Tenant | None = None):
        super().__init__(service, body, tenant)
        self.sections = Sections()
        self._has_begun = False

    async def prepare(self) -> None:
        """Prepares the chat request; errors have the vendor's field names."""
        try:
            await super().prepare()
        except ApiError as error:
            raise with_vendor_names(error, self.names) from None

    async def read(self) -> ChatRequest:
        self.vendor_request = await read_request(self.service, self.vendor_type, self._body)
        return self.to_chat_request(self.vendor_request)

    async def whole(self) -> bytes:
        """Returns the JSON of the complete response; raises ApiError."""
        last: list[ChoiceUpdate] = []

        def collect(update: ChoiceUpdate) -> None:
            self.sections.add(update.deltas)
            last[:] = [update]

        await self.generation.run(self.parser, collect)
        return to_json(self.complete(last[0]))

    def events(self, update: ChoiceUpdate) -> list[bytes]:
        """Returns an update's events, with the opening events before the first and the closing ones after the last."""
        lines = [] if self._has_begun else self.opening_events()
        self._has_begun = True
        changes = self.sections.add(update.deltas)
        if update.finish_reason is not None:
            changes += self.sections.end()
        lines += [line for change in changes for line in self.change_events(change)]
        return lines if update.finish_reason is None else [*lines, *self.closing_events(update)]

    @abc.abstractmethod
    def to_chat_request(self, request: VendorRequest) -> ChatRequest:
        """Converts the vendor's request to a chat request; raises ApiError for what a chat request cannot express."""

    @abc.abstractmethod
    def complete(self, last: ChoiceUpdate) -> msgspec.Struct:
        """Returns the complete response; `last` has the finish reason."""

    @abc.abstractmethod
    def opening_events(self) -> list[bytes]:
        """Returns the events before the first section."""

    @abc.abstractmethod
    def change_events(self, change: SectionChange) -> list[bytes]:
        """Returns the events of a change."""

    @abc.abstractmethod
    def closing_events(self, last: ChoiceUpdate) -> list[bytes]:
        """Returns the events after the last section."""


def chat_request(fields: Mapping[str, Any], messages: list[ChatMessage]) -> ChatRequest:
    """Returns a chat request of the fields that are not None; raises ApiError as for a chat's body."""
    request = converted(ChatRequest, fields)
    request.messages = messages
    return request


def with_vendor_names(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Returns an error with the vendor's field names; a tool's function has no level of its own there."""
    path, colon, text = error.body.message.partition(": ")
    if colon and path.startswith("tools["):
        inner = re.sub(r"\.function\b", "", path).replace(".parameters", f".{names.get('parameters', 'parameters')}")
        body = msgspec.structs.replace(error.body, message=f"{inner}: {text}")
        return ApiError(error.status, body.message, kind=body.type, param=body.param, code=body.code)
    return error.renamed(names)


def text_parts(texts: list[str]) -> list[TextPart]:
    """Returns texts as parts of a message."""
    return [TextPart("text", text) for text in texts]
