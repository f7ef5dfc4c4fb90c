"""Grammars of calls in each dialect: the parser reads what they accept, and the schemas hold."""

import json

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from dsv3.sampling_params import SamplingParams, StructuredOutputsParams
from dsv3.text.call_grammar import AnswerConstraints, CallableFunction, CallRules, answer_grammar
from dsv3.text.deltas import ToolCallStart, merge_deltas
from dsv3.text.matcher import GrammarError, GrammarVocabulary, Matcher
from dsv3.text.output import OutputProcessor
from dsv3.text.parser import DSML, Tools
from dsv3.text.parsers import Parsers
from dsv3.text.tokenizer import Tokenizer
from tests.dsv3.text import dialects, tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
        "code": {"type": "string", "pattern": "^[a-c]{2}$"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 0, "maximum": 99}},
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [CallableFunction("get_weather", SCHEMA, True), CallableFunction("now", EMPTY, True)]
KNOWN = Tools({"get_weather": {"city": True, "unit": None, "days": False, "code": True}, "now": {}})
ARGUMENTS = {"city": "Köln <b>", "unit": "C", "days": [1, 99], "code": "ab"}
CLOSED, OPEN, SILENT = "<｜Assistant｜></think>", "<｜Assistant｜><think>\n", "<｜Assistant｜>"


def parsers(dialect: str, by_id: bool = True) -> Parsers:
    return Parsers(dialects.tokenizer(dialect, by_id), None, "deepseek_v3", dialect)


def compiled(dialect: str, rules: CallRules | None, prompt: str = CLOSED, by_id: bool = True, constraint=None) -> tuple:
    """The vocabulary and a matcher of an answer."""
    tokenizer = dialects.tokenizer(dialect, by_id)
    vocabulary = GrammarVocabulary(tokenizer._backend.to_str(), tokenizer.vocab_size, [tokenizer.eos_token_id])
    made = parsers(dialect, by_id)
    constraints = AnswerConstraints(constraint=constraint, calls=rules, reasoning=made.reasoning(prompt))
    return vocabulary, vocabulary.compile(answer_grammar(constraints, made.dialect, made.marker_ids.get))


def call_text(dialect: str, calls: list[tuple[str, dict]]) -> str:
    """Calls in the exact format; `dialects.written` has more line feeds than GLM."""
    text = dialects.written(dialect, calls)
    return {"glm45": text.replace("\n\n", "\n"), "glm47": text.replace("\n", "")}.get(dialect, text)


def after(matcher: Matcher, dialect: str, text: str, by_id: bool = True) -> Matcher | None:
    """The matcher after a text, marker by marker and byte by byte; None where the text is refused."""
    at = matcher.copy()
    at.advance(np.array(dialects.tokens(dialect, text, by_id)))
    return None if at.error else at


def allowed(vocabulary: GrammarVocabulary, matcher: Matcher) -> np.ndarray:
    """The tokens that may come next."""
    mask = np.zeros((1, 1, vocabulary.words), np.uint32)
    vocabulary.fill([(matcher, [])], mask)
    assert matcher.error is None
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]


def random_answer(
    dialect: str, vocabulary: GrammarVocabulary, matcher: Matcher, seed: int, most: int = 600
) -> list[int]:
    """An answer of random allowed tokens; closing ones are likelier, so that it ends."""
    rng, tokens = np.random.default_rng(seed), []
    eos = dialects.tokenizer(dialect).eos_token_id
    while not matcher.is_over and len(tokens) < most:
        ids = allowed(vocabulary, matcher)
        texts = [dialects.tokenizer(dialect).token_bytes(i) for i in ids]
        weights = np.array(
            [30.0 if i > 327 or text[:1] in b'"<}]\n' else 1.0 for i, text in zip(ids, texts, strict=True)]
        )
        tokens.append(int(rng.choice(ids, p=weights / weights.sum())))
        if tokens[-1] == eos:
            return tokens[:-1]
        matcher.advance(np.array(tokens))
    return tokens


