"""Grammars of constraints: which texts they accept, and how GBNF is converted."""

import functools

import numpy as np
import pytest

from dsv3.sampling_params import StructuredOutputsParams
from dsv3.text.grammar import plain_grammar
from dsv3.text.matcher import GrammarVocabulary, Matcher
from tests.dsv3.text import tiny


@functools.cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(tiny.backend().to_str(), tiny.backend().get_vocab_size(), [1])


def compiled_of(constraint: StructuredOutputsParams) -> Matcher:
    return vocabulary().compile(plain_grammar(constraint))


def object_with(schema: dict) -> StructuredOutputsParams:
    return StructuredOutputsParams(json={"type": "object"} | schema)


@functools.cache
def compiled(**constraint) -> Matcher:
    return compiled_of(StructuredOutputsParams(**constraint))


def accepts(text: str, matcher: Matcher) -> bool:
    """Whether the text is a complete answer."""
    at = matcher.copy()
    at.advance(np.array(tiny.backend().encode(text, add_special_tokens=False).ids))
    return at.error is None and at.inner.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        (r'root ::= "\u0041"', "A", "u"),
        (r"root ::= [\u0041-\u0043]+", "ABC", "D"),
        (r"root ::= [\u0000-\u001f]", "\n", " "),
        (r'root ::= "\u00e9\u0100\u20ac\U0001F600\U00000041"', "éĀ€😀A", "é"),
        (r"root ::= [\u00e0-\u0105]", "ą", "z"),
        (r'root ::= "\\u0041\n\"\x42"', '\\u0041\n"B', "A"),
        (r"root ::= [^\u0022\u005c\u005d]", "a", "]"),
        ('  %llguidance {}\n\tstart: "b"', "b", "a"),
        ('x: "b"\n\n start : x', "b", "a"),
    ],
)
def test_grammars_in_gbnf_and_in_larks_syntax(grammar: str, accepted: str, refused: str) -> None:
    matcher = compiled(grammar=grammar)
    assert accepts(accepted, matcher) and not accepts(refused, matcher)


@pytest.mark.parametrize("escape", [r"\u00", r"\U00110000", r"\U0000d800", r"\q"])
def test_escapes_that_name_no_character_are_refused(escape: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        compiled(grammar=f'root ::= "{escape}"')


def test_json_has_at_most_one_space_after_commas_and_colons() -> None:
    """A small model that may write white space freely spends half of its tokens on line feeds and indents."""
    members = {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"enum": [{"k": 1}]}}
    for matcher in (compiled(json_object=True), compiled_of(object_with({"properties": members}))):
        for text in ('{"a":[1,2],"b":{"k":1}}', '{"a": [1, 2], "b": {"k": 1}}', "{}"):
            assert accepts(text, matcher), text
        for text in (
            '{"a" : []}',
            '{ "a": []}',
            '{"a": [] }',
            '{"a":  []}',
            '{"a": [ 1]}',
            '{"a": [1 ,2]}',
            '{"a":\n[]}',
        ):
            assert not accepts(text, matcher), text
        for text in (" {}", "{ }", "\n{}"):
            assert not accepts(text, matcher), text
        assert not accepts("{} ", matcher)


def test_an_ambiguous_rule_ends_with_an_error_before_it_is_slow() -> None:
    """Each mask takes longer than the one before, and all requests of a step wait for it."""
    matcher = compiled(grammar='start: s\ns: s s s s | s s s | s s | "a"').copy()
    mask = np.zeros((1, 1, vocabulary().words), np.uint32)
    [token] = tiny.backend().encode("a", add_special_tokens=False).ids
    answer: list[int] = []
    while matcher.error is None:
        answer.append(token)
        assert len(answer) < 150
        matcher.advance(np.array(answer))
        vocabulary().fill([(matcher, [])], mask)
    assert len(answer) > 20 and "items" in matcher.error


def test_wide_grammars_compile() -> None:
    """The longest list of texts compiles, and so does an object of many optional properties."""
    words = [f"w{i:04d}" for i in range(1024)]
    assert accepts(words[-1], compiled_of(StructuredOutputsParams(choice=words)))
    members = {word: {"type": "integer"} for word in words[:200]}
    text = "{" + ", ".join(f'"{word}": 1' for word in words[0:200:7]) + "}"
    assert accepts(text, compiled_of(object_with({"properties": members, "additionalProperties": False})))
