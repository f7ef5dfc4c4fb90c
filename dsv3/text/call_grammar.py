"""Writes the grammar of tool calls in a model's own dialect, with the schemas of the tools in it.

Models are trained on one way to write calls; held to another they call worse. A call is spelled as the dialect's
`CallForm` says. Markers that are tokens are named by id. Arguments are JSON, or, where the dialect writes them one by
one, each is spelled by itself, in the order of the schema.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance
import msgspec

from dsv3.sampling_params import StructuredOutputsParams
from dsv3.text.dialects import Dialect
from dsv3.text.grammar import (
    Grammar,
    ReasoningSpan,
    after_reasoning,
    assembled,
    body_of,
    escaped,
    literal,
    schema_entry,
    symbol,
    unanchored,
)
from dsv3.text.parser import MAX_CALLS

_GAPS = re.compile(r"\{(name|number|arguments|key|value)\}")
# What in a schema may concern arguments that its properties do not list.
_SAYS_OF_OTHERS = frozenset(
    ["additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"]
)
# What may stand beside "type": "string" in a schema whose text needs no quotes.
_SAYS_NOTHING = frozenset(["type", "title", "description", "default", "examples", "deprecated", "$comment"])


class CallableFunction(msgspec.Struct, frozen=True):
    """A function that may be called. Where it is not `strict`, keywords that cannot be enforced are passed over."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool


class CallRules(msgspec.Struct, frozen=True):
    """Which calls an answer may make: of some functions, at least one if `required`, several if `parallel`."""

    functions: Sequence[CallableFunction]
    required: bool
    parallel: bool


class CallGrammar:
    """The rules of calls; `rules` are Lark's, `entries` the schemas that they refer to.

    The rule `calls` is the whole block, and `text_or_calls` free text in front of it, or without it. Raises ValueError
    for parameters that the dialect cannot be held to.
    """

    def __init__(self, dialect: Dialect, rules: CallRules, id_of: Callable[[str], int | None]):
        self._dialect, self._form, self._id_of = dialect, dialect.form, id_of
        self.rules: list[str] = []
        self.entries: list[Grammar] = []
        names = [self._function(i, each) for i, each in enumerate(rules.functions)]
        more = f" ({self._spelled(self._form.between)} call){{0,{MAX_CALLS - 1}}}" if rules.parallel else ""
        self.rules += [
            f"calls: {self._spelled(self._form.before)} block",
            f"block: call{more} {self._spelled(self._form.after)}",
            f"call: {' | '.join(names)}",
            "NUMBER: /[0-9]{1,4}/",
            *self._text_or_calls(),
        ]

    def _text_or_calls(self) -> list[str]:
        """Returns the rules of text in front of calls; where their marker is no token, text ends as soon as it came."""
        head, bracket, tail = self._form.before.partition(">")
        trigger = (head + bracket).lstrip("\n")
        if self._id_of(trigger) is not None:
            return ["text_or_calls: FREE_TEXT calls?", "FREE_TEXT: /(.|\\n)*/"]
        return [
            f"text_or_calls: FREE_TEXT | up_to_calls {self._spelled(tail)} block",
            f"up_to_calls[lazy]: /(.|\\n)*{escaped(trigger)}/",
            f"FREE_TEXT: /(.|\\n)*/ & ~/(?s:.*){escaped(trigger)}(?s:.*)/",
        ]

    def _function(self, i: int, function: CallableFunction) -> str:
        """Writes the rule of one function's calls; returns its name."""
        name = f"function_{i}"
        parts = {"name": literal(function.name), "number": "NUMBER", "arguments": self._arguments(name, function)}
        self.rules.append(f"{name}: {self._spelled(self._form.call, parts)}")
        return name

    def _arguments(self, name: str, function: CallableFunction) -> str:
        schema = function.parameters or {"type": "object"}
        if not self._form.text:
            return self._schema(name, _closed(schema), function)
        if not isinstance(properties := schema.get("properties", {}), dict):
            raise ValueError("tools: the properties of a function's parameters are an object")
        if not properties:
            self._require_plain(schema, function)
            return self._spelled(self._form.nothing)
        required, parts = _required(schema), []
        for j, (key, value) in enumerate(properties.items()):
            rule = f"{name}_{j}"
            self.rules.append(f"{rule}: {self._argument(rule, key, value, schema, function)}")
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts)

    def _require_plain(self, schema: Mapping[str, Any], function: CallableFunction) -> None:
        """Raises ValueError where parameters are told in a way that cannot be written one by one."""
        if function.strict and any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf", "patternProperties")):
            raise ValueError("tools: this model's calls can only be held to parameters that are listed as properties")

    def _argument(self, rule: str, key: str, value: Any, schema: Mapping[str, Any], function: CallableFunction) -> str:
        """Returns how one argument is written."""
        value = value if isinstance(value, dict) else {}
        spelled_key = literal(key)
        if (texts := _texts(value)) is not None:
            choice = "(" + " | ".join(map(literal, texts)) + ")"
            return self._spelled(self._form.text, {"key": spelled_key, "value": choice})
        if value.get("type") == "string" and (pattern := self._pattern(value, function)) is not None:
            return self._text_argument(rule, spelled_key, pattern)
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        inner = self._schema(rule, value | shared, function)
        return self._spelled(self._form.value, {"key": spelled_key, "value": inner})

    def _pattern(self, schema: Mapping[str, Any], function: CallableFunction) -> str | None:
        """Returns what a text has to match, between slashes; None where it has to be written as JSON for its schema."""
        says = schema.keys() - _SAYS_NOTHING
        if not says or (not function.strict and self._form.text == self._form.value):
            return "(.|\\n)*"
        if says <= {"minLength", "maxLength"}:
            return f"(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
        if says == {"pattern"} and isinstance(pattern := schema["pattern"], str):
            start, end = ("" if pattern.startswith("^") else "(.|\\n)*"), ("" if pattern.endswith("$") else "(.|\\n)*")
            return f"{start}({llguidance.regex_to_lark(unanchored(pattern), 'dw')}){end}"
        if self._form.text == self._form.value:
            raise ValueError(f"tools: this model writes texts without quotes, so {sorted(says)} cannot be enforced")
        return None

    def _text_argument(self, rule: str, key: str, pattern: str) -> str:
        """Returns how a text is written, up to what ends it."""
        head, _, tail = self._form.text.partition("{value}")
        ending = next((m for m in self._markers() if tail.startswith(m)), "")
        if ending and self._id_of(ending) is not None:
            return self._spelled(self._form.text, {"key": key, "value": f"/{pattern}/"})
        self.rules.append(f"{rule}_text[lazy]: /({pattern}){escaped(tail)}/")
        return f"{self._spelled(head, {'key': key})} {rule}_text"

    def _schema(self, name: str, schema: Mapping[str, Any], function: CallableFunction) -> str:
        self.entries.append(schema_entry(schema, name, lenient=not function.strict))
        return f"@{name}"

    def _markers(self) -> list[str]:
        """Returns the dialect's markers, the longest first; single characters are text."""
        return sorted((m for m in self._dialect.markers if len(m) > 1), key=len, reverse=True)

    def _spelled(self, text: str, parts: Mapping[str, str] | None = None) -> str:
        """Returns how a rule writes a text with markers and gaps in it."""
        pieces, markers = [], re.compile("|".join(map(re.escape, self._markers())) or r"(?!)")
        for i, part in enumerate(_GAPS.split(text)):
            if i % 2:
                pieces.append((parts or {})[part])
            else:
                pieces += self._with_markers(part, markers)
        return " ".join(pieces)

    def _with_markers(self, text: str, markers: re.Pattern[str]) -> list[str]:
        pieces, at = [], 0
        for match in markers.finditer(text):
            if (token := self._id_of(match[0])) is not None:
                pieces += [literal(text[at : match.start()]), symbol(token)]
                at = match.end()
        return [piece for piece in [*pieces, literal(text[at:])] if piece != '""']


