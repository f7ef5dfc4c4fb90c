"""Parts that the chat templates of DeepSeek-V3.2 and V4 share: calls in DSML, tools and response formats.

The checkpoints have a Python encoder instead of a template. Its format is written here and in `dsv3.text.deepseek_v32`
and `deepseek_v4`; its texts are read from the encoder file (`dsv3.text.encoder_file`). Without the file, a request that
needs one of them is refused.
"""

import json
from collections.abc import Mapping

from dsv3.text.encoder_file import Constants, around_gap


def jinja_literal(value: str | Mapping[str, str]) -> str:
    """Returns a string, or a mapping of strings, as a jinja expression: jinja reads JSON's strings."""
    return json.dumps(value, ensure_ascii=False)


def need_text(what: str, file: str, name: str) -> str:
    """Returns the statement that refuses a request for `what`, whose text is the constant `name` of `file`."""
    remedy = f"copy {file} of the published checkpoint into the model directory and restart"
    return "{{- raise_exception(" + jinja_literal(f"{what}: there is no {name}; {remedy}") + ") -}}"


def refused_fields(constants: Constants, tools_name: str) -> list[str]:
    """Returns the fields of requests that `appended_macro` refuses, because the encoder has no text for them."""
    names = {"tools": tools_name, "response_format": "response_format_template"}
    return [field for field, name in names.items() if not isinstance(constants.get(name), str)]


def appended_macro(constants: Constants, file: str, tools_name: str) -> str:
    """Returns the macro `appended(shown, schema)`: what a system message says about tools and the response format.

    `shown` are tools in OpenAI's form or none, `schema` is a JSON schema or none. Raises EncoderFileError for texts
    without their gaps.
    """
    tools = around_gap(constants, tools_name, "tool_schemas")
    schema = around_gap(constants, "response_format_template", "schema")
    write_tools = need_text("tools", file, tools_name)
    if tools is not None:
        head, tail = map(jinja_literal, ("\n\n" + tools[0], tools[1]))
        each = r"{%- for tool in shown -%}{{- tool.function | tojson ~ ('' if loop.last else '\n') -}}{%- endfor -%}"
        write_tools = "{{- " + head + " -}}" + each + "{{- " + tail + " -}}"
    write_schema = need_text("response_format", file, "response_format_template")
    if schema is not None:
        head, tail = map(jinja_literal, ("\n\n" + schema[0], schema[1]))
        write_schema = "{{- " + head + " ~ (schema | tojson) ~ " + tail + " -}}"
    return (
        "{%- macro appended(shown, schema) -%}"
        "{%- if shown -%}" + write_tools + "{%- endif -%}"
        "{%- if schema -%}" + write_schema + "{%- endif -%}"
        "{%- endmacro -%}"
    )


def calls_macro(block: str, arguments: str) -> str:
    """Returns the macro `calls(message)`: an assistant's calls.

    `block` is the name of the tag around them, `arguments` the expression of an object with the arguments of `call`.
    """
    return _CALLS.replace("BLOCK", block).replace("ARGUMENTS", arguments)


# The string is raw: jinja turns \n into a line feed.
_CALLS = r"""
{%- macro calls(message) -%}
  {%- for call in message.tool_calls or [] -%}
    {{- '\n\n<｜DSML｜BLOCK>\n' if loop.first else '\n' -}}
    {{- '<｜DSML｜invoke name="' ~ call.function.name ~ '">\n' -}}
    {%- for key, value in (ARGUMENTS).items() -%}
      {{- '<｜DSML｜parameter name="' ~ key ~ '" string="' ~ ('true' if value is string else 'false') ~ '">' -}}
      {{- value if value is string else value | tojson -}}
      {{- '</｜DSML｜parameter>' ~ ('' if loop.last else '\n') -}}
    {%- endfor -%}
    {{- '\n</｜DSML｜invoke>' -}}
    {{- '\n</｜DSML｜BLOCK>' if loop.last -}}
  {%- endfor -%}
{%- endmacro -%}
"""
