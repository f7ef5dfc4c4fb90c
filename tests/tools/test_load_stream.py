"""One request to a scripted server: token counts, times, and all kinds of failures."""

import asyncio
import contextlib
import json
import socket

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv3.http_client import Address, Client, RequestFailed
from tests.tools.fake_openai import fake_server
from tools.load import complete, events


@pytest.fixture(scope="module")
def server():
    with fake_server() as state:
        yield state


def run(server, model, *, times=1, max_tokens=4, timeout_s=30.0, api_key=None, **how):
    async def requests():
        client = Client(Address.parse(server.url), api_key)
        body = json.dumps({"model": model, "prompt": [1, 2, 3], "max_tokens": max_tokens}).encode()
        try:
            return [
                await complete(client, "/v1/completions", body, index=i, scheduled_s=0.0, timeout_s=timeout_s, **how)
                for i in range(times)
            ]
        finally:
            await client.close()

    return asyncio.run(requests())


def counts(record):
    return [arrival.tokens for arrival in record.arrivals]


@pytest.mark.parametrize(
    ("model", "chunks", "prompt", "output"),
    [
        ("plain", [1, 1, 1, 1], 3, 4),
        ("pairs", [2, 2], 3, 4),
        ("ids_only", [3, 1], None, 4),
        ("uncounted", [None, None], None, None),
        ("reasoning", [None], 3, 1),
        ("split", [1], 3, 1),
        ("comments", [], 3, 0),
    ],
)
def test_tokens_are_counted_from_usage_or_ids_and_never_from_chunks(server, model, chunks, prompt, output):
    [record] = run(server, model)
    assert record.error is None
    assert counts(record) == chunks
    assert (record.prompt_tokens, record.output_tokens) == (prompt, output)


def test_a_client_hangs_up(server):
    [record] = run(server, "plain", leave_after=2)
    assert record.error == "left" and counts(record) == [1, 1]


def test_times_are_ordered_and_the_cache_is_reported(server):
    [record] = run(server, "plain")
    times = [record.sent_s, *(arrival.time_s for arrival in record.arrivals), record.finished_s]
    assert times == sorted(times)
    assert record.usage["prompt_tokens_details"] == {"cached_tokens": 1} and record.finish_reason == "length"


@pytest.mark.parametrize(
    ("model", "kind", "words", "received"),
    [
        ("closes", "disconnected", "closed the connection", 2),
        ("silent_end", "disconnected", "without [DONE]", 1),
        ("drops", "disconnected", "closed the connection", 0),
        ("malformed", "malformed", "not json", 0),
        ("error", "error event", "engine died", 1),
        ("abort", "finish: abort", "aborted the request", 1),
        ("busy", "http 503", "queue is full", 0),
        ("garbage", "protocol", "SSH", 0),
    ],
)
def test_failures_have_a_kind_and_keep_received_tokens(server, model, kind, words, received):
    [record] = run(server, model)
    assert record.error == kind and words in record.detail
    assert len(record.arrivals) == received


def test_a_server_that_hangs_is_a_timeout(server):
    [record] = run(server, "hangs", timeout_s=0.3)
    assert record.error == "timeout" and len(record.arrivals) == 1


def test_an_unreachable_server_is_a_connection_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def ask():
        client = Client(Address("127.0.0.1", port, tls=False, prefix=""))
        record = await complete(client, "/v1/completions", b"{}", index=0, scheduled_s=0.0, timeout_s=5)
        await client.close()
        return record

    record = asyncio.run(ask())
    assert record.error == "connect" and str(port) in record.detail


def test_clean_connections_are_reused(server):
    before = server.connections
    assert [record.error for record in run(server, "plain", times=5)] == [None] * 5
    assert server.connections == before + 1


def test_a_failed_response_closes_its_connection(server):
    before = server.connections
    run(server, "malformed", times=3)
    assert server.connections == before + 3


def test_a_kept_connection_that_the_server_closed_is_replaced(server):
    async def two():
        client = Client(Address.parse(server.url))
        ok = json.dumps({"model": "plain", "prompt": [1], "max_tokens": 1}).encode()
        first = await complete(client, "/v1/completions", ok, index=0, scheduled_s=0.0, timeout_s=30)
        drops = json.dumps({"model": "drops", "prompt": [1], "max_tokens": 1}).encode()
        second = await complete(client, "/v1/completions", drops, index=1, scheduled_s=0.0, timeout_s=30)
        await client.close()
        return first, second

    before = len(server.bodies)
    first, second = asyncio.run(two())
    assert first.error is None and second.error == "disconnected"
    # The drop on the kept connection was tried once more on a fresh one.
    assert [body["model"] for body in server.bodies[before:]] == ["plain", "drops", "drops"]


def test_the_key_is_sent_and_the_prefix_kept(server):
    run(server, "plain", api_key="secret")
    assert b"authorization: bearer secret" in server.heads[-1].lower()
    assert server.heads[-1].startswith(b"POST /v1/completions ")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:8000", Address("h", 8000, False, "")),
        ("http://h:8000/v1/", Address("h", 8000, False, "")),
        ("https://h/a/v1", Address("h", 443, True, "/a")),
        ("http://[::1]:80/x", Address("::1", 80, False, "/x")),
        ("http://münchen.example", Address("xn--mnchen-3ya.example", 80, False, "")),
    ],
)
def test_addresses(url, address):
    assert Address.parse(url) == address


HOSTS = ["a..b", ".a", "x" * 64, "a b", "a\0b", "ü" * 64, "[::1", "[x]", "a:99999"]
"""Host names for which resolvers or request lines raise other errors than OSError."""


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://h",
        "http://",
        "http://h:port",
        *(f"http://{host}:80" for host in HOSTS),
        *(f"http://h/{path}" for path in (" ", "ü")),
    ],
)
def test_invalid_addresses_are_refused(url):
    with pytest.raises(ValueError):
        Address.parse(url)


@given(
    st.text(max_size=8)
    | st.lists(st.sampled_from(["a", ".", ":", "%", "[", "]", "ß", " ", "\0", "x" * 63])).map("".join)
)
def test_a_parsed_address_can_be_resolved_and_sent(host):
    """Resolving it raises at most OSError, and it is valid in a request line."""
    try:
        address = Address.parse(f"http://{host}:80/{host}")
    except ValueError:
        return
    with contextlib.suppress(OSError):
        socket.getaddrinfo(address.host, address.port, flags=socket.AI_NUMERICHOST)
    h11.Request(method="GET", target=address.prefix + "/", headers={"Host": address.host}.items())


def parse(*pieces):
    async def collect():
        async def source():
            for piece in pieces:
                yield piece

        return [event async for event in events(source())]

    return asyncio.run(collect())


def test_events_are_parsed_from_any_pieces():
    text = b"data: one\r\n\r\n: comment\ndata:two\nid: 7\ndata: three\n\n\n\ndata: unfinished"
    whole = parse(text)
    assert whole == [b"one", b"two\nthree"]
    for cut in range(len(text)):
        assert parse(text[:cut], text[cut:]) == whole
    assert parse(*(bytes([byte]) for byte in text)) == whole


def test_an_endless_event_is_refused(monkeypatch):
    monkeypatch.setattr("tools.load.MAX_EVENT_BYTES", 100)
    with pytest.raises(RequestFailed, match="more than 100 bytes"):
        parse(b"data: " + b"x" * 200)
