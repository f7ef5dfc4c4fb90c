"""Parsing of heads and bodies: what is accepted and rejected, for any split of the input."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv3.server.http import wire
from dsv3.server.http.wire import BadRequest, ChunkedBody, SizedBody, find_head, parse_head

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n"


def head(data: bytes) -> wire.Head:
    buffer = bytearray(data)
    size = find_head(buffer, 0)
    assert size, "the head does not end"
    return parse_head(bytes(buffer[:size]))


def test_a_head_is_parsed():
    found = head(b"GET /a%20b?c=d HTTP/1.1\r\nHost: x\r\nX-Y:  z \t\r\nX-Y: \xff\r\nContent-Length: 12\r\n\r\nrest")
    assert (found.method, found.target, found.version, found.length) == ("GET", b"/a%20b?c=d", "1.1", 12)
    assert found.headers == [(b"host", b"x"), (b"x-y", b"z"), (b"x-y", b"\xff"), (b"content-length", b"12")]
    assert found.keeps_alive and not found.expects_continue
    assert head(CHUNKED + b"expect: 100-Continue\r\nconnection: x, Close\r\n\r\n").length is None
    assert not head(POST + b"connection: x, Close\r\n\r\n").keeps_alive
    assert not head(b"GET / HTTP/1.0\r\n\r\n").keeps_alive
    for method in ("OPTIONS", "CONNECT", "PRI", "FOO", "M-SEARCH"):
        assert head(f"{method} / HTTP/1.1\r\nhost: x\r\n\r\n".encode()).method == method


def test_upgrades_are_ignored():
    """Java's client requests HTTP/2 so, with a body."""
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    assert head(POST + upgrade + b"content-length: 5\r\n\r\n").length == 5
    assert head(CHUNKED + upgrade + b"\r\n").length is None


@pytest.mark.parametrize(
    "data",
    [
        POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        CHUNKED + b"content-length: 3\r\n\r\n",
        POST + b"content-length: 3\r\ncontent-length: 3\r\n\r\n",
        POST + b"content-length: 3, 3\r\n\r\n",
        POST + b"content-length: +3\r\n\r\n",
        POST + b"content-length: -3\r\n\r\n",
        POST + b"content-length: 0x3\r\n\r\n",
        POST + b"content-length: \r\n\r\n",
        POST + b"content-length: " + b"9" * 30 + b"\r\n\r\n",
        POST + b"transfer-encoding: gzip, chunked\r\n\r\n",
        POST + b"transfer-encoding: xchunked\r\n\r\n",
        POST + b"transfer-encoding: identity\r\n\r\n",
        POST + b"transfer-encoding : chunked\r\n\r\n",
        CHUNKED + b"transfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n",
        POST + b"a: b\r\n c\r\n\r\n",
        POST + b"a: b\n\r\n",
        POST + b"a: b\rc: d\r\n\r\n",
        POST + b"a: \0\r\n\r\n",
        POST + b": b\r\n\r\n",
        POST + b"a\r\n\r\n",
        POST + b"host: y\r\n\r\n",
        b"POST / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\nhost: x\n\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/2.0\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.2\r\nhost: x\r\n\r\n",
        b"GET / HTTP/0.9\r\nhost: x\r\n\r\n",
        b"GET  / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /  HTTP/1.1\r\nhost: x\r\n\r\n",
        b" GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GE(T / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET nowhere HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n host: x\r\n\r\n",
        b"GET /" + b"a" * wire.MAX_TARGET_BYTES + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        POST + b"x: y\r\n" * wire.MAX_HEADERS + b"\r\n",
        POST + b"x: " + b"y" * wire.MAX_HEAD_BYTES,
        POST + b"x: " + b"y" * wire.MAX_HEAD_BYTES + b"\r\n\r\n",
    ],
    ids=lambda data: repr(data[-40:]),
)
def test_malformed_heads_are_rejected(data):
    with pytest.raises(BadRequest):
        head(data)


def body(data: bytes) -> bytes:
    taker, buffer, content = ChunkedBody(), bytearray(data), b""
    while buffer and not taker.is_complete:
        content += taker.consume(buffer)[1]
    assert taker.is_complete
    return content


