"""`POST /v1/responses`, OpenAI's Responses API: requests and answers in items. Nothing is stored."""

import itertools
from typing import Any

import msgspec

from dsv3.server.protocol import responses as schema
from dsv3.server.protocol.errors import ApiError, invalid
from dsv3.server.protocol.openai import CalledFunction, ChatMessage, ChatRequest, ToolCall
from dsv3.server.protocol.responses import (
    InputItem,
    InputPart,
    Item,
    Part,
    Response,
    ResponsesRequest,
    Status,
)
from dsv3.server.serving.conversation import ConversationHandler, Section, SectionChange, chat_request, text_parts
from dsv3.server.serving.generation import ChoiceUpdate
from dsv3.server.serving.handler import to_event

_NEEDED = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments")}
_NEEDED |= {"function_call_output": ("call_id", "output")}


def parse_messages(request: ResponsesRequest) -> list[ChatMessage]:
    """Returns the chat messages, the instructions first; raises ApiError for an item that lacks a field of its type."""
    if request.input is None:
        raise invalid("input: this field is required", "input")
    messages = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return [*messages, ChatMessage(role="user", content=request.input)]
    for i, item in enumerate(request.input):
        for name in _NEEDED.get(item.type, ()):
            if getattr(item, name) is None:
                raise invalid(f"input[{i}].{name}: this field is required", "input")
        _add_item(item, messages)
    return messages


def _add_item(item: InputItem, messages: list[ChatMessage]) -> None:
    """Appends an item to the chat messages."""
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
            turn, call = (
                _turn(messages),
                ToolCall(CalledFunction(item.name or "", item.arguments or ""), item.call_id, "function"),
            )
            turn.tool_calls = [*(turn.tool_calls or []), call]
        case "function_call_output":
            messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=_content(item.output)))


def _turn(messages: list[ChatMessage]) -> ChatMessage:
    """Returns the assistant's message that the next item belongs to; appends a new one after any other role."""
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant", content=""))
    return messages[-1]


def _thinking(item: InputItem) -> ChatMessage:
    parts: Any = item.content or item.summary or []
    text = parts if isinstance(parts, str) else "".join(part.text or "" for part in parts)
    return ChatMessage(role="assistant", content="", reasoning_content=text or msgspec.UNSET)


def _content(found: str | list[InputPart] | None) -> Any:
    if isinstance(found, list):
        return text_parts([part.text or part.refusal or "" for part in found])
    return found or ""


