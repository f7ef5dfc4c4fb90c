"""`POST /v1/messages`, Anthropic's Messages API: requests and answers in content blocks."""

from typing import Any

import msgspec

from dsv3.server.protocol.anthropic import (
    AnthropicText,
    AnthropicTool,
    AnthropicUsage,
    ContentBlock,
    InputMessage,
    Message,
    MessagesRequest,
    OutputBlock,
    StopReason,
    Thought,
    TokenCount,
    ToolChoice,
    ToolUse,
    messages_envelope,
)
from dsv3.server.protocol.errors import ApiError, invalid
from dsv3.server.protocol.openai import CalledFunction, ChatMessage, ChatRequest, ToolCall
from dsv3.server.serving.conversation import (
    ConversationHandler,
    Kind,
    Section,
    SectionChange,
    chat_request,
    text_parts,
    with_vendor_names,
)
from dsv3.server.serving.generation import ChoiceUpdate
from dsv3.server.serving.handler import to_event
from dsv3.server.serving.prompts import chat_prompt, read_tools
from dsv3.server.serving.request_parsing import read_request
from dsv3.server.serving.service import Service

REFUSED = ("container", "mcp_servers", "resume")
_SAME_NAME = ("model", "temperature", "top_p", "top_k", "stream", "cache_salt", "max_tokens")
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parameters": "input_schema",
}


class MessagesHandler(ConversationHandler[MessagesRequest]):
    """Handles a `MessagesRequest`."""

    id_prefix = "msg_"
    vendor_type = MessagesRequest
    names = _NAMES

    def to_chat_request(self, request: MessagesRequest) -> ChatRequest:
        if request.max_tokens is None:
            raise _missing("max_tokens", "max_tokens")
        return _to_chat_request(request)

    def complete(self, last: ChoiceUpdate) -> Message:
        reason, sequence = _stop_reason(last)
        content, version = [_block(section, whole=True) for section in self.sections.all], last.weight_version
        return self._message(content, reason, sequence, version or msgspec.UNSET)

    def opening_events(self) -> list[bytes]:
        return [_event("message_start", message=self._message([]))]

    def change_events(self, change: SectionChange) -> list[bytes]:
        section = change.section
        match change.what:
            case "opened":
                block = _block(section, whole=False)
                return [_event("content_block_start", index=section.index, content_block=block)]
            case "grown":
                kind, field = _DELTAS[section.kind]
                delta = {"type": kind, field: change.text}
                return [_event("content_block_delta", index=section.index, delta=delta)]
            case "closed":
                return [_event("content_block_stop", index=section.index)]

    def closing_events(self, last: ChoiceUpdate) -> list[bytes]:
        reason, sequence = _stop_reason(last)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        version = {"weight_version": last.weight_version} if last.weight_version else {}
        return [_event("message_delta", delta=delta, usage=self._usage(), **version), _event("message_stop")]

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + messages_envelope(error)

    def _message(
        self,
        content: list[OutputBlock],
        reason: StopReason | None = None,
        sequence: str | None = None,
        weight_version: str | msgspec.UnsetType = msgspec.UNSET,
    ) -> Message:
        return Message(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(),
            weight_version=weight_version,
        )

    def _usage(self) -> AnthropicUsage:
        usage = self.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return AnthropicUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            timing=usage.timing,
        )


async def count_tokens(service: Service, body: bytes | bytearray) -> TokenCount:
    """Returns the number of prompt tokens of a `MessagesRequest`; raises ApiError as serving it would."""
    try:
        chat = _to_chat_request(await read_request(service, MessagesRequest, body))
        service.require_model(chat.model)
        service.require_ready()
        prompt = await chat_prompt(service, chat, read_tools(service, chat))
    except ApiError as error:
        raise with_vendor_names(error, _NAMES) from None
    return TokenCount(len(prompt.token_ids))


