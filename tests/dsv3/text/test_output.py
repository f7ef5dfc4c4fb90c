import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.sampling_params import SamplingParams
from dsv3.text.output import OutputStream
from dsv3.text.stop import StopMatcher
from dsv3.text.tokenizer import Tokenizer
from tests.dsv3.text import tiny

TOKENIZER = Tokenizer(tiny.backend(), tiny.config())


def byte_ids(text: str) -> list[int]:
    """One token a byte, so that stop strings and characters cross token borders."""
    ids = {TOKENIZER.token_bytes(i): i for i in range(4, TOKENIZER.vocab_size)}
    return [ids[bytes([b])] for b in text.encode()]


def run(ids, sampling, finish="length", stop_token_id=None):
    """Pushes the tokens one by one; returns the text, the tokens used and the last delta."""
    stream = OutputStream(TOKENIZER, sampling)
    text, used = "", 0
    for i, token in enumerate(ids):
        last = i == len(ids) - 1
        delta = stream.push([token], finish if last else None, stop_token_id if last else None)
        text, used = text + delta.text, used + delta.num_tokens
        if delta.finish_reason:
            break
    return text, used, delta


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=40), st.booleans())
def test_pieces_join_to_the_whole_text(ids, skip):
    text, used, _ = run(ids, SamplingParams(skip_special_tokens=skip))
    assert text == TOKENIZER.decode(ids, skip)
    assert used == len(ids)


@settings(deadline=None, max_examples=300)
@given(
    st.text("abX", min_size=1, max_size=40),
    st.lists(st.text("abX", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings_end_at_their_first_end(text, stops, include):
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    shown, used, delta = run(byte_ids(text), SamplingParams(stop=tuple(stops), include_stop_str_in_output=include))
    if not ends:
        assert (shown, delta.finish_reason) == (text, "length")
        return
    end, length = min(ends)
    assert shown == (text[:end] if include else text[: end + length])
    assert (used, delta.finish_reason) == (end, "stop")
    assert delta.stop_reason == text[end + length : end]


def test_incomplete_character_is_held_back():
    stream = OutputStream(TOKENIZER, SamplingParams())
    pieces = [stream.push([i]).text for i in byte_ids("a🙂b")]
    assert pieces == ["a", "", "", "", "🙂", "b"]
    assert stream.push(byte_ids("é")[:1], "length").text == "\ufffd"


def test_possible_stop_string_is_held_back_and_released():
    stream = OutputStream(TOKENIZER, SamplingParams(stop=("END.",)))
    assert [stream.push([i]).text for i in byte_ids("xENENDa")] == ["x", "", "", "EN", "", "", "ENDa"]


def test_held_text_comes_out_at_the_end():
    text, _, delta = run(byte_ids("xEN"), SamplingParams(stop=("END",)))
    assert (text, delta.finish_reason, delta.stop_reason) == ("xEN", "length", None)


def test_stop_string_inside_a_push_of_several_tokens():
    delta = OutputStream(TOKENIZER, SamplingParams(stop=("b",))).push(byte_ids("abcd"))
    assert (delta.text, delta.num_tokens, delta.finish_reason) == ("a", 2, "stop")


def test_min_tokens_defers_stop_strings():
    text, used, _ = run(byte_ids("abab"), SamplingParams(stop=("b",), min_tokens=3))
    assert (text, used) == ("aba", 4)
    text, _, delta = run(byte_ids("abcabc"), SamplingParams(stop=("abcab",), min_tokens=6))
    assert (text, delta.finish_reason) == ("abcabc", "length")


def test_stop_token_is_hidden_unless_included():
    ids = [*byte_ids("ab"), *byte_ids("c")]
    assert run(ids, SamplingParams(), "stop", ids[-1])[0] == "ab"
    text, used, delta = run(ids, SamplingParams(include_stop_str_in_output=True), "stop", ids[-1])
    assert (text, used, delta.stop_reason) == ("abc", 3, ids[-1])
    eos = TOKENIZER.eos_token_id
    text, used, delta = run([*byte_ids("ab"), eos], SamplingParams(skip_special_tokens=False), "stop", eos)
    assert (text, used, delta.finish_reason, delta.stop_reason) == ("ab", 3, "stop", None)


def test_without_a_tokenizer():
    stream = OutputStream(None, SamplingParams())
    assert stream.push([1, 2], "length").text == ""
    with pytest.raises(ValueError, match="stop_token_ids"):
        OutputStream(None, SamplingParams(stop=("x",)))


def test_matcher_work_is_linear_on_repetitive_text():
    """The classic bad case of a naive search; characters are compared a bounded number of times each."""

    class Counting(str):
        compared = 0

        def __eq__(self, other):
            Counting.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

        def __ne__(self, other):
            Counting.compared += 1
            return str.__ne__(self, other)

    matcher = StopMatcher(["a" * 500 + "b"])
    for _ in range(5_000):
        assert matcher._advance(Counting("a")) is None
    assert Counting.compared <= 4 * 5_000
    assert matcher.held == 500


def test_empty_pattern_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
