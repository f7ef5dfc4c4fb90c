"""What clients get: OpenAI's response objects with vLLM's additions."""

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The lists of log-probabilities, here and below, are JSON already: `dsv3.server.answers.logprobs` makes it."""

    content: msgspec.Raw
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: msgspec.Raw
    token_logprobs: msgspec.Raw
    top_logprobs: msgspec.Raw
    text_offset: msgspec.Raw


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    """`token_ids` (and a completion's `prompt_token_ids` and `prompt_logprobs`) appear only when asked for."""

    index: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(_Choice, frozen=True, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class MessageToolCall(msgspec.Struct, frozen=True):
    id: str
    function: FunctionCall
    type: str = "function"


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[MessageToolCall] | msgspec.UnsetType = msgspec.UNSET
    refusal: None = None


class ChatChoice(_Choice, frozen=True, kw_only=True):
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    name: str | None = None
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A part of a call; id, type and name come with the first."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(_Choice, frozen=True, kw_only=True):
    delta: Delta
    logprobs: ChatLogprobs | None = None


class _Response(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` is null in the chunks of a stream that reports it, and absent in the others."""

    id: str
    object: str
    created: int
    model: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(_Response, frozen=True, kw_only=True):
    object: str = "text_completion"
    choices: list[CompletionChoice] | msgspec.Raw


class ChatResponse(_Response, frozen=True, kw_only=True):
    object: str = "chat.completion"
    choices: list[ChatChoice] | msgspec.Raw
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(_Response, frozen=True, kw_only=True):
    object: str = "chat.completion.chunk"
    choices: list[ChunkChoice]
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
