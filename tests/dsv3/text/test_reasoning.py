import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.text.pieces import Reasoning, Text
from dsv3.text.reasoning import ReasoningParser, start_state, writes_reasoning
from tests.dsv3.text import tiny


def split(texts, state):
    parser = ReasoningParser(state)
    pieces = [piece for text in texts for piece in parser.push(Text(text))] + parser.finish()
    return text_of(pieces, Reasoning), text_of(pieces, Text)


def text_of(pieces, kind):
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


@pytest.mark.parametrize(
    ("prompt", "parser", "state"),
    [
        ("<｜Assistant｜><think>", "auto", "reasoning"),
        ("<｜Assistant｜><think>\n", "auto", "reasoning"),
        ("<｜Assistant｜></think>", "auto", "answer"),
        ("<｜Assistant｜></think>", "deepseek_r1", "answer"),
        ("<｜Assistant｜>", "auto", "undecided"),
        ("<｜Assistant｜>", "deepseek_r1", "reasoning"),
        ("<｜Assistant｜><think>", "none", "answer"),
    ],
)
def test_start_state(prompt, parser, state):
    assert start_state(prompt, parser) == state


@pytest.mark.parametrize(
    ("text", "state", "expected"),
    [
        ("why</think>\n\nanswer", "reasoning", ("why", "\n\nanswer")),
        ("<think>\nwhy</think>answer", "reasoning", ("\nwhy", "answer")),
        ("<think>why</think>answer", "undecided", ("why", "answer")),
        (" \n<think>why</think>", "undecided", ("why", "")),
        ("answer </think>", "undecided", ("", "answer </think>")),
        ("<thin", "undecided", ("", "<thin")),
        ("<thin", "reasoning", ("<thin", "")),
        ("never closed </thin", "reasoning", ("never closed </thin", "")),
        ("a</think>b</think>c<think>", "reasoning", ("a", "b</think>c<think>")),
        ("<think>not a marker", "answer", ("", "<think>not a marker")),
        ("</</think>x", "reasoning", ("</", "x")),
        ("</think>x", "reasoning", ("", "x")),
        ("", "reasoning", ("", "")),
    ],
)
def test_split(text, state, expected):
    assert split([text], state) == expected
    assert split(list(text), state) == expected


def reference(text, state):
    """The rule on a whole text."""
    body = text.lstrip()
    if state != "answer" and body.startswith("<think>"):
        state, text = "reasoning", body[len("<think>") :]
    if state != "reasoning":
        return "", text
    reasoning, _, answer = text.partition("</think>")
    return reasoning, answer


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "ink>", "a", " ", "\n"]), max_size=20).map("".join),
    st.sampled_from(["undecided", "reasoning", "answer"]),
    st.integers(1, 7),
)
def test_any_pieces_give_what_the_whole_text_gives(text, state, size):
    assert split([text[i : i + size] for i in range(0, len(text), size)], state) == reference(text, state)


def test_floods_of_white_space_and_markers_are_not_hoarded():
    parser = ReasoningParser("undecided")
    assert "".join(text_of(parser.push(Text(" ")), Text) for _ in range(100)) == " " * 100
    parser = ReasoningParser("reasoning")
    shown = "".join(text_of(parser.push(Text("</think")), (Text, Reasoning)) for _ in range(10_000))
    assert len(shown) >= 7 * 10_000 - 7


def test_template_markers():
    assert writes_reasoning(tiny.CHAT_TEMPLATE)
    assert not writes_reasoning("{{ messages }}")
    assert not writes_reasoning(None)
