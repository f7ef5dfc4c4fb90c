"""Tools as TypeScript: declarations written by hand from the format, and what a template renders."""

import json
from typing import Any

import pytest

from dsv3.text.chat_template import ChatTemplate
from dsv3.text.special_tokens import SpecialTokens
from dsv3.text.typescript_tools import declare_tools

TEMPLATE = (
    "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>"
    "{%- if tools_ts_str -%}{{ tools_ts_str }}{%- else -%}{{ tools | tojson(separators=(',', ':')) }}{%- endif -%}"
    "<|im_end|>{%- endif -%}{%- for message in messages -%}{{ message.content }}{%- endfor -%}"
)


def tool(parameters: Any = None, **function: Any) -> dict[str, Any]:
    function = {"name": "look", **function} | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": function}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def body(*tools: dict[str, Any]) -> str:
    """The declarations without the lines around them."""
    text = declare_tools(tools)
    assert text is not None
    before, after = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(before) and text.endswith(after)
    return text[len(before) : -len(after)]


def test_required_fields_come_first_with_their_comments() -> None:
    schema = of(
        unit={"enum": ["c", "f", 1], "default": "c", "description": "Which."},
        b={"type": "boolean"},
        city={"type": "string", "minLength": 1, "maxLength": 9, "description": "A city\n\nby name"},
        days={"type": "integer", "minimum": 1},
    )
    assert body(tool(schema | {"required": ["days", "city"]}, description="Looks.")) == (
        "// Looks.\n"
        "type look = (_: {\n"
        "  // A city\n"
        "\n"
        "  // by name\n"
        "  // maxLength: 9, minLength: 1\n"
        "  city: string,\n"
        "  // minimum: 1\n"
        "  days: number,\n"
        "  b?: boolean,\n"
        "  // Which.\n"
        '  // Default: "c"\n'
        '  unit?: "c" | "f" | 1\n'
        "}) => any;"
    )


def test_lists_objects_and_unions() -> None:
    schema = of(
        a={"type": "array", "items": {"type": "string"}, "minItems": 2},
        b={"type": "array", "items": {"type": "object", "description": "One", "properties": {"x": {"type": "null"}}}},
        c={"type": ["integer", "null", "array", "object"]},
        d={"anyOf": [{"type": "number", "minimum": 0}, {"type": "array"}]},
        e={"type": "object", "additionalProperties": {"type": "integer"}},
        f={},
        g=False,
    )
    assert body(tool(schema | {"additionalProperties": False})) == (
        "type look = (_: {\n"
        "  // minItems: 2\n"
        "  a?: Array<string>,\n"
        "  b?: Array<\n"
        "    // One\n"
        "    {\n"
        "      x?: null\n"
        "    }\n"
        "  >,\n"
        "  c?: number | null | Array<any> | {},\n"
        "  d?: number | Array<any>,\n"
        "  e?: {\n"
        "    [k: string]: number\n"
        "  },\n"
        "  f?: any,\n"
        "  g?: null,\n"
        "  [k: string]: never\n"
        "}) => any;"
    )


def test_definitions_and_references_to_itself() -> None:
    node = {"type": "object", "description": "A node", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    schema = of(first={"$ref": "#/$defs/Node"}) | {"$defs": {"Node": node}}
    assert body(tool(schema)) == (
        "// A node\ninterface Node {\n  next?: Node\n}\ntype look = (_: {\n  first?: Node\n}) => any;"
    )
    assert body(tool(of(again={"$ref": "#"}))) == (
        "interface parameters {\n  again?: parameters\n}\ntype look = (_: parameters) => any;"
    )


def test_several_tools_and_none() -> None:
    assert body(tool(), tool({"type": "object"}, name="other")) == (
        "type look = (_: {}) => any;\ntype other = (_: {}) => any;"
    )
    assert declare_tools([]) is None
    assert declare_tools([{"type": "plugin", "name": "x"}]) is None


@pytest.mark.parametrize(
    "schema",
    [
        of(a={"description": "of no type"}),
        of(a={"$ref": "#/$defs/Missing"}),
        of(a={"$ref": "https://elsewhere"}),
        of(a={"type": ["unknown"]}),
        of(a=5),
        {"type": "object", "properties": [1]},
        {"type": "object", "$defs": 3},
    ],
)
def test_schemas_without_a_typescript_type_stay_json(schema: dict[str, Any]) -> None:
    assert declare_tools([tool(schema)]) is None
    text = ChatTemplate(TEMPLATE, {}).render([{"role": "user", "content": "x"}], tools=[tool(schema)])
    assert json.loads(text.split("<|im_middle|>")[1].removesuffix("<|im_end|>x")) == [tool(schema)]


def test_deeply_nested_schemas_stay_json() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(100_000):
        schema = {"type": "array", "items": schema}
    assert declare_tools([tool(of(a=schema))]) is None


def test_a_template_that_uses_types_gets_them_and_markers_stay_text() -> None:
    """A description that spells a special token has it as text: only the template's own are hidden."""
    tools = [tool(of(b={"type": "string"}, a={"type": "string"}), description="<|im_end|>")]
    hiding = ChatTemplate(TEMPLATE, {}, SpecialTokens(["<|im_system|>", "<|im_middle|>", "<|im_end|>"]))
    text = hiding.render([{"role": "user", "content": "x"}], tools=tools)
    assert "// <|im_end|>\ntype look = (_: {\n  a?: string,\n  b?: string\n}) => any;" in text
    assert text.count("<|im_end|>") == 1
    plain = ChatTemplate(TEMPLATE.replace("tools_ts_str", "other"), {}).render([], tools=tools)
    assert '"b":{"type":"string"},"a"' in plain, "another template gets tools as they came"
