"""The whole pipeline: however tokens arrive, the same pieces come out."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.sampling_params import SamplingParams
from dsv3.text.output import OutputStream
from dsv3.text.parsers import ParserOptions, parsers_for
from dsv3.text.pieces import Piece, Reasoning, Text
from dsv3.text.tokenizer import Tokenizer
from tests.dsv3.text import tiny

TOKENIZER = Tokenizer(tiny.backend(), tiny.config())
BYTES = {TOKENIZER.token_bytes(i): i for i in range(4, TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1}
MARKERS = [TOKENIZER.id_of(marker) for marker in tiny.MARKERS]
TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "</th", "ink>", "a", " ", "é", "🙂", "STOP", "ST"]), max_size=12
)
PROMPTS = st.sampled_from(["", "<think>", "</think>"])
NAMES = st.sampled_from(["auto", "deepseek_r1", "none"])


def byte_ids(text):
    return [BYTES[bytes([byte])] for byte in text.encode()]


def tokens():
    """Texts as single bytes, with markers that are one token in between."""
    one = TEXTS.map(lambda parts: byte_ids("".join(parts))) | st.sampled_from(MARKERS).map(lambda i: [i])
    return st.lists(one, max_size=4).map(lambda lists: [i for ids in lists for i in ids])


def joined(pieces):
    """Neighbours of one kind as one."""
    result: list[Piece] = []
    for piece in pieces:
        if result and type(result[-1]) is type(piece):
            result[-1] = type(piece)(result[-1].text + piece.text)
        else:
            result.append(piece)
    return result


def run(ids, sizes, sampling, parsers):
    """Pushes the tokens in parts of these sizes; returns all pieces, the number of tokens used, and the last delta."""
    stream = OutputStream(TOKENIZER, sampling, parsers)
    pieces, used, start = [], 0, 0
    for size in [*sizes, len(ids)]:
        part = ids[start : start + size]
        start += len(part)
        delta = stream.push(part, "length" if start == len(ids) else None)
        assert joined(delta.pieces) == delta.pieces
        pieces, used = pieces + delta.pieces, used + delta.num_tokens
        if delta.finish_reason is not None:
            break
    return joined(pieces), used, delta.finish_reason, delta.stop_reason


@settings(deadline=None, max_examples=400)
@given(
    tokens(),
    st.lists(st.integers(1, 9), max_size=40),
    PROMPTS,
    NAMES,
    st.sampled_from([(), ("STOP",), ("STOP", "a "), ("</think>",)]),
    st.integers(0, 12),
    st.booleans(),
)
def test_any_split_of_the_tokens_gives_the_same_pieces(ids, sizes, prompt, name, stops, min_tokens, include):
    sampling = SamplingParams(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    options = ParserOptions(reasoning=name)
    whole = run(ids, [], sampling, parsers_for(prompt, options))
    assert run(ids, sizes, sampling, parsers_for(prompt, options)) == whole


@settings(deadline=None, max_examples=200)
@given(tokens(), PROMPTS, NAMES)
def test_only_markers_are_lost(ids, prompt, name):
    pieces, *_ = run(ids, [1] * len(ids), SamplingParams(), parsers_for(prompt, ParserOptions(reasoning=name)))
    shown, text = "".join(piece.text for piece in pieces), TOKENIZER.decode(ids)
    lost = [marker for marker in tiny.MARKERS if marker in text]
    assert shown == text or (lost and shown in _without_markers(text))


def _without_markers(text):
    """The text without an opening marker (and white space) at its start, its first closing one, or both."""
    opened = text.lstrip().removeprefix("<think>") if text.lstrip().startswith("<think>") else text
    return {opened, text.replace("</think>", "", 1), opened.replace("</think>", "", 1)}


class Shouting:
    """A parser for tests: the answer in capitals, told a character late."""

    is_done = False

    def __init__(self):
        self._held = ""

    def push(self, piece):
        if not isinstance(piece, Text):
            return [piece]
        text, self._held = self._held + piece.text[:-1].upper(), piece.text[-1].upper()
        return [Text(text)] if text else []

    def finish(self):
        return [Text(self._held)] if self._held else []


def test_what_a_parser_holds_passes_those_after_it():
    """The reasoning parser holds "</th" to the end, and then the next parser sees it."""
    parsers = [*parsers_for("", ParserOptions(reasoning="auto")), Shouting()]
    assert run(byte_ids("<think>why</think>so"), [3, 1, 9], SamplingParams(), parsers)[0] == [
        Reasoning("why"),
        Text("SO"),
    ]
    parsers = [*parsers_for("", ParserOptions(reasoning="auto")), Shouting()]
    assert run(byte_ids("<thi"), [1, 1], SamplingParams(), parsers)[0] == [Text("<THI")]


def test_answers_that_hold_no_reasoning_pass_no_parser():
    assert parsers_for("</think>", ParserOptions(reasoning="auto")) == []
    assert parsers_for("", ParserOptions(reasoning="none")) == []
