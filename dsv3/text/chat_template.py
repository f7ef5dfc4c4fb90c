"""Renders chat templates: a model's jinja template makes a prompt of messages, in jinja2's immutable sandbox.

The sandbox keeps a template from reaching Python; it does not limit time or memory. Servers therefore render in a
process that can be killed (`dsv3.server.templates`), which calls this module.
"""

import datetime
import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from dsv3.text import typescript_tools
from dsv3.text.dialects import Dialect
from dsv3.text.special_tokens import SpecialTokens, has_nul

Message = Mapping[str, Any]

# Variables that a client may set with `chat_template_kwargs`; any other could override those set here.
ALLOWED_KWARGS = frozenset({"thinking", "enable_thinking", "thinking_budget", "reasoning_effort", "date_string"})
_MAX_ERROR_CHARS = 200
_ERRORS = (
    jinja2.TemplateError,
    *(TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError),
)


class TemplateError(ValueError):
    """The template is invalid, or refuses or cannot render these messages."""


class ChatTemplate:
    """A compiled chat template with the special tokens that it may use (`bos_token`, `eos_token` ...).

    With `markers`, prompts have the template's own special tokens in their hidden form, and NUL is refused. Raises
    TemplateError for a template that does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], markers: SpecialTokens | None = None):
        self._special_tokens = {name: markers.hide(each) if markers else each for name, each in special_tokens.items()}
        self._hides = markers is not None
        self._declares_types = typescript_tools.VARIABLE in source
        self._has_tasks = "latest_reminder" in source
        environment = _environment()
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(markers.hide_in(parsed) if markers else parsed)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            raise TemplateError(f"the chat template does not compile: {_short(error)}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders the prompt of `messages`; it has all special tokens, so it is encoded without adding any.

        `response_format` is a JSON schema, which few templates show to the model. `continue_final_message` ends the
        prompt inside the last message, for the model to continue it. `kwargs` are the template's own variables;
        TemplateError for names outside `ALLOWED_KWARGS`.
        """
        refused = sorted(set(kwargs or {}) - ALLOWED_KWARGS)
        if refused:
            raise TemplateError(f"chat_template_kwargs: only {', '.join(sorted(ALLOWED_KWARGS))} may be set")
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt cannot be combined")
        if self._hides and any(map(has_nul, (messages, tools, response_format, kwargs))):
            raise TemplateError("messages, tools, response_format and chat_template_kwargs must not contain NUL")
        if not self._has_tasks:
            _refuse_tasks(messages)
        mark = f"<{secrets.token_hex(16)}>" if continue_final_message else ""
        variables = {
            **(kwargs or {}),
            **self._special_tokens,
            "messages": _with_end_mark(messages, mark) if mark else list(messages),
            **self._tool_variables(tools),
            "response_format": response_format,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        return _cut(self._render(variables), mark)

    def _tool_variables(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """Returns the variables for tools: JSON values, and TypeScript declarations where the template uses them."""
        if not tools or not self._declares_types:
            return {"tools": list(tools) if tools else None}
        ordered = typescript_tools.sort_keys(tools)
        return {"tools": ordered, typescript_tools.VARIABLE: typescript_tools.declare_tools(ordered)}

    def _render(self, variables: dict[str, Any]) -> str:
        """Renders; a TemplateError names the message that the template read last."""
        try:
            return self._template.render(variables)
        except _ERRORS:
            pass
        last: list[int] = []
        try:
            return self._template.render(
                variables
                | {"messages": [_TrackedMessage(each, i, last) for i, each in enumerate(variables["messages"])]}
            )
        except _ERRORS as error:
            where = f"messages[{last[-1]}]" if last else "these messages"
            if isinstance(error, jinja2.TemplateError):
                raise TemplateError(f"the chat template refuses {where}: {_short(error)}") from None
            # Texts of other errors may contain what a client has sent.
            what = f": {_short(error)}" if isinstance(error, TypeError) else ""
            raise TemplateError(f"the chat template cannot render {where} ({type(error).__name__}{what})") from None


class _TrackedMessage(dict[str, Any]):
    """A message that records its index in `last` when a template reads a field of it."""

    def __init__(self, message: Message, index: int, last: list[int]):
        super().__init__(message)
        self._index, self._last = index, last

    def __getitem__(self, key: str) -> Any:
        self._last[:] = [self._index]
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._last[:] = [self._index]
        return super().get(key, default)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Returns the environment Hugging Face templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.filters["arguments_object"] = _arguments_object
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Returns JSON; jinja2's own filter would escape characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _arguments_object(arguments: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments of a call as an object; any text but a JSON object is its only argument."""
    if isinstance(arguments, Mapping):
        return arguments
    found = _object(arguments)
    return {"arguments": arguments} if found is None else found


def _object(text: str) -> dict[str, Any] | None:
    """Returns the JSON object in a text, an empty one for a blank text, None for any other text."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_tasks(messages: Sequence[Message]) -> None:
    """Raises TemplateError for a message of a kind that most templates would drop without a word."""
    for i, message in enumerate(messages):
        if message.get("role") == "latest_reminder" or message.get("task") is not None:
            raise TemplateError(f"messages[{i}]: this model has neither latest_reminder nor task; DeepSeek-V4 has")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _with_end_mark(messages: Sequence[Message], mark: str) -> list[Message]:
    """Returns `messages` with a unique mark after the text of the last one, where the prompt is cut."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise TemplateError("continue_final_message: the last message must be the assistant's, with text")
    return [*messages[:-1], {**last, "content": last["content"] + mark}]


def _cut(prompt: str, mark: str) -> str:
    if not mark:
        return prompt
    text, found, _ = prompt.rpartition(mark)
    if not found:
        raise TemplateError("continue_final_message: the chat template drops the last message")
    return text


def _short(error: Exception) -> str:
    return str(error)[:_MAX_ERROR_CHARS]


_NAME, _PROBE = "probed_function", '{"probe": "1"}'


def with_tool_preamble(source: str, dialect: Dialect | None) -> str:
    """Returns a template that renders tools: with the dialect's preamble where it has one and the template does not."""
    return source if dialect is None or dialect.preamble is None or uses_tools(source) else dialect.preamble + source


def uses_tools(source: str) -> bool:
    """Returns whether a template uses the variable `tools`; without it the model would not see them."""
    try:
        return "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(source))
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError):
        return False


class ToolMessages:
    """Adapts messages with tool calls to one template."""

    def __init__(self, template: ChatTemplate):
        self._template = template

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages with results in the order of their calls, and arguments as the template expects them.

        An assistant's missing content becomes the value that the template treats as no text. Raises TemplateError where
        the template needs objects and arguments are not a JSON object.
        """
        if not any(message.get("tool_calls") for message in messages):
            return [_with_content(message, "") for message in messages]
        messages = [_with_content(message, self._no_text) for message in _order_results(messages)]
        if self._takes_argument_text:
            return messages
        return [_with_objects(message, i) for i, message in enumerate(messages)]

    @functools.cached_property
    def _no_text(self) -> str | None:
        """The content of a message that has calls and no text.

        An empty text, since many templates print null as "None"; DeepSeek's first templates need null, since they drop
        the calls of a message with any text.
        """
        with_text = [self._probe("", arguments) for arguments in (_PROBE, json.loads(_PROBE))]
        return "" if any(_NAME in prompt for prompt in with_text) else None

    @functools.cached_property
    def _takes_argument_text(self) -> bool:
        """Whether the template writes arguments as they are, or reads them itself (`arguments_object`).

        Most templates need an object, which they write as JSON. These would write a text as a JSON string, and the
        model would then call with quoted arguments.
        """
        prompt = self._probe(self._no_text, _PROBE)
        return _PROBE in prompt or (prompt != "" and prompt == self._probe(self._no_text, json.loads(_PROBE)))

    def _probe(self, content: str | None, arguments: object) -> str:
        """Returns the prompt of a conversation with a call; "" where the template refuses it."""
        call_id = f"functions.{_NAME}:0"
        call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        messages: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": call_id},
        ]
        try:
            return self._template.render(messages)
        except TemplateError:
            return ""


def _order_results(messages: Sequence[Message]) -> list[Message]:
    """Returns messages with the results up to the assistant's next message in the order of the calls.

    Most formats have no ids and match results by order. Results whose ids do not all belong to the calls stay as they
    are, and so do messages between them.
    """
    ordered = list(messages)
    at = 0
    while at < len(ordered):
        places = {call.get("id"): i for i, call in enumerate(ordered[at].get("tool_calls") or [])}
        at, found = at + 1, []
        while at < len(ordered) and ordered[at].get("role") != "assistant":
            if ordered[at].get("role") == "tool":
                found.append(at)
            at += 1
        results = [ordered[i] for i in found]
        ids = [result.get("tool_call_id") for result in results]
        if len(set(ids)) == len(ids) and all(each in places for each in ids):
            results.sort(key=lambda result: places[result.get("tool_call_id")])
            for i, result in zip(found, results, strict=True):
                ordered[i] = result
    return ordered


def _with_content(message: Message, nothing: str | None) -> Message:
    """Returns the message; content `nothing` replaces an assistant's missing content."""
    is_bare = message.get("role") == "assistant" and message.get("content") is None
    if not is_bare:
        return message
    return {**message, "content": nothing if message.get("tool_calls") else ""}


def _with_objects(message: Message, index: int) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_object(call, index) for call in calls]} if calls else message


def _with_object(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    function = call["function"]
    arguments = _object(function["arguments"])
    if arguments is None:
        raise TemplateError(f"messages[{index}]: the arguments of a tool call are not a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}
