"""Writes the grammar of tool calls in a model's own format, with the schemas of the tools in it.

Models are trained on one format of calls; constrained to another they call worse. The dialect's `CallForm` has the
format. Markers that are tokens are named by id; so is the part of DSML's tags where it is a special token, which no
text matches. Arguments are one JSON object, or, where the dialect writes them one by one, a rule each, in the order of
the schema.
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
    assemble,
    constraint_entry,
    escape_pattern,
    free_reasoning,
    literal,
    schema_entry,
    strip_anchors,
    symbol,
)
from dsv3.text.parser import DSML, MAX_CALLS

_GAPS = re.compile(r"\{(name|number|arguments|key|value)\}")
# Keywords of a schema that may allow arguments beyond its properties.
_OPEN_KEYWORDS = frozenset(
    ["additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"]
)
# Keywords beside "type": "string" that leave the text free.
_PLAIN_KEYWORDS = frozenset(["type", "title", "description", "default", "examples", "deprecated", "$comment"])


class CallableFunction(msgspec.Struct, frozen=True):
    """A function that may be called. Unless it is `strict`, keywords that cannot be enforced are ignored."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool


class CallRules(msgspec.Struct, frozen=True):
    """The calls that an answer may make: of these functions, at least one if `required`, several if `parallel`."""

    functions: Sequence[CallableFunction]
    required: bool
    parallel: bool


class CallGrammar:
    """The rules of calls in Lark's syntax, and the schema `entries` that they refer to.

    The rule `calls` is the whole block; `text_or_calls` is text with or without a block after it. Raises ValueError for
    parameters that the dialect cannot enforce.
    """

    def __init__(self, dialect: Dialect, rules: CallRules, id_of: Callable[[str], int | None]):
        self._dialect, self._form, self._id_of = dialect, dialect.form, id_of
        self.rules: list[str] = []
        self.entries: list[Grammar] = []
        names = [self._function(i, each) for i, each in enumerate(rules.functions)]
        more = f" ({self._expression(self._form.between)} call){{0,{MAX_CALLS - 1}}}" if rules.parallel else ""
        self.rules += [
            f"calls: {self._expression(self._form.before)} block",
            f"block: call{more} {self._expression(self._form.after)}",
            f"call: {' | '.join(names)}",
            "NUMBER: /[0-9]{1,4}/",
            *self._text_or_calls(),
        ]

    def _text_or_calls(self) -> list[str]:
        """Returns the rules of text before calls; where their marker is not a token, text ends right after it."""
        before = self._form.before.lstrip("\n")
        if (split := self._at_token(before)) is None:
            head, bracket, tail = before.partition(">")
            trigger = escape_pattern(head + bracket)
            return [
                f"text_or_calls: FREE_TEXT | up_to_calls {self._expression(tail)} block",
                f"up_to_calls[lazy]: /(.|\\n)*{trigger}/",
                f"FREE_TEXT: /(.|\\n)*/ & ~/(?s:.*){trigger}(?s:.*)/",
            ]
        first, rest = split
        if not first:
            return ["text_or_calls: FREE_TEXT calls?", "FREE_TEXT: /(.|\\n)*/"]
        return [
            f"text_or_calls: FREE_TEXT | UP_TO_CALLS ({self._expression(rest)} block)?",
            f"UP_TO_CALLS: /(.|\\n)*{escape_pattern(first)}/",
            f"FREE_TEXT: /(.|\\n)*/ & ~/(?s:.*){escape_pattern(first)}/",
        ]

    def _at_token(self, text: str) -> tuple[str, str] | None:
        """Splits a text before its first marker that is a token, up to which text can be free; None without one."""
        tokens = (marker for marker in self._markers() if self._id_of(marker) is not None)
        at = min((at for marker in tokens if (at := text.find(marker)) >= 0), default=None)
        return None if at is None else (text[:at], text[at:])

    def _function(self, i: int, function: CallableFunction) -> str:
        """Adds the rule of one function's calls; returns the rule's name."""
        name = f"function_{i}"
        parts = {"name": literal(function.name), "number": "NUMBER", "arguments": self._arguments(name, function)}
        self.rules.append(f"{name}: {self._expression(self._form.call, parts)}")
        return name

    def _arguments(self, name: str, function: CallableFunction) -> str:
        schema = function.parameters or {"type": "object"}
        if not self._form.text:
            return self._schema(name, _closed(schema), function)
        if not isinstance(properties := schema.get("properties", {}), dict):
            raise ValueError("tools: the properties of a function's parameters are an object")
        if not properties:
            self._require_plain(schema, function)
            return self._expression(self._form.nothing)
        required, parts = _required(schema), []
        for j, (key, value) in enumerate(properties.items()):
            rule = f"{name}_{j}"
            self.rules.append(f"{rule}: {self._argument(rule, key, value, schema, function)}")
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts)

    def _require_plain(self, schema: Mapping[str, Any], function: CallableFunction) -> None:
        """Raises ValueError where a strict function's parameters are not listed as properties."""
        if function.strict and any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf", "patternProperties")):
            raise ValueError("tools: this model's format needs parameters that are listed as properties")

    def _argument(self, rule: str, key: str, value: Any, schema: Mapping[str, Any], function: CallableFunction) -> str:
        """Returns the expression of one argument."""
        value = value if isinstance(value, dict) else {}
        key_rule = literal(key)
        if (texts := _enum_texts(value)) is not None:
            choice = "(" + " | ".join(map(literal, texts)) + ")"
            return self._expression(self._form.text, {"key": key_rule, "value": choice})
        if value.get("type") == "string" and (pattern := self._pattern(value, function)) is not None:
            return self._text_argument(rule, key_rule, pattern)
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        inner = self._schema(rule, value | shared, function)
        return self._expression(self._form.value, {"key": key_rule, "value": inner})

    def _pattern(self, schema: Mapping[str, Any], function: CallableFunction) -> str | None:
        """Returns the pattern of a text, without slashes; None where the text has to be JSON of its schema."""
        keywords = schema.keys() - _PLAIN_KEYWORDS
        if not keywords or (not function.strict and self._form.text == self._form.value):
            return "(.|\\n)*"
        if keywords <= {"minLength", "maxLength"}:
            return f"(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
        if keywords == {"pattern"} and isinstance(pattern := schema["pattern"], str):
            start, end = ("" if pattern.startswith("^") else "(.|\\n)*"), ("" if pattern.endswith("$") else "(.|\\n)*")
            return f"{start}({llguidance.regex_to_lark(strip_anchors(pattern), 'dw')}){end}"
        if self._form.text == self._form.value:
            raise ValueError(f"tools: this model writes texts without quotes, so {sorted(keywords)} cannot be enforced")
        return None

    def _text_argument(self, rule: str, key: str, pattern: str) -> str:
        """Returns the expression of a text argument, up to its end marker."""
        head, _, tail = self._form.text.partition("{value}")
        if (split := self._at_token(tail)) is not None:
            value = f"/({pattern}){escape_pattern(split[0])}/"
            return f"{self._expression(head, {'key': key})} {value} {self._expression(split[1])}"
        self.rules.append(f"{rule}_text[lazy]: /({pattern}){escape_pattern(tail)}/")
        return f"{self._expression(head, {'key': key})} {rule}_text"

    def _schema(self, name: str, schema: Mapping[str, Any], function: CallableFunction) -> str:
        self.entries.append(schema_entry(schema, name, lenient=not function.strict))
        return f"@{name}"

    def _markers(self) -> list[str]:
        """Returns the dialect's markers of more than one character, the longest first, and the part of its tags."""
        markers = sorted((m for m in self._dialect.markers if len(m) > 1), key=len, reverse=True)
        return [*markers, DSML] if self._dialect.tags else markers

    def _expression(self, text: str, parts: Mapping[str, str] | None = None) -> str:
        """Returns the expression of a text with markers and gaps."""
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
    listed = schema.get("required", [])
    return {key for key in listed if isinstance(key, str)} if isinstance(listed, list) else set()


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema without additional arguments, unless it has keywords that may allow them.

    Small models invent arguments; formats that write them one by one allow no others either.
    """
    properties = schema.get("properties")
    is_plain = not schema.keys() & _OPEN_KEYWORDS and isinstance(properties, dict)
    return (
        {**schema, "additionalProperties": False} if is_plain and _required(schema) <= set(properties or ()) else schema
    )


def _enum_texts(schema: Mapping[str, Any]) -> list[str] | None:
    """Returns the texts of a schema's enum or const; None for any other schema."""
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(found, list) or not found or not all(isinstance(each, str) and each for each in found):
        return None
    return found if _PLAIN_KEYWORDS.issuperset(schema.keys() - {"enum", "const"}) else None


