"""Requests and responses of OpenAI's Responses API; limits are those of `dsv3.server.protocol.openai`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dsv3.server.protocol.openai import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_SALT_CHARS,
    MAX_TOOLS,
    CompletionTokensDetails,
    Int,
    Kwargs,
    Name,
    PromptTokensDetails,
    Timing,
    require_no_nul,
)

MAX_METADATA = 16


class InputPart(msgspec.Struct, kw_only=True):
    """A text part of an item."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        require_no_nul(self.text)
        require_no_nul(self.refusal)


InputParts = Annotated[list[InputPart], Meta(max_length=MAX_PARTS)]


class InputItem(msgspec.Struct, kw_only=True):
    """A message, a call, its result or reasoning; `type` decides which of the other fields it has."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | InputParts | None = None
    summary: InputParts | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | InputParts | None = None

    def __post_init__(self) -> None:
        for text in (self.content, self.arguments, self.output):
            require_no_nul(text)


class ResponsesFunction(msgspec.Struct, kw_only=True):
    """A function of the client; tools that OpenAI's servers run are refused."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesNamedFunction(msgspec.Struct, kw_only=True):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    name: Name


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """Options of reasoning, which is returned as it is and never summarized."""

    effort: Annotated[str, Meta(max_length=16)] | None = None
    summary: Annotated[str, Meta(max_length=16)] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/responses`; sampling fields beyond OpenAI's are vLLM's. Unknown fields are ignored."""

    model: Name | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponsesFunction], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)] | None = None
    user: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None
    include: Annotated[list[Name], Meta(max_length=MAX_METADATA)] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Name | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Int | None = None
    conversation: Any = None
    prompt: Any = None
    resume: Any = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    chat_template_kwargs: Kwargs | None = None

    def __post_init__(self) -> None:
        for text in (self.input, self.instructions, self.cache_salt):
            require_no_nul(text)


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


Part = OutputText | ReasoningText


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText]


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


Item = MessageItem | ReasoningItem | CallItem


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int
    timing: Timing | msgspec.UnsetType = msgspec.UNSET


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The response so far; it repeats fields of the request, as OpenAI's does."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[Item]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float | None
    top_p: float | None
    tool_choice: Any
    tools: list[ResponsesFunction]
    reasoning: ReasoningOptions
    text: TextOptions
    user: str | None
    background: bool = False
    previous_response_id: None = None
    service_tier: str = "default"
    store: bool = False
    top_logprobs: int = 0
    truncation: str = "disabled"
    weight_version: str | msgspec.UnsetType = msgspec.UNSET  # that of the last token
