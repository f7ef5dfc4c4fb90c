"""The reasoning and tool-call parser, for any output and any split of its tokens."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from dsv3.sampling_params import SamplingParams
from dsv3.server.protocol.openai import MAX_TOOLS
from dsv3.text.deltas import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart, merge_deltas
from dsv3.text.dialects import DIALECTS, ParserState, start_state
from dsv3.text.output import OutputProcessor
from dsv3.text.parser import DSML, MarkFinder, Tools
from dsv3.text.parsers import Parsers, detect_dialect
from dsv3.text.tokenizer import Tokenizer
from tests.dsv3.text import tiny
from tests.dsv3.text.dialects import NAMES, Answer, markers, parser, spelled, tokenizer, tokens, written

THINKING, ANSWERING, SILENT = "<｜Assistant｜><think>", "<｜Assistant｜></think>", "<｜Assistant｜>"
PROMPTS = st.sampled_from([THINKING, ANSWERING, SILENT])
SIZES = st.lists(st.integers(1, 9), max_size=60)
SCHEMA = {"f": {"s": True, "n": False}, "get_weather": {"city": True}}
TOOLS = st.sampled_from([None, Tools(), Tools(parameters=SCHEMA, parallel=False), Tools(parameters=SCHEMA)])
WORDS = (*'a \né🙂"\\{}`f<｜\ufffd', '{"k": 1}', "```json", "functions.f:0", "ST", "STOP", "<｜DS")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text('ab{}"\\\n é🙂`', max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
# Names of parameters are attributes in DSML, where quotes and angle brackets have no escape.
ARGUMENTS = st.dictionaries(st.text("kxyé_", min_size=1, max_size=4), JSON, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "get_weather", "my-f.x"]), ARGUMENTS), min_size=1, max_size=3)


def fragments(dialect):
    """Markers, tags and words that a model may write."""
    block = "tool_calls" if dialect == "deepseek_v4" else "function_calls"
    tags = [
        '<｜DSML｜invoke name="f">',
        '<｜DSML｜parameter name="s" string="true">',
        f"<｜DSML｜{block}>",
        "</｜DSML｜",
    ]
    tags += [
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        f"</｜DSML｜{block}>",
        '<｜DSML｜parameter name="n">',
        '<｜DSML｜parameter name="input">',
        "/>",
    ]
    return [*markers(dialect), *(tags if DIALECTS[dialect].tags else []), *WORDS]


@st.composite
def random_output(draw, dialect, by_id=True):
    """Random tokens: markers anywhere, words, single bytes."""
    texts = draw(st.lists(st.sampled_from(fragments(dialect)), max_size=16))
    ids = [i for text in texts for i in tokens(dialect, text, by_id)]
    return ids[: draw(st.integers(0, len(ids)))] if draw(st.booleans()) else ids


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(NAMES), st.booleans(), SIZES, PROMPTS, TOOLS)
def test_any_split_of_the_tokens_gives_the_same_answer(data, dialect, by_id, sizes, prompt, tools):
    ids = data.draw(random_output(dialect, by_id))
    sampling = SamplingParams(
        stop=data.draw(st.sampled_from([(), ("STOP",), ("STOP", "a "), ("</think>",), ("｜>",), ("ink>a",)])),
        min_tokens=data.draw(st.integers(0, 12)),
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    reasoning = data.draw(st.sampled_from(["deepseek_v3", "deepseek_r1", "none"]))
    finish = data.draw(st.sampled_from(["stop", "length"]))
    settings = {"tools": tools, "prompt": prompt, "reasoning": reasoning, "by_id": by_id}
    whole = Answer(dialect, ids, [], sampling, finish, **settings)
    assert Answer(dialect, ids, sizes, sampling, finish, **settings) == whole


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(NAMES), PROMPTS, TOOLS)
def test_any_cut_of_the_text_gives_the_same_answer(data, dialect, prompt, tools):
    """The vocabulary lacks the markers, and tokens have any length."""
    text = "".join(data.draw(st.lists(st.sampled_from(fragments(dialect)), max_size=16)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]

    def deltas(parts):
        made = parser(dialect, tools, prompt, by_id=False)
        return merge_deltas([delta for part in parts if part for delta in made.push(TextDelta(part))] + made.finish())

    assert deltas(parts) == deltas([text]) == deltas(text)


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(NAMES), PROMPTS, TOOLS, st.sampled_from(["stop", "length"]))
def test_no_marker_reaches_a_client(data, dialect, prompt, tools, finish):
    answer = Answer(dialect, data.draw(random_output(dialect)), prompt=prompt, tools=tools, finish=finish)
    assert not [marker for marker in [*markers(dialect), "｜DSML｜"] if marker in answer.shown]
    assert [call.index for call in answer.deltas if isinstance(call, ToolCallStart)] == list(range(len(answer.calls)))
    assert answer.num_reasoning_tokens <= answer.num_tokens
    assert tools is not None or not answer.calls
    assert tools is None or tools.parallel or len(answer.calls) <= 1


@settings(deadline=None, max_examples=120)
@given(CALLS, st.sampled_from(NAMES), st.booleans(), st.sampled_from(["", "Let me see."]), SIZES, st.booleans())
def test_calls_are_parsed_as_they_were_written(calls, dialect, by_id, content, sizes, thinks):
    """GLM has no quotes: a text that parses as JSON is JSON, and a key has no white space around it."""
    text = ("why</think>" if thinks else "") + written(dialect, calls, content)
    ids = tokens(dialect, text, by_id)
    answer = Answer(dialect, ids, sizes, prompt=THINKING if thinks else ANSWERING, by_id=by_id)
    assert (answer.reasoning, answer.content) == ("why" if thinks else "", content)
    assert [name for name, _ in answer.calls] == [name for name, _ in calls]
    assert (answer.finish_reason, answer.num_dropped) == ("tool_calls", 0)
    for (_, found), (_, meant) in zip(answer.calls, calls, strict=True):
        if not dialect.startswith("glm"):
            assert json.loads(found) == meant
        assert list(json.loads(found)) == list(meant)
    assert answer.num_reasoning_tokens == (len(tokens(dialect, "why</think>", by_id)) if thinks else 0)


@settings(deadline=None, max_examples=100)
@given(CALLS, st.sampled_from(NAMES), st.data())
def test_a_truncated_answer_is_a_prefix_of_the_whole(calls, dialect, data):
    ids = tokens(dialect, written(dialect, calls, "Well."))
    cut = data.draw(st.integers(0, len(ids) - 1))
    whole, part = Answer(dialect, ids), Answer(dialect, ids[:cut], finish="length")
    assert part.finish_reason == "length"
    assert "Well.".startswith(part.content.replace("\ufffd", "").rstrip("<\n"))
    assert len(part.calls) <= len(whole.calls)
    for (name, found), (whole_name, meant) in zip(part.calls, whole.calls, strict=False):
        assert name == whole_name
        assert meant.startswith(found.replace("\ufffd", ""))


EXPECTED = {
    "after <think>": [
        (THINKING, "why</think>\n\nanswer", "why", "\n\nanswer"),
        (THINKING, "<think>\nwhy</think>answer", "\nwhy", "answer"),
        (THINKING, "never closed", "never closed", ""),
        (THINKING, "</think>x", "", "x"),
        (THINKING, "a<think>b</think>c</think>d<think>", "ab", "cd"),
    ],
    "after a prompt without a marker": [
        (SILENT, "<think>why</think>answer", "why", "answer"),
        (SILENT, " \n<think>why</think>", "why", ""),
        (SILENT, " \nanswer", "", " \nanswer"),
        (SILENT, "answer </think>", "", "answer "),
        (SILENT, " ", "", " "),
    ],
    "after </think>": [(ANSWERING, "a<think>b</think>c", "", "abc")],
}


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"), [case for cases in EXPECTED.values() for case in cases]
)
def test_reasoning(prompt, text, reasoning, content):
    answer = Answer("deepseek_v31", tokens("deepseek_v31", text), prompt=prompt, tools=None)
    assert (answer.reasoning, answer.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("why</think>answer", "why", "answer"),
        ("<think>\nwhy</think>answer", "\nwhy", "answer"),
        ("a</think>b</think>c<think>", "a", "b</think>c<think>"),
        ("</</think>x", "</", "x"),
        ("never closed </thin", "never closed </thin", ""),
    ],
)
def test_reasoning_with_a_vocabulary_without_the_markers(text, reasoning, content):
    ids = spelled("deepseek_v31", text, by_id=False)
    answer = Answer("deepseek_v31", ids, prompt=THINKING, tools=None, by_id=False)
    assert (answer.reasoning, answer.content) == (reasoning, content)


def test_markers_written_in_single_bytes_are_text():
    """A model that has a token for a marker and writes its letters means the letters."""
    for text in ["</think>", "<｜tool▁calls▁begin｜>"]:
        ids = spelled("deepseek_v31", f"write {text} here")
        assert Answer("deepseek_v31", ids).content == f"write {text} here"
        assert Answer("deepseek_v31", ids, prompt=THINKING).reasoning == f"write {text} here"


def test_an_answer_truncated_inside_a_character_of_a_tag():
    ids = tokens("deepseek_v32", "Well.\n\n<｜DSML｜function_calls>")
    for cut in range(len("Well.\n\n<") + 2, len(ids)):
        assert Answer("deepseek_v32", ids[:cut], finish="length").content.rstrip("\n\ufffd") in ("Well.", "Well.\n\n<")


@pytest.mark.parametrize("special", [False, True])
def test_the_token_of_tags_is_read_even_where_it_is_special(special):
    """Special tokens are dropped from the text; a part of a tag is not."""
    backend = tiny.backend()
    backend.add_tokens([AddedToken(DSML, normalized=False, special=special)])
    known = Tokenizer(backend, tiny.config())
    parsers = Parsers(known, None, "deepseek_v3", "deepseek_v4")
    stream = OutputProcessor(known, SamplingParams(), parsers.parser(parsers.start(THINKING), Tools()))
    ids = known.encode("why</think>Well." + written("deepseek_v4", [("f", {"s": "x"})]), add_special_tokens=False)
    assert ids.count(known.id_of(DSML)) == 6
    found = [delta for i in ids for delta in stream.push([i]).deltas] + stream.push([], "stop").deltas
    reasoning, content, call, arguments = merge_deltas(found)
    assert (reasoning, content) == (ReasoningDelta("why"), TextDelta("Well."))
    assert (call.name, arguments) == ("f", ToolArgumentsDelta(0, '{"s": "x"}'))


def test_a_part_of_a_tag_without_its_bracket_is_dropped():
    answer = Answer("deepseek_v4", tokens("deepseek_v4", "a ｜DSML｜ b <｜DSML｜"), finish="length")
    assert answer.shown == "a  b "


def test_a_character_interrupted_by_a_marker():
    ids = [*spelled("deepseek_v31", "é")[:1], *tokens("deepseek_v31", "</think>"), *spelled("deepseek_v31", "é")]
    answer = Answer("deepseek_v31", ids, prompt=THINKING)
    assert (answer.reasoning, answer.content) == ("\ufffd", "é")


@pytest.mark.parametrize(
    ("prompt", "always", "expected"),
    [
        (THINKING, False, (ParserState.START, ParserState.REASONING)),
        (THINKING + "\n", False, (ParserState.START, ParserState.REASONING)),
        (ANSWERING, False, (ParserState.CONTENT, ParserState.CONTENT)),
        (ANSWERING, True, (ParserState.CONTENT, ParserState.CONTENT)),
        (SILENT, False, (ParserState.START, ParserState.CONTENT)),
        (SILENT, True, (ParserState.START, ParserState.REASONING)),
        (THINKING + "because", False, (ParserState.REASONING, ParserState.REASONING)),
        (THINKING + "because</think>Well", False, (ParserState.CONTENT, ParserState.CONTENT)),
        ("<｜User｜>what is <think>?" + SILENT, False, (ParserState.START, ParserState.CONTENT)),
        (
            THINKING + "x</think><｜end▁of▁sentence｜><｜User｜>y" + SILENT,
            False,
            (ParserState.START, ParserState.CONTENT),
        ),
        (ANSWERING + "<｜tool▁output▁begin｜>3<｜tool▁output▁end｜>", True, (ParserState.START, ParserState.CONTENT)),
        ("</function_results>\n\n<think>", False, (ParserState.START, ParserState.REASONING)),
        ("<｜User｜>what is <think>?<｜query｜>", True, (ParserState.START, ParserState.CONTENT)),
        (THINKING + "<｜action｜>", False, (ParserState.START, ParserState.CONTENT)),
        ("no turns, <think> long ago" + "." * 99, False, (ParserState.START, ParserState.CONTENT)),
        ("", True, (ParserState.START, ParserState.REASONING)),
    ],
)
def test_the_start_state_of_a_prompt(prompt, always, expected):
    assert start_state(prompt, always) == expected


CALL = written("deepseek_v31", [("f", {"s": "x"})])


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        ("why" + CALL, "why", "", 1),  # a call inside of the reasoning ends it
        ("why</think>" + CALL, "why", "", 1),
        ("why</think>\n\n" + CALL, "why", "", 1),
        ("why</think>Let me see.\n\n" + CALL + "\n", "why", "Let me see.", 1),
        ("</think>" + CALL + "That is it.", "", "That is it.", 1),
        ("</think>" + CALL + "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜>", "", "", 1),
        ("</think>" + CALL + "\n" + CALL, "", "", 2),
        ("</think><｜tool▁calls▁begin｜><｜tool▁calls▁end｜>no calls", "", "no calls", 0),
    ],
)
def test_text_around_calls(text, reasoning, content, num_calls):
    answer = Answer("deepseek_v31", tokens("deepseek_v31", text), prompt=THINKING)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert answer.calls == [("f", '{"s": "x"}')] * num_calls
    assert answer.finish_reason == ("tool_calls" if num_calls else "stop")


BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
INVOKE, UNINVOKE, KEY = '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", '<｜DSML｜parameter name="k"'


@pytest.mark.parametrize(
    ("dialect", "text", "calls", "num_dropped"),
    [
        ("deepseek_v31", f"{BEGIN}f{SEP}{END}", [("f", "{}")], 0),
        ("deepseek_v31", f"{BEGIN}f{END}", [("f", "{}")], 0),
        ("deepseek_v31", f"{BEGIN}f{SEP}```json\n{{}}\n```{END}", [("f", "{}")], 0),
        ("deepseek_v31", f"{BEGIN}f{SEP}{{}}{BEGIN}g{SEP}{{}}{END}", [("f", "{}"), ("g", "{}")], 0),
        ("deepseek_v31", f"{BEGIN}{SEP}{{}}{END}", [], 1),
        ("deepseek_v31", f"{BEGIN}{'f' * 257}{SEP}{{}}{END}{BEGIN}g{SEP}{{}}{END}", [("g", "{}")], 1),
        ("deepseek_v3", f"{BEGIN}function{SEP}f\n{{}}{END}", [("f", "{}")], 0),
        ("deepseek_v3", f"{BEGIN}function{SEP}f{END}", [("f", "{}")], 0),
        ("deepseek_v3", f"{BEGIN}f{END}", [], 1),
        ("kimi_k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>", [("f", "{}")], 0),
        ("kimi_k2", "<|tool_call_begin|>7<|tool_call_argument_begin|>{}<|tool_call_end|>", [], 1),
        ("glm47", "<tool_call>f</tool_call>", [("f", "{}")], 0),
        ("glm47", "<tool_call>f<arg_key>k<arg_value>1</tool_call>", [("f", '{"k": 1}')], 0),
        ("deepseek_v32", '<｜DSML｜invoke name="f"/>', [("f", "{}")], 0),
        ("deepseek_v32", f'<｜DSML｜tool_calls>\n{INVOKE}\n{{"k": 1}}\n{UNINVOKE}', [("f", '{"k": 1}')], 0),
        ("deepseek_v32", '<｜DSML｜ calls><｜DSML｜ invoke name="f"></｜DSML｜ invoke>', [("f", "{}")], 0),
        ("deepseek_v32", f"{INVOKE}{KEY}>[1]</｜DSML｜parameter>{UNINVOKE}", [("f", '{"k": [1]}')], 0),
        ("deepseek_v32", f'{INVOKE}{KEY} string="false">no{UNINVOKE}', [("f", '{"k": "no"}')], 0),
        ("deepseek_v32", "<｜DSML｜function_calls><｜DSML｜invoke></｜DSML｜invoke></｜DSML｜function_calls>", [], 1),
        ("deepseek_v32", f"<｜DSML｜invoke {'x' * 2000} <｜DSML｜wrong>", [], 0),
    ],
)  # fmt: skip
def test_malformed_calls(dialect, text, calls, num_dropped):
    answer = Answer(dialect, tokens(dialect, text))
    assert (answer.calls, answer.num_dropped) == (calls, num_dropped)
    assert answer.finish_reason == ("tool_calls" if calls else "stop")
    assert "DSML" not in answer.shown


def test_ids_of_calls():
    text = written("kimi_k2", [("f", {}), ("g", {})]).replace("functions.g:1", "functions.g:7")
    answer = Answer("kimi_k2", tokens("kimi_k2", text))
    assert [call.id for call in answer.deltas if isinstance(call, ToolCallStart)] == ["functions.f:0", "functions.g:7"]
    text = "<|tool_call_begin|>3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    answer = Answer("kimi_k2", tokens("kimi_k2", text), tools=Tools(parameters={"f": {}}))
    assert [(call.id, call.name) for call in answer.deltas if isinstance(call, ToolCallStart)] == [
        ("functions.f:0", "f")
    ]


def test_arguments_are_streamed():
    """Text token by token; any other value when it is complete."""
    ids = tokens("deepseek_v32", written("deepseek_v32", [("f", {"s": "ab", "n": 12})]))
    found = [p.text for p in _deltas_one_by_one("deepseek_v32", ids) if isinstance(p, ToolArgumentsDelta)]
    assert found == ['{"s": "', "a", "b", '"', ', "n": ', "12", "}"]
    ids = tokens("deepseek_v31", written("deepseek_v31", [("f", {"s": 1})]))
    found = [p.text for p in _deltas_one_by_one("deepseek_v31", ids) if isinstance(p, ToolArgumentsDelta)]
    assert found == ["{", '"', "s", '"', ":", " 1", "}"]


def _deltas_one_by_one(dialect, ids):
    stream = OutputProcessor(tokenizer(dialect), SamplingParams(), parser(dialect))
    return [delta for i in ids for delta in stream.push([i]).deltas]


def test_the_schema_decides_between_text_and_number():
    values = [f"<arg_key>{key}</arg_key><arg_value>12</arg_value>" for key in "sn"]
    text = f"<tool_call>f{''.join(values)}</tool_call>"
    answer = Answer("glm47", tokens("glm47", text), tools=Tools(parameters=SCHEMA))
    assert answer.calls == [("f", '{"s": "12", "n": 12}')]


@pytest.mark.parametrize(
    ("schema", "written_as", "expected"),
    [
        ({"s": True}, '{"s": "x"}', '{"s": "x"}'),
        ({"s": True}, '{"s": "x"', '{"arguments": "{\\"s\\": \\"x\\""}'),
        ({"arguments": None, "s": True}, '{"s": "x"}', '{"arguments": {"s": "x"}}'),
        ({}, '{"s": "x"}', '{"arguments": {"s": "x"}}'),
    ],
)
def test_wrapped_arguments_are_unwrapped(schema, written_as, expected):
    """An object under a name that the schema lacks has the arguments."""
    argument = (
        f'{INVOKE}<｜DSML｜parameter name="arguments" string="true">{written_as}</｜DSML｜parameter>{{}}{UNINVOKE}'
    )
    if not schema or "arguments" in schema:
        argument = argument.replace("true", "false")
    answer = Answer("deepseek_v32", tokens("deepseek_v32", argument), tools=Tools(parameters={"f": schema}))
    assert answer.calls == [("f", expected)]
    both = argument.replace("{}", f"{KEY}>1</｜DSML｜parameter>")
    answer = Answer("deepseek_v32", tokens("deepseek_v32", both), tools=Tools(parameters={"f": schema}))
    assert answer.calls == [("f", expected if expected == written_as else expected[:-1] + ', "k": 1}')]


def test_calls_that_are_not_allowed_are_dropped():
    ids = tokens("deepseek_v31", "Well. " + CALL + CALL)
    answer = Answer("deepseek_v31", ids, tools=None)
    assert (answer.content, answer.calls, answer.num_dropped, answer.finish_reason) == ("Well. ", [], 2, "stop")
    answer = Answer("deepseek_v31", ids, tools=Tools(parallel=False))
    assert (answer.calls, answer.num_dropped, answer.finish_reason) == ([("f", '{"s": "x"}')], 1, "tool_calls")
    answer = Answer(
        "deepseek_v31", tokens("deepseek_v31", f"{BEGIN}{SEP}{{}}{END}" + CALL), tools=Tools(parallel=False)
    )
    assert (len(answer.calls), answer.num_dropped) == (1, 1)  # the first valid one
    answer = Answer("deepseek_v31", tokens("deepseek_v31", CALL * 130))
    assert (len(answer.calls), answer.num_dropped) == (MAX_TOOLS, 2)  # a message with more could not come back


def test_a_marker_may_be_the_stop_token():
    """Some clients stop at the end of the calls: the last call is complete."""
    *ids, end, _ = tokens("deepseek_v31", CALL)
    answer = Answer("deepseek_v31", [*ids, end], eos=False)
    assert (answer.calls, answer.finish_reason, answer.stop_reason) == ([("f", '{"s": "x"}')], "tool_calls", end)


def test_stop_strings_end_calls_too():
    ids = tokens("deepseek_v31", CALL)
    answer = Answer("deepseek_v31", ids, sampling=SamplingParams(stop=("x",)))
    assert (answer.calls, answer.finish_reason, answer.stop_reason) == ([("f", '{"s": "')], "stop", "x")
    answer = Answer("deepseek_v31", ids, sampling=SamplingParams(stop=("end｜>",)))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "end｜>")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_inside_a_marker_hides_the_marker(include):
    sampling = SamplingParams(stop=("ink>", "nk>b"), include_stop_str_in_output=include)
    answer = Answer("deepseek_v31", tokens("deepseek_v31", "a</think>b"), sampling=sampling, prompt=THINKING)
    assert (answer.shown, answer.stop_reason) == ("a", "ink>")
    sampling = SamplingParams(stop=("nk>b",), include_stop_str_in_output=include)
    answer = Answer("deepseek_v31", tokens("deepseek_v31", "a</think>bc"), sampling=sampling, prompt=THINKING)
    assert (answer.shown, answer.stop_reason) == ("ab" if include else "a", "nk>b")


FLOODS = [
    *(["<think>"], ["</think>"], ["<｜tool▁calls▁begin｜>"], [BEGIN], [BEGIN, "f", SEP], [BEGIN, "f", SEP, END]),
    *([BEGIN, "f", SEP, " "], [" "], ["\n"], ["`"], ["<"], ["</think"], ["<｜DSML｜"], ["<｜DSML｜invoke "]),
    *(['<｜DSML｜parameter name="k">'], ['<｜DSML｜invoke name="f">', "x"], [SEP], ["{"], ['"']),
]  # fmt: skip


@pytest.mark.parametrize("dialect", ["deepseek_v31", "deepseek_v32", "deepseek_v4"])
@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: "".join(flood))
def test_repeated_fragments_take_linear_work(dialect, flood, monkeypatch):
    """Pending text is searched again, but never more than a tag's length; all of it would be 4,096 per token."""
    searched = 0
    find = MarkFinder.find

    def counting(self, text, start):
        nonlocal searched
        searched += len(text) - start
        return find(self, text, start)

    monkeypatch.setattr(MarkFinder, "find", counting)
    once = [tokens(dialect, text) for text in flood]
    head, unit = [i for ids in once[:-1] for i in ids], once[-1]
    ids = head + unit * ((8_192 - len(head)) // len(unit))
    Answer(dialect, ids, [1] * len(ids), prompt=THINKING, finish="length")
    assert searched <= 64 * len(ids)


@settings(deadline=None, max_examples=5)
@given(st.data(), st.sampled_from(NAMES))
def test_long_random_output(data, dialect):
    """64k tokens of a repeated random fragment."""
    unit = data.draw(random_output(dialect)) or tokens(dialect, "x")
    ids = (unit * (65_536 // len(unit) + 1))[:65_536]
    answer = Answer(dialect, ids, [256] * 256, prompt=THINKING, finish="length")
    assert answer.num_tokens == 65_536
    assert not [marker for marker in markers(dialect) if marker in answer.shown]


@pytest.mark.parametrize("dialect", NAMES)
def test_long_arguments(dialect):
    """8 KB were too long for a parser of vLLM (vllm#37184)."""
    call = ("f", {"s": 'file "x"\n\t{}' * 2_000})
    [(_, found)] = Answer(dialect, tokens(dialect, written(dialect, [call])), [1] * 50_000).calls
    assert json.loads(found) == call[1]


def test_dialects_are_detected_by_vocabulary_and_template():
    v3 = "{{ '<｜tool▁call▁begin｜>' + '```json' }}"
    assert detect_dialect(tokenizer("deepseek_v3"), v3) == "deepseek_v3"
    assert detect_dialect(tokenizer("deepseek_v3"), v3.replace("```json", "")) == "deepseek_v31"
    assert detect_dialect(tokenizer("deepseek_v3"), tiny.CHAT_TEMPLATE) is None
    assert detect_dialect(tokenizer("kimi_k2"), "") == "kimi_k2"
    glm = "<tool_call>{name}LINE<arg_key>{key}</arg_key>LINE<arg_value>{value}</arg_value>LINE</tool_call>"
    for template in (None, "", glm.replace("LINE", "\n"), glm.replace("LINE", r"{{ '\n' }}")):
        assert detect_dialect(tokenizer("glm45"), template) == "glm45"
    assert detect_dialect(tokenizer("glm47"), glm.replace("LINE", "")) == "glm47"
    assert detect_dialect(tokenizer("deepseek_v32"), "<｜DSML｜function_calls>") == "deepseek_v32"
    assert detect_dialect(tokenizer("deepseek_v4"), "<｜DSML｜tool_calls>") == "deepseek_v4"
    assert detect_dialect(Tokenizer(tiny.backend(), tiny.config()), v3) is None


def test_options_select_the_parser():
    known = tokenizer("deepseek_v31")
    start = ParserState.CONTENT, ParserState.CONTENT
    assert Parsers(known, tiny.CHAT_TEMPLATE, "none", "none").parser(start, None) is None
    assert Parsers(known, "{{ messages }}").parser(start, None) is None
    auto = Parsers(known, tiny.CHAT_TEMPLATE)
    assert (auto.splits_reasoning, auto.dialect) == (True, None)


def test_reasoning_stays_in_the_content_without_a_reasoning_parser():
    ids = tokens("deepseek_v31", "why</think>so" + CALL)
    answer = Answer("deepseek_v31", ids, prompt=THINKING, reasoning="none")
    assert (answer.content, len(answer.calls), answer.num_reasoning_tokens) == ("why</think>so", 1, 0)
