"""The prompt format of DeepSeek-V4 as a chat template; its long texts come from the encoder in the checkpoint.

A checkpoint has a Python encoder (`ENCODER_FILE`) instead of a template. The texts that introduce tools, a response
format and the reasoning effort are string constants of that file. It is parsed, and never run: a constant is a literal,
the name of an earlier constant, or a sum of these. Where the file is missing, the template refuses what needs a text.

Without tools, reasoning of earlier turns is dropped. A user's text and results of calls that follow each other are one
turn. `developer` is a user's turn, dropped with the reasoning; `latest_reminder` has a token of its own; a message's
`task` asks for a short answer to a task token.

Source: encoding/encoding_dsv4.py of the model's repository (MIT).
"""

import ast
import json
import logging
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dsv3.files import IS_POINTER, is_pointer, open_regular
from dsv3.text.deepseek_v32 import INVOKE_MACRO

_log = logging.getLogger(__name__)

ENCODER_FILE = "encoding/encoding_dsv4.py"
_MAX_BYTES, _MAX_TEXT = 2**20, 2**16
_LEVELS = ("low", "high", "max")


class EncoderFileError(ValueError):
    """The encoder file of a checkpoint cannot be read."""


class EncoderTexts(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of an encoder.

    `tools` and `response_format` are the parts before, between and after gaps for schemas; None without such a text.
    `efforts` maps "low", "high" and "max" to the text that begins a prompt, as far as they are known; `default_effort`
    is one of them.
    """

    tools: list[str] | None = None
    response_format: list[str] | None = None
    efforts: dict[str, str] = msgspec.field(default_factory=lambda: {"low": ""})
    default_effort: str = "low"


def read_encoder(path: Path) -> EncoderTexts:
    """Returns the texts of an encoder file.

    An encoder with `REASONING_EFFORT_PROMPTS` ("official") has a text for each effort; one with `REASONING_EFFORT_MAX`
    ("preview") has one for "max" alone. Raises EncoderFileError for a file that is not Python, or has a text with other
    gaps than one for schemas.
    """
    found = _constants(path)
    efforts, default = {"low": ""}, found.get("DEFAULT_REASONING_EFFORT") or "low"
    if isinstance(prompts := found.get("REASONING_EFFORT_PROMPTS"), dict):
        efforts |= {level: prompts[level] for level in _LEVELS if level in prompts}
    elif isinstance(text := found.get("REASONING_EFFORT_MAX"), str):
        efforts |= {"high": "", "max": text}
    if default not in list(efforts):
        raise EncoderFileError(f"{path}: DEFAULT_REASONING_EFFORT is {default!r}, and there is no text for it")
    return EncoderTexts(
        tools=_parts(path, found, "TOOLS_TEMPLATE"),
        response_format=_parts(path, found, "response_format_template"),
        efforts=efforts,
        default_effort=default,
    )


def _constants(path: Path) -> dict[str, Any]:
    """Returns the constants of a module: texts, and mappings of texts to texts. The last value of a name counts."""
    try:
        with open_regular(path) as file:
            source = file.read(_MAX_BYTES + 1)
        if len(source) > _MAX_BYTES:
            raise ValueError(f"longer than {_MAX_BYTES} bytes")
        if is_pointer(source):
            raise ValueError(IS_POINTER)
        statements = ast.parse(source).body
        found: dict[str, Any] = {}
        for statement in statements:
            if isinstance(statement, ast.Assign):
                targets, value = statement.targets, _value(statement.value, found)
            elif isinstance(statement, ast.AnnAssign):
                targets, value = [statement.target], _value(statement.value, found)
            else:
                continue
            found |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise EncoderFileError(f"{path}: cannot be read as Python: {error}") from None
    return found


def _value(node: ast.expr | None, known: Mapping[str, Any]) -> Any:
    """Returns the value of an expression: a text or a mapping of texts; None for any other expression."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.Name(id=name):
            return known.get(name)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = _value(left, known), _value(right, known)
            return _bounded("".join(parts)) if all(isinstance(part, str) for part in parts) else None
        case ast.Dict(keys=keys, values=values):
            pairs = [(_value(key, known), _value(value, known)) for key, value in zip(keys, values, strict=True)]
            return {key: value for key, value in pairs if isinstance(key, str) and isinstance(value, str)}
    return None


def _bounded(text: str) -> str:
    """Returns a text that is put together; raises ValueError for one that doubled too often."""
    if len(text) > _MAX_TEXT:
        raise ValueError(f"a text is longer than {_MAX_TEXT} characters")
    return text


def _parts(path: Path, found: Mapping[str, Any], name: str) -> list[str] | None:
    """Returns the parts around the gap of a text; other {fields} are names of constants. None without the text."""
    if not isinstance(text := found.get(name), str):
        return None
    parts, gaps = [""], set()
    try:
        for literal, field, *_ in string.Formatter().parse(text):
            parts[-1] += literal
            if field is None:
                continue
            if isinstance(constant := found.get(field), str):
                parts[-1] = _bounded(parts[-1] + constant)
            else:
                parts.append("")
                gaps.add(field)
    except ValueError as error:
        raise EncoderFileError(f"{path}: {name}: {error}") from None
    if len(gaps) != 1:
        raise EncoderFileError(f"{path}: {name} has gaps for {sorted(gaps)}, not one for schemas")
    return parts


def chat_template(directory: Path) -> str:
    """Returns the chat template of a checkpoint directory.

    Raises EncoderFileError for an encoder file that cannot be read.
    """
    path = directory / ENCODER_FILE
    if not path.is_file():
        _log.warning("%s is missing: requests that need its texts (tools, schemas, efforts) will be refused", path)
        return write_template(EncoderTexts())
    return write_template(read_encoder(path))


def write_template(texts: EncoderTexts) -> str:
    """Returns the chat template with the texts of an encoder."""
    assigned = {"encoder": msgspec.to_builtins(texts), "encoder_file": ENCODER_FILE}
    literals = [f"{{%- set {name} = {_literal(value)} -%}}\n" for name, value in assigned.items()]
    return "".join(literals) + INVOKE_MACRO + _TEMPLATE


def _literal(value: Any) -> str:
    """Returns a literal of jinja."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


# The string is raw: jinja turns \n into a line feed.
_TEMPLATE = r"""
{%- set tasks = {'action': '<｜action｜>', 'query': '<｜query｜>', 'authority': '<｜authority｜>',
                 'domain': '<｜domain｜>', 'title': '<｜title｜>', 'read_url': '<｜read_url｜>'} -%}
{%- set levels = {'none': 'low', 'low': 'low', 'medium': 'high', 'high': 'high', 'xhigh': 'high', 'max': 'max'} -%}
{%- set effort = reasoning_effort if reasoning_effort is defined else none -%}
{%- if effort is not none and effort not in levels -%}
  {{- raise_exception('reasoning_effort is ' ~ effort ~ ', and may be ' ~ levels | join(', ')) -}}
{%- endif -%}
{%- if thinking is defined and thinking is not none -%}{%- set asked = thinking -%}
{%- elif enable_thinking is defined and enable_thinking is not none -%}{%- set asked = enable_thinking -%}
{%- else -%}{%- set asked = effort is not none -%}{%- endif -%}
{%- set thinks = asked and effort != 'none' -%}
{%- set drops = thinks and not tools -%}
{%- macro require(text, what) -%}
  {%- if text is none -%}
    {{- raise_exception(what ~ ': needs a text of ' ~ encoder_file ~ ', which is missing; copy that file of the '
                        ~ 'checkpoint into the model\'s directory') -}}
  {%- endif -%}
{%- endmacro -%}
{%- set level = levels[effort] if effort is not none else encoder.default_effort -%}
{%- if thinks -%}{{- require(encoder.efforts.get(level), 'reasoning_effort ' ~ effort) -}}{%- endif -%}
{%- if tools -%}{{- require(encoder.tools, 'tools') -}}{%- endif -%}
{%- if response_format -%}{{- require(encoder.response_format, 'response_format') -}}{%- endif -%}
{%- set ns = namespace(last_user=-1, role='', index=-1, task=none) -%}
{%- for message in messages -%}
  {%- if message.role in ['user', 'developer', 'tool'] -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- macro schemas() -%}
  {%- if tools -%}
    {{- '\n\n' ~ encoder.tools | join(tools | map(attribute='function') | map('tojson') | join('\n')) -}}
  {%- endif -%}
  {%- if response_format -%}
    {{- '\n\n' ~ encoder.response_format | join(response_format | tojson) -}}
  {%- endif -%}
{%- endmacro -%}
{%- macro think(is_open) -%}{{- '<think>' if is_open else '</think>' -}}{%- endmacro -%}
{%- macro begin_answer() -%}
  {%- if ns.task == 'action' -%}{{- '<｜Assistant｜>' ~ think(thinks) ~ tasks[ns.task] -}}
  {%- elif ns.task in tasks -%}{{- tasks[ns.task] -}}
  {%- elif ns.task is not none -%}
    {{- raise_exception('task is ' ~ ns.task ~ ', and may be ' ~ tasks | join(', ')) -}}
  {%- elif ns.role in ['user', 'developer', 'tool'] -%}
    {{- '<｜Assistant｜>' ~ think(thinks and not (drops and ns.index < ns.last_user)) -}}
  {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if thinks -%}{{- encoder.efforts[level] -}}{%- endif -%}
{%- if not messages or messages[0].role not in ['system', 'developer'] or (
       messages[0].role == 'developer' and drops and ns.last_user > 0) -%}
  {{- schemas() -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if not (drops and message.role == 'developer' and loop.index0 < ns.last_user) -%}
    {%- if message.role in ['assistant', 'latest_reminder'] -%}{{- begin_answer() -}}{%- endif -%}
    {%- set continues = not loop.first and message.role in ['user', 'tool'] and loop.previtem.role in ['user', 'tool']
                        and (message.role == 'tool' or not loop.previtem.task) -%}
    {%- if message.role == 'system' -%}
      {{- message.content ~ (schemas() if loop.first else '') -}}
    {%- elif message.role == 'developer' -%}
      {{- '<｜User｜>' ~ message.content ~ (schemas() if loop.first else '') -}}
    {%- elif message.role == 'latest_reminder' -%}
      {{- '<｜latest_reminder｜>' ~ message.content -}}
    {%- elif message.role in ['user', 'tool'] -%}
      {{- '\n\n' if continues else '<｜User｜>' -}}
      {{- message.content if message.role == 'user' else '<tool_result>' ~ message.content ~ '</tool_result>' -}}
    {%- elif message.role == 'assistant' -%}
      {%- if thinks and ns.task is none and (not drops or loop.index0 > ns.last_user) -%}
        {{- (message.reasoning_content or '') ~ '</think>' -}}
      {%- endif -%}
      {{- message.content or '' -}}
      {%- for call in message.tool_calls or [] -%}
        {%- set given = call.function.arguments -%}
        {{- '\n\n<｜DSML｜tool_calls>\n' if loop.first else '\n' -}}
        {{- invoke(call.function.name, {'arguments': given} if given is string else given) -}}
        {{- '\n</｜DSML｜tool_calls>' if loop.last -}}
      {%- endfor -%}
      {{- eos_token -}}
    {%- else -%}
      {{- raise_exception('unknown role ' ~ message.role) -}}
    {%- endif -%}
    {%- if not (continues and message.role == 'tool') -%}{%- set ns.task = message.task or none -%}{%- endif -%}
    {%- set ns.role, ns.index = message.role, loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- begin_answer() -}}{%- endif -%}
"""
