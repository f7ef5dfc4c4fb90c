"""Tools as declarations of TypeScript, as Kimi-K2.5's own tokenizer code makes them for its chat template.

The template uses the variable `tools_ts_str` if it is set, and JSON otherwise. The model was trained with these texts,
so they stay as they are, to the character. A function becomes a type, and its parameters the fields of an object:
required ones first, each group by name, with descriptions and bounds as comments.

Source: tool_declaration_ts.py of the model's repository, as described by engines that serve it.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

VARIABLE = "tools_ts_str"

_INDENT = "  "
_BOUNDS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_OF_UNION = {
    **{name: name for name in ("string", "number", "boolean", "null")},
    **{"integer": "number", "object": "{}", "array": "Array<any>"},
}
_DEFINITIONS = "#/$defs/"


@dataclasses.dataclass
class _SchemaScope:
    """The definitions of one function's schema, and whether it refers to itself."""

    definitions: dict[str, Any] = dataclasses.field(default_factory=dict)
    refers_to_itself: bool = False


def sort_keys(value: Any) -> Any:
    """Returns a JSON value with sorted keys in all objects, as the model's code writes tools."""
    if isinstance(value, Mapping):
        return {key: sort_keys(value[key]) for key in sorted(value)}
    return [sort_keys(item) for item in value] if isinstance(value, list | tuple) else value


def declare_tools(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the declarations of `tools` in OpenAI's format; None where a schema has none in TypeScript."""
    try:
        functions = [tool["function"] for tool in sort_keys(tools) if tool.get("type") == "function"]
        declared = "\n".join(_function(function) for function in functions if function)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return f"# Tools\n\n## functions\nnamespace functions {{\n{declared}\n}}\n" if declared else None


def _function(function: Mapping[str, Any]) -> str:
    """Returns the type of a function, after the interfaces that it uses."""
    scope, schema = _SchemaScope(), function.get("parameters") or {}
    parameters, interfaces = _object(schema, "", scope), []
    if scope.refers_to_itself:
        fields = ",\n".join(_fields(schema, schema.get("properties", {}), _INDENT, scope))
        interfaces.append(f"interface parameters {{\n{fields}\n}}" if fields else "interface parameters {}")
        parameters = "parameters"
    for name, definition in list(scope.definitions.items()):
        comment = _comment(definition.get("description", ""), "")
        interfaces.append(f"{comment}interface {name} {_type(definition, '', scope)}")
    before = "".join(f"{each}\n" for each in interfaces) + _comment(function.get("description") or "", "")
    return f"{before}type {function.get('name', 'function')} = (_: {parameters}) => any;"


def _object(schema: Mapping[str, Any], indent: str, scope: _SchemaScope) -> str:
    """Returns the type of an object."""
    scope.definitions |= schema.get("$defs", {})
    required, properties = set(schema.get("required", [])), schema.get("properties", {})
    names = sorted(properties, key=lambda name: (name not in required, name))
    fields = list(_fields(schema, names, indent + _INDENT, scope))
    others = schema.get("additionalProperties")
    if others is not None:
        kind = {True: "any", False: "never"}[others] if isinstance(others, bool) else None
        fields.append(f"{indent}{_INDENT}[k: string]: {kind or _type(others, indent + _INDENT, scope)}")
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _fields(schema: Mapping[str, Any], names: Sequence[str], indent: str, scope: _SchemaScope) -> Iterator[str]:
    """Yields the fields of an object by name, each after its comments."""
    for name in names:
        field = schema["properties"][name]
        comments = _comments(field, indent)
        if isinstance(field, dict) and field.get("default") is not None:
            comments += f"{indent}// Default: {json.dumps(field['default'], ensure_ascii=False)}\n"
        optional = "" if name in schema.get("required", []) else "?"
        yield f"{comments}{indent}{name}{optional}: {_type(field, indent, scope)}"


def _type(schema: Any, indent: str, scope: _SchemaScope) -> str:
    """Returns the type of a schema; raises ValueError for an unknown kind."""
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if "$ref" in schema:
        return _reference(schema["$ref"], scope)
    if "anyOf" in schema:
        return " | ".join(_type(each, indent, scope) for each in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{each}"' if isinstance(each, str) else json.dumps(each) for each in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_OF_UNION[each] for each in kind)
    if kind == "object":
        return _object(schema, indent, scope)
    if kind == "array":
        return _array(schema, indent, scope)
    if kind is None and schema:
        raise ValueError(f"a schema has no type: {sorted(schema)}")
    return "any" if kind is None else "number" if kind == "integer" else str(kind)


def _array(schema: Mapping[str, Any], indent: str, scope: _SchemaScope) -> str:
    """Returns the type of a list; comments of its items are inside."""
    items = schema.get("items") or {}
    if comments := _comments(items, indent + _INDENT):
        return f"Array<\n{comments}{indent}{_INDENT}{_type(items, indent + _INDENT, scope)}\n{indent}>"
    return f"Array<{_type(items, indent, scope)}>"


def _reference(name: str, scope: _SchemaScope) -> str:
    """Resolves a reference to a type name."""
    if name == "#":
        scope.refers_to_itself = True
        return "parameters"
    short = name.rpartition("/")[2]
    if not name.startswith(_DEFINITIONS) or short not in scope.definitions:
        raise ValueError(f"there is no definition of {name}")
    return short


def _comments(schema: Any, indent: str) -> str:
    """Returns the comment lines of a field: its description, and its bounds by name."""
    if not isinstance(schema, dict):
        return ""
    kind = schema.get("type")
    known = _BOUNDS.get(kind, ()) if isinstance(kind, str) and not {"$ref", "anyOf", "enum"} & set(schema) else ()
    bounds = [f"{name}: {schema[name]}" for name in known if name in schema]
    return _comment(schema.get("description", ""), indent) + (f"{indent}// {', '.join(bounds)}\n" if bounds else "")


def _comment(text: str, indent: str) -> str:
    """Returns a text as comment lines; empty lines stay empty."""
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in text.split("\n")) if text else ""