@pytest.mark.parametrize(
    "data",
    [
        b"x\r\n",
        b"-1\r\na\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b"1 \r\na\r\n",
        b" 1\r\na\r\n",
        b"1\na\r\n",
        b"1\r\na\n",
        b"1\r\nab\r\n",
        b"1;a\nb\r\na\r\n",
        b"1;a\rb\r\na\r\n",
        b"f" * 17 + b"\r\na\r\n",
        b"0\r\ncontent-length: 5\r\n\r\n",
        b"0\r\na b\r\n\r\n",
    ],
    ids=repr,
)
def test_malformed_chunks_are_rejected(data):
    with pytest.raises(BadRequest):
        ChunkedBody().consume(bytearray(data))


@pytest.mark.parametrize(
    "unit", [b"1\r\na\r\n", b"1;" + b"e" * 1000 + b"\r\na\r\n", b"0" * 1000, b"0\r\n" + b"t: v\r\n" * 100_000]
)
def test_the_framing_of_a_body_is_limited(unit):
    taker, sent = ChunkedBody(), 0
    with pytest.raises(BadRequest, match="framing"):
        while sent < 10 * wire.MAX_FRAMING_BYTES:
            buffer = bytearray(unit)
            while buffer:
                sent += taker.consume(buffer)[0]
    assert sent <= 2 * wire.MAX_FRAMING_BYTES


def test_the_limit_of_framing_does_not_limit_content():
    assert len(body((b"100000\r\n" + b"a" * 2**20 + b"\r\n") * 10 + b"0\r\n\r\n")) == 10 * 2**20


def test_a_request_behind_a_chunked_body_is_reported():
    taker = ChunkedBody()
    assert taker.consume(bytearray(b"1\r\na\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n"))[1] == b"a"
    assert taker.is_complete and taker.has_more


def test_a_body_consumes_no_more_than_its_length():
    taker, buffer = SizedBody(3), bytearray(b"ab")
    assert taker.consume(buffer) == (2, b"ab") and not taker.is_complete
    buffer += b"cGET /"
    assert taker.consume(buffer) == (1, b"c") and taker.is_complete and buffer == b"GET /"


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.data())
def test_any_split_of_the_bytes_parses_alike(parts, data):
    """Head and content are the same, wherever the input is cut."""
    framed = b"".join(b"%x;e=1\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nt: v\r\n\r\n"
    whole = CHUNKED + b"\r\n" + framed
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=10)))
    buffer, taker, searched, content = bytearray(), None, 0, b""
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        buffer += whole[start:end]
        if taker is None:
            size = find_head(buffer, searched)
            searched = len(buffer)
            if size:
                assert parse_head(bytes(buffer[:size])) == head(whole)
                taker = wire.make_body(head(whole))
                del buffer[:size]
        if taker is not None and buffer:
            content += taker.consume(buffer)[1]
    assert taker is not None and taker.is_complete and content == b"".join(parts)


_TEXT = st.text(st.characters(codec="latin-1"), max_size=12).map(lambda text: text.encode("latin-1"))
_NAME = st.sampled_from([b"a", b"Content-Length", b"Transfer-Encoding", b"Host", b"Connection"]) | _TEXT
_VALUE = st.sampled_from([b"1", b"chunked", b"x", b"close"]) | _TEXT


@given(st.sampled_from([b"GET", b"POST", b"FOO"]), _TEXT, st.lists(st.tuples(_NAME, _VALUE), max_size=5))
def test_accepted_heads_parse_like_h11s(method, path, fields):
    """h11 is the oracle: no head is accepted that it rejects or parses differently."""
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in [(b"Host", b"x"), *fields])
    data = method + b" /" + path + b" HTTP/1.1\r\n" + lines + b"\r\n"
    try:
        found = parse_head(data)
    except BadRequest:
        return
    oracle = h11.Connection(h11.SERVER)
    oracle.receive_data(data)
    request = oracle.next_event()
    assert isinstance(request, h11.Request)
    assert (request.method.decode(), request.target) == (found.method, found.target)
    assert list(request.headers) == found.headers
