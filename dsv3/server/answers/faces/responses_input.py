"""Reads the input of the Responses API as the messages of a chat.

Reasoning, text and calls of one turn are items of their own there, and one message of the assistant in a chat.
"""

from typing import Any

import msgspec

from dsv3.server.answers.errors import invalid
from dsv3.server.answers.faces.face import text_parts
from dsv3.server.answers.faces.responses_schema import InputItem, InputPart, ResponsesRequest
from dsv3.server.answers.schema import CalledFunction, ChatMessage, ToolCall

_NEEDED = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments")}
_NEEDED |= {"function_call_output": ("call_id", "output")}


def messages_of(asked: ResponsesRequest) -> list[ChatMessage]:
    """Returns the conversation, the instructions first; raises ApiError for an item without what its type needs."""
    if asked.input is None:
        raise invalid("input: this field is required", "input")
    messages = [ChatMessage(role="system", content=asked.instructions)] if asked.instructions else []
    if isinstance(asked.input, str):
        return [*messages, ChatMessage(role="user", content=asked.input)]
    for i, item in enumerate(asked.input):
        for name in _NEEDED.get(item.type, ()):
            if getattr(item, name) is None:
                raise invalid(f"input[{i}].{name}: this field is required", "input")
        _take(item, messages)
    return messages


def _take(item: InputItem, messages: list[ChatMessage]) -> None:
    """Adds an item to the conversation."""
    match item.type:
        case "message" if item.role != "assistant":
            messages.append(ChatMessage(role=item.role or "user", content=_content(item.content)))
        case "message":
            turn = _turn(messages)
            if turn.content or turn.tool_calls:
                messages.append(turn := ChatMessage(role="assistant"))
            turn.content = _content(item.content)
        case "reasoning":
            messages.append(_thinking(item))
        case "function_call":
            turn, call = _turn(messages), ToolCall(_function(item), item.call_id, "function")
            turn.tool_calls = [*(turn.tool_calls or []), call]
        case "function_call_output":
            messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=_content(item.output)))


def _turn(messages: list[ChatMessage]) -> ChatMessage:
    """Returns the assistant's message that the next item belongs to, a new one behind anything else."""
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant", content=""))
    return messages[-1]


def _thinking(item: InputItem) -> ChatMessage:
    parts: Any = item.content or item.summary or []
    text = parts if isinstance(parts, str) else "".join(part.text or "" for part in parts)
    return ChatMessage(role="assistant", content="", reasoning_content=text or msgspec.UNSET)


def _function(item: InputItem) -> CalledFunction:
    return CalledFunction(item.name or "", item.arguments or "")


def _content(found: str | list[InputPart] | None) -> Any:
    if isinstance(found, list):
        return text_parts([part.text or part.refusal or "" for part in found])
    return found or ""
