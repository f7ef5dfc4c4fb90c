"""Writes the grammars that constrain answers, in llguidance's format; compiles none.

A grammar is JSON: a list of named grammars. The first one is that of the whole answer and refers to the others. Markers
of a dialect that are tokens are named by id: llguidance never matches text against such a token.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import llguidance
import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark

from dsv3.sampling_params import StructuredOutputsParams, schema_text

# JSON is on one line, with at most one space after a comma and a colon, as models write the arguments of calls. An
# unsure model writes white space wherever it may: half of the tokens of a small model's call were line feeds.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": r",\x20?", "key_separator": r":\x20?"}
# Forced text is not tokenized ahead: for a grammar of 60 characters that stands for a long text that takes most of a
# second per token.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
MAX_GRAMMAR_CHARS = 2**18
"""Limit on the characters of a grammar: that of one field of a request."""

# Lines that occur in Lark's syntax and not in GBNF. Each line is looked at once: a pattern that begins with `\s*` would
# look from every line at all the empty ones after it.
_IS_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|start[^\S\n]*:(?!:=))", re.MULTILINE)
# Escapes that the converter damages: it drops their leading zeros.
_ESCAPE = re.compile(r"\\(?:u(0[0-9a-fA-F]{3})|U([0-9a-fA-F]{8})|.)", re.DOTALL)

Grammar = dict[str, Any]
"""One entry of the list: a name, and `lark_grammar` or `json_schema`."""


class ReasoningSpan(msgspec.Struct, frozen=True):
    """Reasoning before the answer: its two markers, by id, or by text if they are not tokens.

    `opened`: the prompt ends inside the reasoning; `optional`: the model may leave it out. `end` is the token that ends
    an answer.
    """

    open: int | str
    close: int | str
    opened: bool
    optional: bool
    end: int | None = None


def plain_grammar(constraint: StructuredOutputsParams | None) -> str:
    """Returns the grammar of an answer without reasoning and calls; "" without a constraint.

    Raises ValueError for a constraint that has no grammar.
    """
    return "" if constraint is None else assemble("start: @answer", [constraint_entry(constraint)])


def constraint_entry(constraint: StructuredOutputsParams, name: str = "answer") -> Grammar:
    """Returns a constraint's entry of the list; raises ValueError as `plain_grammar` does."""
    if (schema := constraint.schema) is not None:
        return schema_entry(schema, name)
    if constraint.regex is not None:
        [entry] = json.loads(llguidance.LLMatcher.grammar_from_regex(strip_anchors(constraint.regex)))["grammars"]
        return entry | {"name": name}
    if constraint.choice is not None:
        return lark_entry("start: CHOICE\nCHOICE: " + " | ".join(map(literal, constraint.choice)), name)
    assert constraint.grammar is not None  # exactly one is given
    return lark_entry(_lark(constraint.grammar), name)


def schema_entry(schema: Mapping[str, Any], name: str, *, lenient: bool = False) -> Grammar:
    """Returns a JSON schema's entry; if `lenient`, keywords that cannot be enforced are ignored."""
    return {"name": name, "json_schema": {**schema, "x-guidance": {**_ONE_LINE, "lenient": lenient}}}


def lark_entry(lark: str, name: str) -> Grammar:
    return {"name": name, "lark_grammar": lark}


def assemble(rules: str, entries: list[Grammar]) -> str:
    """Returns a grammar from its `rules`, in Lark's syntax, and the `entries` that they refer to.

    Raises ValueError for one that is too large.
    """
    text = schema_text({"grammars": [{"lark_grammar": _OPTIONS + rules}, *entries]})
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"the grammar takes {len(text)} characters, at most {MAX_GRAMMAR_CHARS}")
    return text