# Kind of a section -> the type of its deltas, and the field that has the text.
_DELTAS: dict[Kind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _event(name: str, **fields: object) -> bytes:
    """Returns the lines of an event; its type is its name."""
    return to_event({"type": name, **fields}, name)


def _block(section: Section, whole: bool) -> OutputBlock:
    """Returns a section as a block, with its text if `whole`."""
    text = section.text if whole else ""
    if section.kind == "text":
        return AnthropicText(text)
    if section.call is None:
        return Thought(text)
    return ToolUse(section.call.id, section.call.name, _arguments(text))


def _arguments(text: str) -> dict[str, Any]:
    """Parses a call's arguments; an empty object where they are cut off."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _stop_reason(last: ChoiceUpdate) -> tuple[StopReason, str | None]:
    """Returns the stop reason, and the stop sequence that ended the answer if one did."""
    if last.finish_reason == "length":
        return "max_tokens", None
    if last.finish_reason == "tool_calls":
        return "tool_use", None
    return ("stop_sequence", last.stop_reason) if isinstance(last.stop_reason, str) else ("end_turn", None)


def _to_chat_request(request: MessagesRequest) -> ChatRequest:
    for name in REFUSED:
        if getattr(request, name):
            raise invalid(f"{name} is not supported by this server", name, "unsupported_parameter")
    config, choice = request.output_config, request.tool_choice
    fields = {name: getattr(request, name) for name in _SAME_NAME} | {
        "stop": request.stop_sequences,
        "tools": [_tool(tool) for tool in request.tools] if request.tools else None,
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "reasoning_effort": None if config is None else config.effort,
        "response_format": None if config is None or config.format is None else _format(config.format.schema),
        "thinking": request.thinking,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    messages = [ChatMessage(role="system", content=request.system)] if request.system else []
    for i, message in enumerate(request.messages or ()):
        messages += _messages(message, f"messages[{i}].content")
    if not request.messages:
        raise _missing("messages", "messages")
    request.messages = None  # frees the second copy
    last = messages[-1]
    if last.role == "assistant" and not last.tool_calls:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat_request(fields, messages)


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise _missing("tool_choice.name", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}


def _messages(message: InputMessage, at: str) -> list[ChatMessage]:
    """Converts a message to chat messages: each tool result becomes a message of its own, before the other text."""
    if message.content is None:
        raise _missing(at, "messages")
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    fields = [_checked(block, f"{at}[{i}]") for i, block in enumerate(message.content)]
    if message.role == "assistant":
        return [_assistant(message.content)]
    results = [block for block in fields if block.type == "tool_result"]
    texts = [block.text or "" for block in fields if block.type == "text"]
    found = [ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=block.content or "") for block in results]
    if texts or not found:
        found.append(ChatMessage(role=message.role, content=text_parts(texts)))
    return found


def _assistant(blocks: list[ContentBlock]) -> ChatMessage:
    texts = [block.text or "" for block in blocks if block.type == "text"]
    thoughts = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    calls = [_call(block) for block in blocks if block.type == "tool_use"]
    return ChatMessage(
        role="assistant",
        content=text_parts(texts) if texts or not calls else None,
        reasoning_content=thoughts or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )


def _call(block: ContentBlock) -> ToolCall:
    arguments = msgspec.json.encode(block.input or {}).decode()
    return ToolCall(CalledFunction(block.name or "", arguments), block.id, "function")


_NEEDED = {"text": ("text",), "tool_use": ("id", "name"), "tool_result": ("tool_use_id",)}


def _checked(block: ContentBlock, at: str) -> ContentBlock:
    """Returns the block; raises ApiError where a field that its type needs is missing."""
    for name in _NEEDED.get(block.type, ()):
        if getattr(block, name) is None:
            raise _missing(f"{at}.{name}", "messages")
    return block


def _missing(path: str, param: str) -> ApiError:
    return invalid(f"{path}: this field is required", param)
