import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.sampling_params import SamplingParams
from dsv3.text.deltas import ReasoningDelta, TextDelta, ToolCallStart, merge_deltas
from dsv3.text.output import OutputProcessor
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
    stream = OutputProcessor(TOKENIZER, sampling)
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
def test_deltas_join_to_the_whole_text(ids, skip):
    text, used, _ = run(ids, SamplingParams(skip_special_tokens=skip))
    assert text == TOKENIZER.decode(ids, skip)
    assert used == len(ids)


@settings(deadline=None, max_examples=300)
@given(
    st.text("abX", min_size=1, max_size=40),
    st.lists(st.text("abX", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_the_first_stop_string_ends_the_text(text, stops, include):
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    shown, used, delta = run(byte_ids(text), SamplingParams(stop=tuple(stops), include_stop_str_in_output=include))
    if not ends:
        assert (shown, delta.finish_reason) == (text, "length")
        return
    end, length = min(ends)
    assert shown == (text[:end] if include else text[: end + length])
    assert (used, delta.finish_reason) == (end, "stop")
    assert delta.stop_reason == text[end + length : end]


def test_an_incomplete_character_waits_for_the_rest():
    stream = OutputProcessor(TOKENIZER, SamplingParams())
    deltas = [stream.push([i]).text for i in byte_ids("a🙂b")]
    assert deltas == ["a", "", "", "", "🙂", "b"]
    assert stream.push(byte_ids("é")[:1], "length").text == "\ufffd"


def test_a_possible_stop_string_is_pending_until_it_is_decided():
    stream = OutputProcessor(TOKENIZER, SamplingParams(stop=("END.",)))
    assert [stream.push([i]).text for i in byte_ids("xENENDa")] == ["x", "", "", "EN", "", "", "ENDa"]


def test_pending_text_is_emitted_at_the_end():
    text, _, delta = run(byte_ids("xEN"), SamplingParams(stop=("END",)))
    assert (text, delta.finish_reason, delta.stop_reason) == ("xEN", "length", None)


def test_stop_string_inside_a_push_of_several_tokens():
    delta = OutputProcessor(TOKENIZER, SamplingParams(stop=("b",))).push(byte_ids("abcd"))
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
    stream = OutputProcessor(None, SamplingParams())
    assert stream.push([1, 2], "length").text == ""
    with pytest.raises(ValueError, match="stop_token_ids"):
        OutputProcessor(None, SamplingParams(stop=("x",)))


@pytest.mark.parametrize("count", [1, 16])
def test_matcher_work_is_linear_on_repetitive_text(count):
    """The worst case of a naive search: each character is looked up at most twice, for all patterns together."""

    class Counting(str):
        looked_up = 0

        def __hash__(self):
            Counting.looked_up += 1
            return str.__hash__(self)

        __eq__ = str.__eq__

    matcher = StopMatcher(["a" * 500 + chr(98 + i) for i in range(count)])
    assert matcher.find([Counting("a")] * 5_000) is None
    assert Counting.looked_up <= 2 * 5_000
    assert matcher.num_pending == 500
    assert matcher.find("b") == (1, "a" * 500 + "b")


def test_empty_pattern_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])


def test_merging_deltas_takes_linear_time():
    """A resumed answer may have 100,000 deltas; merged one by one they took minutes, with the interpreter lock held."""

    def seconds(count):
        deltas = (
            [ReasoningDelta(" " * 128)] * count
            + [ToolCallStart(0, "1", "f"), ToolCallStart(1, "2", "f")]
            + [TextDelta("x" * 128)] * count
        )
        begin = time.process_time()
        reasoning, first, second, text = merge_deltas(deltas)
        assert len(reasoning.text) == len(text.text) == 128 * count and (first.index, second.index) == (0, 1)
        return time.process_time() - begin

    few, many = (min(seconds(count) for _ in range(3)) for count in (2_500, 20_000))
    assert many < 24 * few  # it would be more than 64
