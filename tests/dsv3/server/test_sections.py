"""Answers as sections: whatever pieces come, one section at a time, and none of the text is lost."""

import itertools
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from dsv3.server.protocol.errors import ApiError, unavailable
from dsv3.server.protocol.openai import CompletionTokensDetails, PromptTokensDetails, Usage
from dsv3.server.protocol.responses import ResponsesRequest
from dsv3.server.serving.anthropic import MessagesHandler
from dsv3.server.serving.conversation import Sections
from dsv3.server.serving.responses import ResponsesHandler
from dsv3.text.pieces import Reasoning, Text, ToolArguments, ToolCallStart

WORDS = st.text(min_size=1, max_size=3)
STRETCHES = st.one_of(
    st.lists(WORDS.map(Text), min_size=1, max_size=3),
    st.lists(WORDS.map(Reasoning), min_size=1, max_size=3),
    st.lists(WORDS, max_size=3),  # the arguments of a call
)


def pieces_of(stretches):
    """Pieces as the parser makes them: calls are numbered, and arguments follow their call."""
    pieces, calls = [], 0
    for stretch in stretches:
        if stretch and not isinstance(stretch[0], str):
            pieces += stretch
            continue
        pieces += [ToolCallStart(calls, f"id{calls}", "f"), *(ToolArguments(calls, text) for text in stretch)]
        calls += 1
    return pieces


@given(stretches=st.lists(STRETCHES, max_size=6), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_sections_come_one_after_the_other(stretches, cuts):
    pieces, sections, changes = pieces_of(stretches), Sections(), []
    edges = [0, *sorted(min(cut, len(pieces)) for cut in cuts), len(pieces)]
    for start, stop in itertools.pairwise(edges):
        changes += sections.take(pieces[start:stop])
    changes += sections.end()
    assert sections.end() == []
    open_section = None
    for change in changes:
        match change.what:
            case "opened":
                assert open_section is None
                open_section = change.section
            case "grown":
                assert change.section is open_section and change.text
            case "closed":
                assert change.section is open_section
                open_section = None
    assert open_section is None
    kinds = {Text: "text", Reasoning: "reasoning", ToolArguments: "call"}
    for kind, name in kinds.items():
        told = "".join(piece.text for piece in pieces if isinstance(piece, kind))
        assert told == "".join(section.text for section in sections.all if section.kind == name)
    assert [s.call for s in sections.all if s.call] == [piece for piece in pieces if isinstance(piece, ToolCallStart)]
    assert all(a.kind != b.kind or a.kind == "call" for a, b in itertools.pairwise(sections.all))


def answer_of(kind):
    usage = Usage(3, 2, 5, PromptTokensDetails(0), CompletionTokensDetails(0))
    answer = kind(SimpleNamespace(), b"")
    answer.generation = SimpleNamespace(id="g", usage=usage)
    answer.model = "m"
    return answer


def test_a_stream_that_fails_says_so_in_its_own_words():
    """The engine is gone, after the status was sent."""
    error = unavailable("the engine has died", "engine_unavailable")
    assert answer_of(MessagesHandler).failure(error) == (
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"the engine has died"}}'
    )
    answer = answer_of(ResponsesHandler)
    answer.asked = ResponsesRequest(input="x")
    answer.sections.take([Text("half")])
    name, _, data = answer.failure(error).partition(b"\n")
    assert name == b"event: response.failed"
    assert b'"error":{"code":"engine_unavailable","message":"the engine has died"}' in data
    assert b'"status":"incomplete"' in data and b'"text":"half"' in data


def test_errors_take_other_names():
    error = ApiError(400, "max_tokens: 0 is not between 1 and 2", param="max_tokens", code="c").renamed(
        {"max_tokens": "a.b"}
    )
    assert (error.body.message, error.body.param, error.body.code) == ("a.b: 0 is not between 1 and 2", "a", "c")
