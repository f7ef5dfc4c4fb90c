"""HTTP connections: deadlines, limits, flow control, and slow, silent or hostile clients."""

import asyncio
import contextlib
import json
import os
import resource
import socket
import struct
import sys
import threading

import httpx
import psutil
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from dsv3.server.config import Deadlines
from dsv3.server.http import wire
from dsv3.server.http.api_server import bind
from dsv3.server.http.exchange import WRITER
from dsv3.server.http.http_server import ConnectionLimit, HttpServer, max_admitted, raise_open_files_limit
from tests.dsv3.server import serving
from tests.dsv3.server.conftest import KEY

PATIENT = {"head_s": 60.0, "keep_alive_s": 60.0, "write_s": 60.0, "linger_s": 60.0}
CHUNKED = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n"


def on_a_server(app, scenario, **deadlines):
    """Runs `scenario(client)` against a server for `app` on one event loop; deadlines are long by default."""

    async def run():
        listener = bind("127.0.0.1", 0)
        server = HttpServer(app, listener, ConnectionLimit(1000), Deadlines(**PATIENT | deadlines))
        address = listener.getsockname()
        server.start()
        try:
            async with asyncio.timeout(50):
                await scenario(lambda: Client.connect(address))
        finally:
            await server.close()

    uvloop.run(run())


class Client:
    """A raw connection with small buffers that reads only on request."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, address):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, address)
        return cls(connection)

    async def send(self, data):
        await self._loop.sock_sendall(self.connection, data)

    async def response(self):
        """Reads one response with a Content-Length."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += await self._some()
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += await self._some()
        return head, body

    async def _some(self):
        data = await self._loop.sock_recv(self.connection, 65536)
        assert data, "the connection is closed"
        return data

    async def rest(self):
        """Reads until the server closes or resets the connection."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := await self._loop.sock_recv(self.connection, 65536):
                data += piece
        return data


async def reply(send, body=b"ok", status=200):
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def unread(scope, receive, send):
    """Responds without reading the body."""
    await reply(send, status=401)


async def echo(scope, receive, send):
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        body, more = body + message["body"], message["more_body"]
    await reply(send, b"%d of %d" % (len(body), len(set(body))))


def num_sockets():
    """The number of open sockets of this process, which runs server and client; skips without /proc."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


async def until_sockets(count):
    while num_sockets() > count:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("head", [CHUNKED, b"GET / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"])
def test_a_response_before_the_end_of_its_request_closes_the_connection(head):
    async def scenario(connect):
        client = await connect()
        await client.send(head + b"\r\n1")
        answer = await client.rest()
        assert b" 401 " in answer and b"connection: close" in answer
        with pytest.raises(ConnectionError):
            while True:
                await client.send(b"1\r\na\r\n" * 1000)

    on_a_server(unread, scenario, linger_s=0.1)


def test_an_unread_body_is_not_parsed():
    """The malformed part of it is not detected."""

    async def scenario(connect):
        client = await connect()
        await client.send(CHUNKED + b"\r\nno chunk\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 401 ")

    on_a_server(unread, scenario, linger_s=0.1)


