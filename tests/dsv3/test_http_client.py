"""The client of other servers: what it sends, what it makes of each answer, and which connections it keeps."""

import asyncio
import contextlib

import pytest

from dsv3.http_client import Address, Client, RequestFailed

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Scripted:
    """A server that answers every request with the same bytes and then closes, or keeps, the connection."""

    def __init__(self, answer: bytes, keeps: bool = False):
        self.answer, self.keeps = answer, keeps
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            answered = False
            while self.keeps or not answered:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])))
                writer.write(self.answer)
                await writer.drain()
                answered = True
        writer.close()


def ask(server, *requests, path="/x", key=None):
    """Makes the requests one after the other, each a body and options of `exchange`; returns what came of each."""

    async def run():
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        client = Client(Address.parse(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/pre/v1"), key)
        found = []
        for body, options in requests:
            try:
                async with asyncio.timeout(20), client.exchange("POST", path, body, **options) as response:
                    found.append((response.status, response.headers, await response.read(100)))
            except RequestFailed as error:
                found.append(error)
        await client.close()
        listening.close()
        return found

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"", "disconnected", "closed the connection before it answered"),
        (b"HTTP/1.1 200 OK\r\nconte", "disconnected", "before it answered"),
        (CHUNKED + b"5\r\nhel", "disconnected", "inside a response"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nabc", "disconnected", "inside a response"),
        (CHUNKED + b"5\r\nhello\r\nzz\r\n\r\n", "protocol", "chunk size"),
        (b"SSH-2.0\r\n", "protocol", "SSH"),
        (b"HTTP/1.1 200 OK\r\nna me: 3\r\n\r\n", "protocol", "na me"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000 + b"\r\n\r\n", "protocol", "bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\na", "protocol", "Content-Length"),
    ],
)
def test_what_is_no_answer_has_a_kind(answer, kind, words):
    [failed] = ask(Scripted(answer), (b"{}", {}))
    assert failed.kind == kind and words in failed.detail


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (OK, 200, b"abc"),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", 200, b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"abc"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", 302, b""),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc", 200, b"abc"),
        (b"HTTP/1.1 429 Busy\r\nRetry-After: 3\r\ncontent-length: 300\r\n\r\n" + b"a" * 300, 429, b"a" * 100),
    ],
)
def test_an_answer_is_given_as_it_is(answer, status, body):
    """No redirection is followed, nothing is decompressed, and no more is read than is asked for."""
    [(found, headers, content)] = ask(Scripted(answer), (b"{}", {}))
    assert (found, content) == (status, body)
    assert status != 429 or headers["retry-after"] == "3"


@pytest.mark.parametrize("body", [b"{}", b"", [b"x" * 2_000_000, memoryview(b"y" * 100_000)], [b"{", b"}"]])
def test_a_request_says_what_it_is(body):
    server = Scripted(OK)
    ask(server, (body, {"headers": {"X-Request-Id": "q"}}), path="/a%2fb?x=1&y=%20", key="secret")
    parts = [body] if isinstance(body, bytes) else body
    assert server.bodies == [b"".join(parts)]
    lines = server.heads[0].split(b"\r\n")
    assert lines[0] == b"POST /pre/a%2fb?x=1&y=%20 HTTP/1.1"
    fields = dict(line.split(b": ") for line in lines[1:-2])
    assert fields.pop(b"Host").startswith(b"127.0.0.1:")
    assert fields == {
        b"User-Agent": b"dsv3",
        b"Accept": b"*/*",
        b"Authorization": b"Bearer secret",
        b"Content-Type": b"application/json",
        b"Content-Length": b"%d" % len(server.bodies[0]),
        b"X-Request-Id": b"q",
    }


def test_a_connection_is_kept_unless_a_new_one_is_asked_for():
    server = Scripted(OK, keeps=True)
    ask(server, *[(b"{}", {})] * 3, *[(b"{}", {"fresh": True})] * 2, (b"{}", {}))
    assert server.num_connections == 3 and len(server.heads) == 6


def test_a_request_over_a_new_connection_is_sent_once():
    server = Scripted(b"")
    [failed] = ask(server, (b"{}", {"fresh": True}))
    assert failed.kind == "disconnected" and len(server.heads) == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://127.0.0.1:1"])
def test_who_cannot_be_reached_is_named(url):
    async def run():
        client, address = Client(Address.parse(url)), url.partition("//")[2]
        with pytest.raises(RequestFailed, match=f"^connect: {address}: ") as failed:
            async with client.exchange("GET", "/"):
                pass
        await client.close()
        return failed.value.kind

    assert asyncio.run(run()) == "connect"