@pytest.mark.parametrize("by_id", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("dialect", dialects.NAMES)
def test_calls_as_models_write_them_are_accepted(dialect: str, by_id: bool) -> None:
    """One call and several; arguments outside the schema, unknown functions and free text are refused."""
    rules = CallRules(FUNCTIONS, required=True, parallel=True)
    _, matcher = compiled(dialect, rules, by_id=by_id)
    for calls in ([("get_weather", ARGUMENTS)], [("now", {})], [("get_weather", ARGUMENTS), ("now", {})]):
        end = after(matcher, dialect, call_text(dialect, calls), by_id)
        assert end is not None and end.inner.is_accepting(), calls
    wrong = [("other", {}), ("get_weather", {"days": []}), ("get_weather", ARGUMENTS | {"unit": "K"})]
    for call in wrong:
        assert after(matcher, dialect, call_text(dialect, [call]), by_id) is None, call
    assert after(matcher, dialect, "It is sunny.", by_id) is None
    assert not matcher.inner.is_accepting()


@pytest.mark.parametrize("dialect", dialects.NAMES)
def test_a_single_call(dialect: str) -> None:
    _, matcher = compiled(dialect, CallRules(FUNCTIONS[1:], required=True, parallel=False))
    text = call_text(dialect, [("now", {})])
    end = after(matcher, dialect, text)
    assert end is not None and end.is_over
    assert after(matcher, dialect, call_text(dialect, [("now", {})] * 2)) is None
    assert after(matcher, dialect, call_text(dialect, [("get_weather", ARGUMENTS)])) is None


@pytest.mark.parametrize("by_id", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("dialect", dialects.NAMES)
def test_strict_tools_leave_calls_optional(dialect: str, by_id: bool) -> None:
    """Text alone, and text before calls, are accepted, but no call that violates its schema."""
    _, matcher = compiled(dialect, CallRules(FUNCTIONS, required=False, parallel=True), by_id=by_id)
    text_only = after(matcher, dialect, "Let me < see.", by_id)
    assert text_only is not None and text_only.inner.is_accepting() and not text_only.is_over
    for content in ("", "Let me see."):
        good = content + call_text(dialect, [("get_weather", ARGUMENTS)])
        bad = content + call_text(dialect, [("get_weather", {"days": "soon"})])
        assert after(matcher, dialect, good, by_id) is not None
        assert after(matcher, dialect, bad, by_id) is None


@pytest.mark.parametrize("dialect", dialects.NAMES)
def test_random_answers_are_calls_that_match_their_schema(dialect: str) -> None:
    """The parser reads it, and an independent validator agrees."""
    vocabulary, matcher = compiled(dialect, CallRules(FUNCTIONS, required=True, parallel=False))
    whole = 0
    for seed in range(6):
        answer = dialects.Answer(
            dialect, random_answer(dialect, vocabulary, matcher.copy(), seed), tools=KNOWN, prompt=CLOSED
        )
        for name, arguments in answer.calls if answer.finish_reason == "tool_calls" else []:
            whole += 1
            value = json.loads(arguments)
            jsonschema.validate(value, {"get_weather": SCHEMA, "now": EMPTY}[name])
    assert whole >= 3


@pytest.mark.parametrize("dialect", ["deepseek_v32", "deepseek_v4"])
def test_the_part_of_tags_is_one_token_where_it_is_special(dialect: str) -> None:
    """Text never matches a special token, so a grammar has to name it; spelled, a call is refused."""
    backend = tiny.backend()
    backend.add_tokens([AddedToken(DSML, normalized=False, special=True)])
    tokenizer = Tokenizer(backend, tiny.config())
    known = Parsers(tokenizer, None, "deepseek_v3", dialect)
    vocabulary = GrammarVocabulary(backend.to_str(), tokenizer.vocab_size, [tokenizer.eos_token_id])
    text = call_text(dialect, [("get_weather", ARGUMENTS), ("now", {})])
    whole = tokenizer.encode(text, add_special_tokens=False)
    spelled = [i for part in text.split("｜") for i in tokenizer.encode(part + "｜", add_special_tokens=False)]
    for required in (True, False):
        rules = AnswerConstraints(calls=CallRules(FUNCTIONS, required=required, parallel=True))
        start = vocabulary.compile(answer_grammar(rules, known.dialect, known.marker_ids.get))
        for before in ((), ("a < b",)) if not required else ((),):
            said = [i for each in before for i in tokenizer.encode(each, add_special_tokens=False)]
            matcher = start.copy()
            matcher.advance(np.array([*said, *whole]))
            assert matcher.error is None and matcher.inner.is_accepting()
            matcher = start.copy()
            matcher.advance(np.array([*said, *whole, *whole]))
            assert matcher.error is not None
        matcher = start.copy()
        matcher.advance(np.array(spelled))
        assert (matcher.error is not None) == required, "free text may spell it"
        parser = known.parser(known.start(CLOSED), KNOWN)
        stream = OutputProcessor(tokenizer, SamplingParams(), parser)
        deltas = merge_deltas([delta for i in whole for delta in stream.push([i]).deltas])
        assert [each.name for each in deltas if isinstance(each, ToolCallStart)] == ["get_weather", "now"]


def test_only_the_answer_after_the_reasoning_is_constrained() -> None:
    """The end is not allowed inside the reasoning; its closing marker is."""
    choice = StructuredOutputsParams(choice=["yes", "no"])
    tokenizer = dialects.tokenizer("deepseek_v31")
    close, end = tokenizer.id_of("</think>"), tokenizer.eos_token_id
    for prompt, bare in ((OPEN, False), (SILENT, True), (CLOSED, True)):
        vocabulary, matcher = compiled("deepseek_v31", None, prompt, constraint=choice)
        assert (
            after(matcher, "deepseek_v31", "yes") is not None and after(matcher, "deepseek_v31", "yes").is_over
        ) is bare
        thought = {OPEN: "Hm. yes?", SILENT: "<think>Hm. yes?", CLOSED: "<think>Hm."}[prompt]
        inside = after(matcher, "deepseek_v31", thought)
        assert (inside is None) is (prompt == CLOSED)
        if inside is not None:
            assert close in allowed(vocabulary, inside) and end not in allowed(vocabulary, inside)
            over = after(matcher, "deepseek_v31", thought + "</think>\n\nno")
            assert over is not None and over.is_over
            assert after(matcher, "deepseek_v31", thought + "</think>\n\nperhaps") is None


def test_calls_or_text_under_a_constraint() -> None:
    rules = CallRules(FUNCTIONS[1:], required=False, parallel=False)
    constraint = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    _, matcher = compiled("deepseek_v31", rules, constraint=constraint)
    for text in ('{"a": 1}', call_text("deepseek_v31", [("now", {})])):
        end = after(matcher, "deepseek_v31", text)
        assert end is not None and end.inner.is_accepting()
    for text in ("free", '{"a": "b"}'):
        assert after(matcher, "deepseek_v31", text) is None


def test_keywords_that_cannot_be_enforced_are_refused_or_ignored() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(GrammarError, match="uniqueItems"):
        compiled("deepseek_v31", CallRules([CallableFunction("f", odd, True)], required=True, parallel=True))
    _, matcher = compiled("deepseek_v31", CallRules([CallableFunction("f", odd, False)], required=True, parallel=True))
    assert after(matcher, "deepseek_v31", call_text("deepseek_v31", [("f", {"a": [1, 1]})])) is not None
    assert tiny.EOS  # the vocabulary of these tests


class Listed(list):
    """A list that fails on a search."""

    def __contains__(self, key: object) -> bool:
        raise AssertionError("a search reads the whole list")


def test_required_arguments_are_looked_up_in_constant_time() -> None:
    """Thousands of arguments and required names made a request of 200 kB cost seconds; invalid names are ignored."""
    properties = {name: {"type": "string"} for name in ("a", "b")}
    schema = {"type": "object", "properties": properties, "required": Listed(["b", 1, [], {}])}
    _, matcher = compiled("glm47", CallRules([CallableFunction("f", schema, True)], required=True, parallel=False))
    for arguments, taken in ({"a": "x", "b": "y"}, True), ({"b": "y"}, True), ({"a": "x"}, False):
        assert (after(matcher, "glm47", call_text("glm47", [("f", arguments)])) is not None) is taken
    for odd in (5, "ab", None):
        compiled(
            "glm47", CallRules([CallableFunction("f", schema | {"required": odd}, True)], required=True, parallel=False)
        )


@pytest.mark.parametrize(
    ("more", "open_"),
    [({}, False), ({"additionalProperties": {"type": "integer"}}, True), ({"required": ["b"]}, True)],
)
def test_arguments_that_the_schema_does_not_list(more: dict, open_: bool) -> None:
    """They are refused, unless the schema allows or requires others."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}} | more
    rules = CallRules([CallableFunction("f", schema, False)], required=True, parallel=False)
    _, matcher = compiled("deepseek_v31", rules)
    both = after(matcher, "deepseek_v31", call_text("deepseek_v31", [("f", {"a": 1, "b": 2})]))
    assert (both is not None) is open_


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("prompt", [OPEN, SILENT])
@pytest.mark.parametrize("choice", [None, "ab"])
def test_reasoning_has_at_most_so_many_tokens(budget: int, prompt: str, choice: str | None) -> None:
    """Its end is forced exactly then, and may come earlier; a free answer behind it is as free as without a budget."""
    tokenizer, made = dialects.tokenizer("deepseek_v31", True), parsers("deepseek_v31")
    first, last, end = (tokenizer.id_of("<think>"), tokenizer.id_of("</think>"), tokenizer.eos_token_id)
    vocabulary = GrammarVocabulary(tokenizer._backend.to_str(), tokenizer.vocab_size, [end])
    constraint = None if choice is None else StructuredOutputsParams(choice=[choice])
    span = made.reasoning(prompt)
    wanted = AnswerConstraints(constraint=constraint, reasoning=span, thinking_token_budget=budget)
    whole = vocabulary.compile(answer_grammar(wanted, made.dialect, made.marker_ids.get))
    everything = set(range(tokenizer.vocab_size))

    def allowed(answer: list[int]) -> set[int]:
        matcher, mask = whole.copy(), np.zeros((1, 1, vocabulary.words), np.uint32)
        matcher.advance(np.array(answer, np.int64))
        assert matcher.error is None
        vocabulary.fill([(matcher, [])], mask)
        return set(np.unpackbits(mask.view(np.uint8).reshape(-1), bitorder="little").nonzero()[0].tolist())

    opened = [] if prompt == OPEN else [first]
    for length in range(budget):  # any token is a thought, also one that is no text by itself
        thoughts = [(37 * i) % 200 + 10 for i in range(length)]
        assert allowed(opened + thoughts) >= everything - {first, end}
        assert (end in allowed(opened + thoughts)) == (choice is None)
        behind = allowed([*opened, *thoughts, last])
        assert behind == everything if choice is None else end not in behind and len(behind) < 20
    spent = [*opened, *range(10, 10 + budget)]
    assert allowed(spent) == ({last} if opened or budget else {first, last})
    assert allowed([*spent, last]) == everything if choice is None else len(allowed([*spent, last])) < 20
    if prompt == SILENT and choice is None:
        assert allowed([]) == everything == allowed([20, 21])  # the model may leave reasoning out


def test_a_budget_needs_markers_that_are_tokens() -> None:
    made = parsers("deepseek_v31", by_id=False)
    wanted = AnswerConstraints(reasoning=made.reasoning(OPEN), thinking_token_budget=3)
    with pytest.raises(ValueError, match="thinking_token_budget: <think> is not a token"):
        answer_grammar(wanted, made.dialect, made.marker_ids.get)
    assert made.reasoning(CLOSED) is None
    assert answer_grammar(AnswerConstraints(thinking_token_budget=3), made.dialect, made.marker_ids.get) == ""
