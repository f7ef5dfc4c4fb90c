"""What a request says of its tools: which the model is shown, and which calls the client takes."""

import dataclasses
from typing import Any

import msgspec

from dsv3.server.answers.errors import invalid
from dsv3.server.answers.reading import invalid_field
from dsv3.server.answers.schema import ChatRequest, NamedTool, Tool
from dsv3.server.answers.service import Service
from dsv3.structured_outputs import MAX_DEPTH, is_deeper
from dsv3.text.call_grammar import CallRules, Function
from dsv3.text.parser import Tools


@dataclasses.dataclass(frozen=True)
class RequestTools:
    """`shown` is for the chat template; `wanted` is for the parser, None where the client takes no calls.

    `calls` are what the answer is held to, None where calls are as the model writes them.
    """

    shown: list[dict[str, Any]] | None = None
    wanted: Tools | None = None
    calls: CallRules | None = None


def read_tools(service: Service, request: ChatRequest) -> RequestTools:
    """Returns what a request says of its tools; raises ApiError.

    With `tool_choice` "none" the model is not shown any: it would try to call them.
    """
    if not request.tools:
        if request.tool_choice not in (None, "auto", "none"):
            raise invalid("tool_choice: there are no tools to choose from", "tool_choice")
        return RequestTools()
    tools = _checked(request.tools)
    if request.tool_choice == "none":
        return RequestTools()
    if service.config.parsers is None or service.config.parsers.dialect is None:
        why = "it is not known how this model writes tool calls; the server's --tool_call_parser can tell"
        raise invalid(f'tools: {why}, or send tool_choice "none"', "tools", "unsupported_parameter")
    if not service.config.shows_tools:
        raise invalid("tools: the chat template does not show them to the model", "tools", "unsupported_parameter")
    parameters = {tool.function.name: _strings(tool.function.parameters) for tool in tools}
    wanted = Tools(parameters, parallel=request.parallel_tool_calls is not False)
    return RequestTools(request.tools, wanted, _rules(request, tools, wanted.parallel))


def _rules(request: ChatRequest, tools: list[Tool], parallel: bool) -> CallRules | None:
    """Returns what calls are held to: where one is required or a tool is strict."""
    found = [tool.function for tool in tools]
    functions = [Function(each.name, each.parameters, bool(each.strict)) for each in found]
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        named = [function for function in functions if function.name == name]
        if not named:
            raise invalid("tool_choice: none of the tools has this name", "tool_choice")
        return CallRules(named[:1], required=True, parallel=False)
    required = request.tool_choice == "required"
    if required or any(function.strict for function in functions):
        return CallRules(functions, required, parallel)
    return None


def _checked(found: list[dict[str, Any]]) -> list[Tool]:
    if is_deeper(found, MAX_DEPTH):
        raise invalid(f"tools: nested deeper than {MAX_DEPTH}", "tools")
    try:
        return msgspec.convert(found, list[Tool])
    except msgspec.ValidationError as error:
        raise invalid_field(error, "tools", list[Tool]) from None


def _strings(schema: dict[str, Any] | None) -> dict[str, bool | None]:
    """Returns for each argument of a JSON schema whether it is a string, None where that is not plain."""
    properties = (schema or {}).get("properties")
    if not isinstance(properties, dict):
        return {}
    types = {name: each.get("type") if isinstance(each, dict) else None for name, each in properties.items()}
    return {name: kind == "string" if isinstance(kind, str) else None for name, kind in types.items()}