class AnswerConstraints(msgspec.Struct, frozen=True, kw_only=True):
    """What constrains an answer after its reasoning: a constraint, rules for calls, or both.

    With both, and no call required, the answer may be either. The reasoning has at most `thinking_token_budget` tokens.
    """

    constraint: StructuredOutputsParams | None = None
    calls: CallRules | None = None
    reasoning: ReasoningSpan | None = None
    thinking_token_budget: int | None = None


def answer_grammar(constraints: AnswerConstraints, dialect: Dialect | None, id_of: Callable[[str], int | None]) -> str:
    """Returns the grammar of an answer, "" without constraints; calls are in `dialect`, `id_of` maps markers to ids.

    Raises ValueError for constraints that have no grammar. The time is not linear in the constraints: a server calls
    this for client input in a process that can be killed.
    """
    constraint, calls = constraints.constraint, constraints.calls
    reasoning, budget = constraints.reasoning, constraints.thinking_token_budget
    if constraint is None and calls is None:
        return "" if reasoning is None or budget is None else free_reasoning(reasoning, budget)
    entries: list[Grammar] = [] if constraint is None else [constraint_entry(constraint)]
    if calls is None:
        return assemble(after_reasoning(reasoning, "@answer", budget), entries)
    assert dialect is not None  # requests with tools are refused without one
    written = CallGrammar(dialect, calls, id_of)
    body = "calls"
    if not calls.required:
        body = "text_or_calls" if constraint is None else "@answer | calls"
    rules = [after_reasoning(reasoning, "body", budget), f"body: {body}", *written.rules]
    return assemble("\n".join(rules), [*entries, *written.entries])