def after_reasoning(reasoning: ReasoningSpan | None, answer: str, budget: int | None = None) -> str:
    """Returns the rules of a text with reasoning before the rule `answer`; the rule "start" is the whole text.

    Reasoning is free up to its end marker, and has at most `budget` tokens; the text may not end inside it. Raises
    ValueError for a budget where a marker is not a token.
    """
    if reasoning is None:
        return f"start: {answer}"
    opened = symbol(reasoning.open)
    if budget is not None:
        last = _marker_id(reasoning.close)
        no_thought = [last] if reasoning.end is None else [last, reasoning.end]
        rules = [f"reasoning: {_thoughts(budget, no_thought)} <[{last}]> BLANK?"]
    elif isinstance(reasoning.close, int):
        rules = ["TEXT_OF_REASONING: /(.|\\n)*/", f"reasoning: TEXT_OF_REASONING {symbol(reasoning.close)} BLANK?"]
    else:
        ending = escape_pattern(reasoning.close)
        rules = [f"ends_reasoning[lazy]: /(.|\\n)*{ending}/", "reasoning: ends_reasoning BLANK?"]
    if reasoning.opened:
        start = f"start: {opened}? reasoning {answer}"
    else:
        start = f"start: {opened} reasoning {answer}" + (f" | {answer}" if reasoning.optional else "")
    return "\n".join([start, *rules, "BLANK: /[ \\n]{1,4}/"])


def free_reasoning(reasoning: ReasoningSpan, budget: int) -> str:
    """Returns the grammar of a text whose reasoning has at most `budget` tokens and which is free otherwise.

    The token that ends an answer is one of the free ones. Raises ValueError where a marker is not a token.
    """
    first, last = _marker_id(reasoning.open), _marker_id(reasoning.close)
    reasoned = f"{_thoughts(budget, [last])} <[{last}]> <[*]>*"
    start = f"<[{first}]>? {reasoned}" if reasoning.opened else f"(<[{first}]> {reasoned} | <[^{first}]> <[*]>*)?"
    return assemble(f"start: {start}", [])


def _marker_id(marker: int | str) -> int:
    if isinstance(marker, str):
        raise ValueError(f"thinking_token_budget: {marker} is not a token of this model, so tokens cannot be counted")
    return marker


def _thoughts(budget: int, excluded: list[int]) -> str:
    """Returns the expression of at most `budget` tokens, any but those `excluded`."""
    return f"<[^{','.join(map(str, excluded))}]>{{0,{budget}}}" if budget else ""  # {0,0} is not in the syntax


def symbol(marker: int | str) -> str:
    """Returns the expression of a marker: a token by id, or a text."""
    return f"<[{marker}]>" if isinstance(marker, int) else literal(marker)


def literal(text: str) -> str:
    """Returns a text as a literal."""
    return json.dumps(text, ensure_ascii=True)


def strip_anchors(regex: str) -> str:
    """Strips the anchors at a pattern's ends, which are implied: the whole answer has to match."""
    regex = regex.removeprefix("^")
    body = regex.removesuffix("$")
    is_escaped = (len(body) - len(body.rstrip("\\"))) % 2 == 1
    return regex if is_escaped else body


def _lark(grammar: str) -> str:
    """Returns a grammar in Lark's syntax; converts GBNF.

    The time of a conversion grows faster than the grammar.
    """
    if _IS_LARK.search(grammar):
        return grammar
    try:
        return gbnf_to_lark(_ESCAPE.sub(_plain_escape, grammar))
    except Exception as error:  # the converter raises bare Exception
        raise ValueError(f"grammar: {error}"[:300]) from None


def _plain_escape(match: re.Match[str]) -> str:
    """Returns an escape that the converter handles; one that is not a character stays, to be refused."""
    digits = match[1] or match[2]
    code = int(digits, 16) if digits else -1
    if 0 <= code < 0x100:
        return f"\\x{code:02x}"
    return chr(code) if 0x100 <= code < 0xD800 or 0xE000 <= code <= 0x10FFFF else match[0]


def escape_pattern(text: str) -> str:
    """Escapes a text for a pattern between slashes."""
    return "".join(f"\\{c}" if c in r"\/.^$|?*+()[]{}" else "\\n" if c == "\n" else c for c in text)