def _required(schema: Mapping[str, Any]) -> set[str]:
    """Returns the names of arguments that must be given."""
    listed = schema.get("required", [])
    return {key for key in listed if isinstance(key, str)} if isinstance(listed, list) else set()


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema that allows no arguments but those it lists, unless it says something of others.

    Small models make some up; where arguments are written one by one there are no others either.
    """
    properties = schema.get("properties")
    is_plain = not schema.keys() & _SAYS_OF_OTHERS and isinstance(properties, dict)
    return (
        {**schema, "additionalProperties": False} if is_plain and _required(schema) <= set(properties or ()) else schema
    )


def _texts(schema: Mapping[str, Any]) -> list[str] | None:
    """Returns the texts of a schema that lists them, None for any other."""
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(found, list) or not found or not all(isinstance(each, str) and each for each in found):
        return None
    return found if _SAYS_NOTHING.issuperset(schema.keys() - {"enum", "const"}) else None


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer is to be held to: a constraint, or rules for its calls, or both, behind reasoning if there is any.

    With both, and no call required, it may be either.
    """

    constraint: StructuredOutputsParams | None = None
    calls: CallRules | None = None
    reasoning: ReasoningSpan | None = None


def answer_grammar(wanted: Wanted, dialect: Dialect | None, id_of: Callable[[str], int | None]) -> str:
    """Returns the grammar of an answer, "" where it is free; calls are in `dialect`, `id_of` has its markers.

    Raises ValueError for a constraint or for tools that no grammar can be made of. Its time is not linear in what is
    wanted: a server writes no grammar of what a client sends but in a process that can be killed.
    """
    constraint, calls = wanted.constraint, wanted.calls
    entries: list[Grammar] = [] if constraint is None else [body_of(constraint)]
    if calls is None:
        return assembled(after_reasoning(wanted.reasoning, "@answer"), entries) if entries else ""
    assert dialect is not None  # else tools are refused
    written = CallGrammar(dialect, calls, id_of)
    body = "calls"
    if not calls.required:
        body = "text_or_calls" if constraint is None else "@answer | calls"
    rules = [after_reasoning(wanted.reasoning, "body"), f"body: {body}", *written.rules]
    return assembled("\n".join(rules), [*entries, *written.entries])