_SAME_NAME = (
    *("model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "stream", "parallel_tool_calls", "cache_salt", "chat_template_kwargs"),
)
_STATELESS = "this server stores no responses; send the whole conversation as input"
REFUSED: dict[str, str] = {
    "store": "this server stores no responses; send false or leave it out",
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "background": "this server answers at once; send false or leave it out",
    "prompt": "this server stores no prompts; send instructions and input",
    "top_logprobs": "log-probabilities are available at /v1/chat/completions",
    "resume": "this API's events have no token ids; send the request to /v1/chat/completions",
}
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
INCLUDED = "reasoning.encrypted_content"


class ResponsesHandler(ConversationHandler[ResponsesRequest]):
    """Handles a `ResponsesRequest`."""

    id_prefix = "resp_"
    vendor_type = ResponsesRequest
    names = _NAMES

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._numbers = itertools.count()

    def to_chat_request(self, request: ResponsesRequest) -> ChatRequest:
        _refuse(request)
        text, reasoning = (
            request.text or schema.TextOptions(),
            request.reasoning or schema.ReasoningOptions(),
        )
        fields = {name: getattr(request, name) for name in _SAME_NAME} | {
            "max_tokens": request.max_output_tokens,
            "tools": [_tool(tool) for tool in request.tools] if request.tools else None,
            "tool_choice": _tool_choice(request.tool_choice),
            "reasoning_effort": reasoning.effort,
            "response_format": None if text.format is None else _response_format(text.format),
        }
        chat = chat_request(fields, parse_messages(request))
        request.input = None  # frees the second copy
        return chat

    def complete(self, last: ChoiceUpdate) -> Response:
        fields: dict[str, Any] = {"weight_version": last.weight_version or msgspec.UNSET}
        if last.finish_reason != "length":
            return self._response("completed", **fields)
        details = schema.IncompleteDetails("max_output_tokens")
        return self._response("incomplete", incomplete_details=details, **fields)

    def opening_events(self) -> list[bytes]:
        response = self._response("in_progress")
        return [self._event(name, response=response) for name in ("response.created", "response.in_progress")]

    def change_events(self, change: SectionChange) -> list[bytes]:
        section = change.section
        match change.what:
            case "opened":
                return self._opened(section)
            case "grown":
                rest: dict[str, Any] = {"logprobs": []} if section.kind == "text" else {}
                name = f"response.{_STREAMED[section.kind]}.delta"
                return [self._event(name, **self._place(section), delta=change.text, **rest)]
            case "closed":
                return self._closed(section)

    def closing_events(self, last: ChoiceUpdate) -> list[bytes]:
        response = self.complete(last)
        return [self._event(f"response.{response.status}", response=response)]

    def failure(self, error: ApiError) -> bytes:
        failed = schema.ResponseError(error.body.code or "server_error", error.body.message)
        return self._event("response.failed", response=self._response("failed", error=failed))

    def _opened(self, section: Section) -> list[bytes]:
        item = self._item(section, "in_progress")
        events = [self._event("response.output_item.added", output_index=section.index, item=item)]
        if section.kind != "call":
            place = self._place(section)
            events.append(self._event("response.content_part.added", **place, part=_part(section, "")))
        return events

    def _closed(self, section: Section) -> list[bytes]:
        """Returns the events that end the text, its part and the item."""
        place, text, done = self._place(section), section.text, f"response.{_STREAMED[section.kind]}.done"
        if section.call is not None:
            events = [self._event(done, **place, name=section.call.name, arguments=text)]
        else:
            rest: dict[str, Any] = {"logprobs": []} if section.kind == "text" else {}
            events = [
                self._event(done, **place, text=text, **rest),
                self._event("response.content_part.done", **place, part=_part(section, text)),
            ]
        item = self._item(section, "completed")
        return [*events, self._event("response.output_item.done", output_index=section.index, item=item)]

    def _event(self, name: str, /, **fields: object) -> bytes:
        """Returns the lines of an event; its type is its name."""
        return to_event({"type": name, "sequence_number": next(self._numbers), **fields}, name)

    def _place(self, section: Section) -> dict[str, Any]:
        place = {"item_id": self._item_id(section), "output_index": section.index}
        return place if section.call is not None else place | {"content_index": 0}

    def _item_id(self, section: Section) -> str:
        return f"{_PREFIXES[section.kind]}_{self.generation.id}{section.index:x}"

    def _item(self, section: Section, status: Status) -> Item:
        """Returns a section as an item; it is empty while in progress."""
        item_id, is_empty = self._item_id(section), status == "in_progress"
        if section.call is not None:
            call, text = section.call, "" if is_empty else section.text
            return schema.CallItem(id=item_id, status=status, call_id=call.id, name=call.name, arguments=text)
        kind: Any = schema.MessageItem if section.kind == "text" else schema.ReasoningItem
        return kind(id=item_id, status=status, content=[] if is_empty else [_part(section, section.text)])

    def _items(self, status: Status) -> list[Item]:
        """Returns all items; the last one of a response that is not completed is incomplete."""
        last: Status = "completed" if status == "completed" else "incomplete"
        sections = [] if status == "in_progress" else self.sections.all
        return [self._item(section, "completed" if section is not sections[-1] else last) for section in sections]

    def _response(self, status: Status, **fields: Any) -> Response:
        request = self.vendor_request
        return Response(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.model,
            output=self._items(status),
            usage=None if status == "in_progress" else self._usage(),
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            temperature=request.temperature,
            top_p=request.top_p,
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            reasoning=request.reasoning or schema.ReasoningOptions(),
            text=request.text or schema.TextOptions(format=schema.TextFormat(type="text")),
            user=request.user,
            **fields,
        )

    def _usage(self) -> schema.ResponseUsage:
        usage = self.usage
        return schema.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=usage.prompt_tokens_details,
            output_tokens=usage.completion_tokens,
            output_tokens_details=usage.completion_tokens_details,
            total_tokens=usage.total_tokens,
            timing=usage.timing,
        )


_STREAMED = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


def _part(section: Section, text: str) -> Part:
    return schema.OutputText(text) if section.kind == "text" else schema.ReasoningText(text)


def _refuse(request: ResponsesRequest) -> None:
    """Raises ApiError for fields that need stored responses or that this API does not support."""
    for name, why in REFUSED.items():
        if getattr(request, name):
            raise invalid(f"{name}: {why}", name, "unsupported_parameter")
    if request.truncation == "auto":
        raise invalid("truncation: prompts are never truncated", "truncation", "unsupported_parameter")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise invalid("text.verbosity: only medium is supported", "text", "unsupported_parameter")
    if any(each != INCLUDED for each in request.include or ()):
        raise invalid(f"include: only {INCLUDED} is known", "include", "unsupported_parameter")


def _tool(tool: schema.ResponsesFunction) -> dict[str, Any]:
    fields = msgspec.structs.asdict(tool)
    del fields["type"]
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _tool_choice(choice: str | schema.ResponsesNamedFunction | None) -> str | dict[str, Any] | None:
    if isinstance(choice, schema.ResponsesNamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _response_format(form: schema.TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    fields = {"name": form.name, "description": form.description, "schema": form.schema, "strict": form.strict}
    return {"type": form.type, "json_schema": {name: value for name, value in fields.items() if value is not None}}
