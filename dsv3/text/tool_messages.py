"""Makes chat templates and conversations with tool calls fit each other: templates differ in what they expect."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from dsv3.text.chat_template import ChatTemplate, Message, TemplateError
from dsv3.text.dialects import Dialect

_NAME, _PROBE = "probed_function", '{"probe": "1"}'


def telling_tools(source: str, dialect: Dialect | None) -> str:
    """Returns a chat template that tells the model its tools, if the dialect has words for it; else as it is."""
    return source if dialect is None or dialect.preamble is None or names_tools(source) else dialect.preamble + source


def names_tools(source: str) -> bool:
    """Returns whether a template uses the variable `tools`; one that does not would keep them from the model."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError):
        return False


class ToolMessages:
    """Prepares the messages for one template."""

    def __init__(self, template: ChatTemplate):
        self._template = template

    def prepared(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages with results in the order of their calls, and arguments as the template expects them.

        An assistant's content that is null or absent becomes what the template takes for no text. Raises TemplateError
        where the template takes objects and arguments are not JSON of one.
        """
        if not any(message.get("tool_calls") for message in messages):
            return [_with_content(message, "") for message in messages]
        messages = [_with_content(message, self._no_text) for message in _in_order(messages)]
        return messages if self._takes_text else [_with_objects(message, i) for i, message in enumerate(messages)]

    @functools.cached_property
    def _no_text(self) -> str | None:
        """What stands for no text beside calls.

        It is an empty text, since many templates print null as "None"; but DeepSeek's first ones drop the calls of a
        message that has any text.
        """
        with_text = [self._probed("", arguments) for arguments in (_PROBE, json.loads(_PROBE))]
        return "" if any(_NAME in prompt for prompt in with_text) else None

    @functools.cached_property
    def _takes_text(self) -> bool:
        """Whether the template writes arguments as they are; most others want an object, and write it as JSON.

        Text would become a string in JSON there: a model then calls with arguments in quotes.
        """
        return _PROBE in self._probed(self._no_text, _PROBE)

    def _probed(self, content: str | None, arguments: object) -> str:
        """Returns the prompt of a conversation with a call, "" where the template refuses it."""
        place = f"functions.{_NAME}:0"
        call = {"id": place, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        messages: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": place},
        ]
        try:
            return self._template.render(messages)
        except TemplateError:
            return ""


def _in_order(messages: Sequence[Message]) -> list[Message]:
    """Returns messages with the results behind each message of calls in the order of these.

    Most formats have no ids, and match results by their order. Results whose ids do not all belong to the calls stay as
    they are.
    """
    ordered: list[Message] = []
    at = 0
    while at < len(messages):
        ordered.append(messages[at])
        places = {call.get("id"): i for i, call in enumerate(messages[at].get("tool_calls") or [])}
        at += 1
        results = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        ids = [result.get("tool_call_id") for result in results]
        if len(set(ids)) == len(ids) and all(each in places for each in ids):
            results.sort(key=lambda result: places[result.get("tool_call_id")])
        ordered += results
    return ordered


def _with_content(message: Message, nothing: str | None) -> Message:
    """Returns a message; one of the assistant with `nothing` where it has no content."""
    is_bare = message.get("role") == "assistant" and message.get("content") is None
    if not is_bare:
        return message
    return {**message, "content": nothing if message.get("tool_calls") else ""}


def _with_objects(message: Message, place: int) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_object(call, place) for call in calls]} if calls else message


def _with_object(call: Mapping[str, Any], place: int) -> dict[str, Any]:
    function = call["function"]
    text = function["arguments"]
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise TemplateError(f"messages[{place}]: the arguments of a tool call are not a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}
