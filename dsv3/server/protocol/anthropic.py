"""Requests and responses of Anthropic's Messages API; limits are those of `dsv3.server.protocol.openai`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dsv3.server.protocol.errors import ApiError
from dsv3.server.protocol.openai import (
    MAX_FIELD_BYTES,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_SALT_CHARS,
    MAX_STOP,
    MAX_TOOLS,
    Int,
    Kwargs,
    Name,
    StopString,
    TextPart,
    Thinking,
    Timing,
    require_no_nul,
)

MESSAGES = "/v1/messages"
"""The path of the API; `/v1/messages/count_tokens` lies below it."""


_OBJECT = {"anyOf": [{"type": "object"}, {"type": "null"}], "default": None}
_object_decoder = msgspec.json.Decoder(dict[str, Any] | None)


def _absent() -> msgspec.Raw:
    return msgspec.Raw(b"null")


def _decode_input(raw: msgspec.Raw) -> Any:
    """Decodes a call's arguments, which may be any object; checks their size first."""
    if len(raw) > MAX_FIELD_BYTES:
        raise ValueError(f"input: takes more than {MAX_FIELD_BYTES} bytes")
    try:
        return _object_decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise ValueError(f"input: {error}") from None


class ContentBlock(msgspec.Struct, kw_only=True):
    """A part of a message; `type` decides which of the other fields it has."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: Annotated[msgspec.Raw, Meta(extra_json_schema=_OBJECT)] = msgspec.field(default_factory=_absent)
    tool_use_id: Name | None = None
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)] | None = None

    def __post_init__(self) -> None:
        for text in (self.text, self.thinking, self.content):
            require_no_nul(text)
        self.input = _decode_input(self.input)


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Meta(max_length=MAX_PARTS)] | None = None

    def __post_init__(self) -> None:
        require_no_nul(self.content)


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A function of the client; tools that Anthropic's servers run are refused."""

    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Annotated[str, Meta(max_length=16)] | None = None
    format: OutputFormat | None = None


class MessagesRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages`; `max_tokens` is optional for counting tokens.

    `cache_salt` and `chat_template_kwargs` are vLLM's additions. Unknown fields are ignored.
    """

    model: Name | None = None
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    system: str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)] | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP)] | None = None
    stream: bool | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    container: Any = None
    mcp_servers: Any = None
    resume: Any = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    chat_template_kwargs: Kwargs | None = None

    def __post_init__(self) -> None:
        require_no_nul(self.system)
        require_no_nul(self.cache_salt)


class AnthropicUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`input_tokens` counts the prompt's tokens that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    timing: Timing | msgspec.UnsetType = msgspec.UNSET


class AnthropicText(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class Thought(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning; the signature is empty: nothing is signed here."""

    thinking: str
    signature: str = ""


class ToolUse(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = AnthropicText | Thought | ToolUse
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The response."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage
    weight_version: str | msgspec.UnsetType = msgspec.UNSET  # that of the last token


class TokenCount(msgspec.Struct, frozen=True):
    """The response of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessagesErrorBody(msgspec.Struct, frozen=True):
    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: MessagesErrorBody


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def messages_envelope(error: ApiError) -> bytes:
    """Returns the JSON of an error in this API's format."""
    body = MessagesErrorBody(_KINDS.get(error.status, "invalid_request_error"), error.body.message)
    return msgspec.json.encode(MessagesError(body))