def test_a_client_that_is_still_writing_receives_the_error():
    """The rest is not parsed, and the connection is not reset before the client has read."""

    async def scenario(connect):
        client = await connect()
        await client.send(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 40000000\r\n\r\n")
        await client.send(b"a" * 4_000_000)
        assert b" 401 " in await client.rest()

    on_a_server(unread, scenario)


def test_connections_stay_open_with_any_framing():
    async def scenario(connect):
        client = await connect()
        await client.send(GET + b"\r\n\r\n" + GET + b"\r\n")  # an empty line more, and a second request at once
        for _ in range(2):
            assert (await client.response())[1] == b"0 of 0"
        await client.send(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 300000\r\n\r\n" + b"ab" * 150_000)
        assert (await client.response())[1] == b"300000 of 2"
        await client.send(CHUNKED + b"\r\n" + (b"186A0\r\n" + b"a" * 100_000 + b"\r\n") * 3 + b"0\r\n\r\n")
        assert (await client.response())[1] == b"300000 of 1"
        await client.send(b"POST / HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert await client._some() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"ab")
        assert (await client.response())[1] == b"2 of 2"
        await client.send(GET + b"connection: close\r\n\r\n")
        assert b"0 of 0" in await client.rest()

    on_a_server(echo, scenario)


def test_http_1_0_clients_are_served():
    async def scenario(connect):
        client = await connect()
        await client.send(b"POST / HTTP/1.0\r\ncontent-length: 2\r\n\r\nab")
        assert (await client.rest()).endswith(b"\r\n\r\n2 of 2")

    on_a_server(echo, scenario)


@pytest.mark.parametrize(
    "request_",
    [
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        + GET
        + b"\r\n",
        b"POST / HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + GET + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: b\r\n c: d\r\n\r\n" + GET + b"\r\n",
        b"GET / HTTP/1.1\nhost: x\n\n" + GET + b"\r\n",
        CHUNKED + b"\r\n1\na\r\n0\r\n\r\n" + GET + b"\r\n",
    ],
)
def test_ambiguous_framing_is_refused_and_ends_the_connection(request_):
    """The following request gets no response: a proxy may count it to the same request."""

    async def scenario(connect):
        client = await connect()
        await client.send(request_)
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"

    on_a_server(echo, scenario, linger_s=0.1)


def test_tiny_chunks_are_parsed_in_slices():
    """The event loop runs between two slices, and the number of chunks is limited."""
    turns, sizes = [0], []

    async def app(scope, receive, send):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            sizes.append(len(message["body"]))

    async def scenario(connect):
        def count():
            turns[0] += 1
            asyncio.get_running_loop().call_soon(count)

        count()
        client = await connect()
        await client.send(CHUNKED + b"\r\n" + b"1\r\na\r\n" * 40_000)
        while sum(sizes) < 40_000:
            await asyncio.sleep(0.01)
        assert max(sizes) < wire.MAX_FRAMING_BYTES / 10
        assert turns[0] >= 40_000 / max(sizes)
        await client.send(b"1\r\na\r\n" * 40_000)
        assert b" 400 " in await client.rest()
        assert sum(sizes) < wire.MAX_FRAMING_BYTES / 4

    on_a_server(app, scenario)


def test_a_head_has_a_deadline():
    """A slow head, and none at all."""

    async def scenario(connect):
        slow, silent = await connect(), await connect()
        answer = asyncio.ensure_future(slow.rest())
        for byte in GET * 100:
            if answer.done():
                break
            with contextlib.suppress(ConnectionError):
                await slow.send(bytes([byte]))
            await asyncio.sleep(0.01)
        assert b" 408 " in await answer
        assert await silent.rest() == b""

    on_a_server(echo, scenario, head_s=0.3, linger_s=0.1)


def test_an_idle_connection_is_closed_and_a_second_head_has_a_deadline_too():
    async def scenario(connect):
        idle = await connect()
        await idle.send(GET + b"\r\n")
        await idle.response()
        assert await idle.rest() == b""
        slow = await connect()
        await slow.send(GET + b"\r\n" + GET)
        await slow.response()
        assert b" 408 " in await slow.rest()

    on_a_server(echo, scenario, keep_alive_s=0.2, head_s=0.2, linger_s=0.1)


async def _whole(writer, scope, send):
    await reply(send, bytes(50_000_000))


async def _stream(writer, scope, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    is_held = asyncio.Event()
    writer.start_stream(scope["http_version"], is_held.set, lambda: None)
    while not is_held.is_set():
        writer.write(b"x" * 1000)


async def _small(writer, scope, send):
    """Responds to many requests in a row, each of which fits the buffers."""
    await reply(send, bytes(30_000))


@pytest.mark.parametrize("answer", [_whole, _stream, _small])
def test_a_client_that_does_not_read_is_cut_off(answer):
    """Its descriptor and its response are released; until then the connection buffers little of the response."""
    transports = []

    async def app(scope, receive, send):
        writer = scope["extensions"][WRITER]
        transports.append(writer._transport)
        await receive()
        await answer(writer, scope, send)
        if answer is not _small:
            assert (await receive())["type"] == "http.disconnect"

    async def scenario(connect):
        sockets = num_sockets() + 1
        client = await connect()
        await client.send((GET + b"\r\n") * (500 if answer is _small else 1))
        while not transports:
            await asyncio.sleep(0.01)
        assert transports[0].get_write_buffer_size() < 2**18
        assert num_sockets() > sockets
        await until_sockets(sockets)
        assert len(await client.rest()) < 10_000_000

    on_a_server(app, scenario, write_s=0.3, keep_alive_s=0.3)


def test_closing_a_connection_does_not_wait_for_its_client():
    """The response is complete for the application, but its end is in a buffer that is never read."""

    async def app(scope, receive, send):
        # Fills the system's buffers to the last byte, so that something is left for the process's own.
        transport = scope["extensions"][WRITER]._transport
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not transport.get_write_buffer_size():
            transport.write(b"x" * 10_000)
        await send({"type": "http.response.body"})

    async def scenario(connect):
        sockets = num_sockets() + 1
        client = await connect()
        await client.send(b"GET / HTTP/1.0\r\n\r\n")
        await asyncio.sleep(0.05)
        await until_sockets(sockets)

    on_a_server(app, scenario, write_s=0.3)


class Attacker(threading.Thread):
    """Sends 1-byte chunks as fast as possible, and reconnects whenever it is cut off."""

    def __init__(self, server, head, stop):
        super().__init__()
        self._address, self._head, self._stop_event = ("127.0.0.1", server.port), head, stop
        self.num_closed = 0
        self.start()

    def run(self):
        while not self._stop_event.is_set():
            with socket.create_connection(self._address, 60) as connection:
                try:
                    connection.sendall(self._head)
                    while not self._stop_event.is_set():
                        connection.sendall(b"1\r\na\r\n" * 1000)
                except OSError:
                    self.num_closed += 1


def test_tiny_chunks_do_not_delay_other_clients(locked_server):
    """A client's stream completes while three attackers send at full speed; each of these is cut off.

    One has no key, one a key, and one asks for health.
    """
    stop = threading.Event()
    completions = b"POST /v1/completions HTTP/1.1\r\n"
    with_key = b"content-type: application/json\r\nauthorization: Bearer %b\r\n" % KEY.encode()
    heads = completions, b"GET /health HTTP/1.1\r\n", completions + with_key
    chunked = b"host: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    attackers = [Attacker(locked_server, head + chunked, stop) for head in heads]
    try:
        body = {"prompt": [5, 6, 7], "max_tokens": 300, "stream": True}
        headers = {"authorization": f"Bearer {KEY}"}
        answer = locked_server.http.post("/v1/completions", json=body, headers=headers)
        assert answer.text.endswith("data: [DONE]\n\n")
        locked_server.wait_for(lambda: all(attacker.num_closed for attacker in attackers), 30)
        assert locked_server.http.get("/health").status_code == 200
    finally:
        stop.set()
        for attacker in attackers:
            attacker.join(60)


class Streaming(threading.Thread):
    """A stream in its own thread, `started` once the server has admitted it."""

    def __init__(self, server):
        super().__init__()
        self._server, self.text, self.started = server, "", threading.Event()
        self.start()

    def run(self):
        body = {"prompt": [5, 6, 7], "max_tokens": 1000, "stream": True}
        with httpx.stream("POST", self._server.url + "/v1/completions", json=body, timeout=60) as answer:
            self.started.set()
            self.text = answer.read().decode()


def half_open(server, count):
    """Connections with half a head each."""
    found = []
    for _ in range(count):
        found.append(socket.create_connection(("127.0.0.1", server.port), 60))
        found[-1].sendall(b"GET /health HTTP/1.1\r\nhost: ")
    return found


def test_admitted_connections_are_limited_and_health_is_always_served(model_dir):
    """Silent connections neither block other clients nor stay forever."""
    settings = {"options": {"max_connections": 2}, "factory_options": {"step_s": 0.005}}
    with serving.running(model_dir, **settings) as server:
        streams = [Streaming(server), Streaming(server)]
        assert all(stream.started.wait(60) for stream in streams)
        assert httpx.get(server.url + "/health").status_code == 200
        body = {"prompt": [5], "max_tokens": 1}
        server.wait_for(lambda: httpx.post(server.url + "/v1/completions", json=body).status_code == 503)
        refused = httpx.post(server.url + "/v1/completions", json=body)
        assert (refused.json()["error"]["code"], refused.headers["retry-after"]) == ("too_many_connections", "1")
        silent = half_open(server, 200)
        for _ in range(5):
            assert httpx.get(server.url + "/health").status_code == 200
        for stream in streams:
            stream.join(60)
            assert stream.text.endswith("data: [DONE]\n\n")
        assert server.metric("vllm:admission_rejections_total") >= 2
        for connection in silent:
            connection.close()
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200


def test_connections_leave_descriptors_for_other_files(model_dir):
    """The default limit of connections depends on the limit of open files, which the server never reaches."""
    with serving.running(model_dir, open_files=256) as server:
        process = psutil.Process(server.process.pid)
        assert process.rlimit(psutil.RLIMIT_NOFILE)[0] == 256
        silent = half_open(server, 300)
        for _ in range(5):
            assert httpx.get(server.url + "/health").status_code == 200
        assert 130 < process.num_fds() < 230
        assert "cannot accept connections" not in server.log.read_text()
        for connection in silent:
            connection.close()


def test_a_limit_beyond_the_open_files_is_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert 100 < max_admitted(None, 1) < 200
    assert max_admitted(100, 1) == 100
    assert max_admitted(None, 1, files_per_request=2) == max_admitted(None, 1) // 2
    with pytest.raises(ValueError, match="max_connections: 250 is more than"):
        max_admitted(250, 1)
    with pytest.raises(ValueError, match="max_connections"):
        max_admitted(None, 64)


@pytest.mark.parametrize(
    ("limits", "accepted", "soft", "warns"),
    [
        ((1024, 4096), 4096, 4096, True),
        ((1024, 2**20), 2**20, 2**18, False),
        ((2**20, 2**20), 2**20, 2**20, False),
        ((256, resource.RLIM_INFINITY), 70_000, 2**16, False),
        ((256, resource.RLIM_INFINITY), 200, 256, True),
    ],
)
def test_the_soft_limit_of_open_files_is_raised(monkeypatch, caplog, limits, accepted, soft, warns):
    """macOS accepts less than its hard limit says."""
    found = list(limits)

    def set_limits(_, new):
        if new[0] > accepted or new[1] != limits[1]:
            raise ValueError
        found[:] = new

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(found))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    raise_open_files_limit()
    assert found == [soft, limits[1]] and ("ulimit -Hn" in caplog.text) == warns


def test_a_server_without_descriptors_retries_to_accept(model_dir):
    """It uses little processor time and continues later."""
    with serving.running(model_dir) as server:
        process = psutil.Process(server.process.pid)
        limit = process.rlimit(psutil.RLIMIT_NOFILE)
        server.http.close()
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 3, limit[1]))
        silent = half_open(server, 12)
        server.wait_for(lambda: server.log.read_text().count("cannot accept connections") >= 3)
        before = process.cpu_times()
        server.wait_for(lambda: server.log.read_text().count("cannot accept connections") >= 5)
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system < 0.5
        for connection in silent:
            connection.close()
        server.wait_for(lambda: _is_healthy(server))
        process.rlimit(psutil.RLIMIT_NOFILE, limit)


def _is_healthy(server):
    try:
        return httpx.get(server.url + "/health").status_code == 200
    except httpx.HTTPError:
        return False


class Place:
    """A connection as `ConnectionLimit` sees it."""

    def __init__(self):
        self.is_open = True

    def abort(self):
        self.is_open = False


@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "admit", "release", "hold", "close"]), st.integers(0, 50)), max_size=300
    )
)
def test_the_connection_limit_for_any_sequence_of_events(events):
    """Admitted connections are never evicted, and an unauthenticated one is always accepted."""
    limit, opened, admitted = ConnectionLimit(3), [], set()
    for what, index in [("open", 0)] * 30 + events:
        if what == "open":
            opened.append(Place())
            limit.add(opened[-1])
            assert opened[-1].is_open
        place = opened[-1 - index % len(opened)]
        if what == "admit":
            let_in = limit.admit(place)
            assert let_in == (place in admitted or (place.is_open and len(admitted) < 3))
            admitted |= {place} if let_in else set()
        elif what == "release":
            limit.release(place)
            admitted.discard(place)
        elif what == "hold" and place.is_open:
            limit.record_head_bytes(place, 10_000_000)
            limit.record_head_bytes(place, 0 if index % 2 else 10_000_000)
        elif what == "close":
            limit.close(place)
            admitted.discard(place)
            place.is_open = False
        assert all(place.is_open for place in admitted)
        assert len(limit) == sum(place.is_open for place in opened) <= 3 + 32


def test_connections_closed_before_accept_are_not_read():
    """1,500 chats of 60 KiB from disconnected clients delayed `/health` by 4 s of processor time."""
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["path"])
        await reply(send)

    async def run():
        listener = bind("127.0.0.1", 0)
        server = HttpServer(app, listener, ConnectionLimit(1000), Deadlines(**PATIENT))
        for i in range(40):
            with socket.create_connection(listener.getsockname()) as gone:
                gone.sendall(CHUNKED + b"\r\n")
                if i % 2:  # a reset instead of an end
                    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client = await Client.connect(listener.getsockname())
        await client.send(b"GET /last HTTP/1.1\r\nhost: localhost\r\n\r\n")
        server.start()
        async with asyncio.timeout(50):
            await client.response()
        await server.close()

    uvloop.run(run())
    assert seen == ["/last"]
