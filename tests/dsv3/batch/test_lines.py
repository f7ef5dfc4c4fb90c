"""The batch format: valid request lines, the errors of invalid ones, and output lines."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv3.batch import journal
from dsv3.batch.journal import BadLine, LineParser, RequestLine, answered_number, numbered_lines

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def parse(line, parser=None):
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    return (parser or LineParser()).parse(7, raw)


def test_a_request_line():
    found = parse(GOOD)
    assert found == RequestLine(7, "a", "/v1/completions", b'{"prompt": "x"}')
    assert parse(b"\xef\xbb\xbf" + json.dumps(GOOD).encode()) == found
    assert isinstance(parse(GOOD | {"extra": 1}), RequestLine)


@pytest.mark.parametrize(
    ("line", "code", "custom_id"),
    [
        (b"{", "invalid_json", None),
        (b"[]", "invalid_json", None),
        (b"null", "invalid_json", None),
        (b"\xff\xfe", "invalid_json", None),
        (b'{"custom_id": "a"} x', "invalid_json", None),
        (b'{"a":' * 100_000, "invalid_json", None),
        (b'{"custom_id": "a", "body": ' + b"[" * 100_000, "invalid_json", None),
        (None, "line_too_long", None),
        ({}, "invalid_custom_id", None),
        (GOOD | {"custom_id": ""}, "invalid_custom_id", None),
        (GOOD | {"custom_id": 5}, "invalid_custom_id", None),
        (GOOD | {"custom_id": "x" * 2000}, "invalid_custom_id", None),
        (GOOD | {"method": "GET"}, "invalid_method", "a"),
        ({"custom_id": "a"}, "invalid_method", "a"),
        (GOOD | {"url": "/v1/embeddings"}, "invalid_url", "a"),
        (GOOD | {"url": ["/v1/completions"]}, "invalid_url", "a"),
        (GOOD | {"body": "text"}, "invalid_body", "a"),
        (GOOD | {"body": None}, "invalid_body", "a"),
    ],
)
def test_invalid_lines(line, code, custom_id):
    found = LineParser().parse(7, line) if line is None else parse(line)
    assert isinstance(found, BadLine)
    assert (found.number, found.code, found.custom_id) == (7, code, custom_id)
    written = json.loads(journal.bad_line(found))
    assert written["id"] == "batch_req_7" and written["response"] is None
    assert written["error"]["code"] == code and written["error"]["line"] == 7
    # An error never repeats the input at length.
    assert len(journal.bad_line(found)) < 3000


def test_a_repeated_custom_id_is_refused():
    parser = LineParser()
    assert isinstance(parse(GOOD, parser), RequestLine)
    again = parse(GOOD | {"body": {}}, parser)
    assert isinstance(again, BadLine) and again.code == "duplicate_custom_id" and again.custom_id == "a"
    assert isinstance(parse(GOOD | {"custom_id": "b"}, parser), RequestLine)


def test_the_custom_id_of_an_invalid_line_counts_too():
    parser = LineParser()
    parse(GOOD | {"url": "/nowhere"}, parser)
    assert parse(GOOD, parser).code == "duplicate_custom_id"


@given(st.lists(st.binary(max_size=30)), st.integers(1, 20))
def test_lines_keep_their_numbers_and_long_ones_are_dropped(pieces, limit):
    text = b"\n".join(piece.replace(b"\n", b"") for piece in pieces)
    found = dict(numbered_lines(io.BytesIO(text), limit))
    for number, line in enumerate(text.split(b"\n"), 1):
        if len(line) > limit:
            assert found[number] is None
        elif line.strip():
            assert found[number] == line.strip()
        else:
            assert number not in found


def test_a_line_at_the_limit_is_not_too_long():
    text = b"x" * 10 + b"\n" + b"y" * 10
    assert list(numbered_lines(io.BytesIO(text), 10)) == [(1, b"x" * 10), (2, b"y" * 10)]


def test_a_huge_line_is_never_whole_in_memory():
    class Source(io.RawIOBase):
        """300 MB without a line feed, then a short line."""

        left, largest = 300 << 20, 0

        def readline(self, size=-1):
            self.largest = max(self.largest, size)
            if self.left <= 0:
                tail, self.tail = getattr(self, "tail", b"\nab\n"), b""
                return tail[:1] if tail.startswith(b"\n") and not setattr(self, "tail", tail[1:]) else tail
            size = min(size, self.left)
            self.left -= size
            return b"x" * size

    source = Source()
    assert list(numbered_lines(source, 1 << 20)) == [(1, None), (2, b"ab")]
    assert source.largest <= (1 << 20) + 1


def test_an_output_line_has_the_number_of_its_input_line():
    request = RequestLine(12, "ü\n", "/v1/completions", b"{}")
    line = journal.answer_line(request, 200, "cmpl-1", {"choices": []})
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert answered_number(line) == 12
    assert json.loads(line) == {
        "id": "batch_req_12",
        "custom_id": "ü\n",
        "response": {"status_code": 200, "request_id": "cmpl-1", "body": {"choices": []}},
        "error": None,
    }


@pytest.mark.parametrize("line", [b"", b"{}", b'{"id": 4}', b'{"id": "batch_req_"}', b'{"id": "batch_req_-1"}', b"{\n"])
def test_invalid_output_lines(line):
    with pytest.raises(ValueError):
        answered_number(line)
