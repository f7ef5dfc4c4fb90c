"""Compares this tree's HTTP server with others in front of the same application: what a client can do to each.

  python -m benchmarks.http_servers [--only NAME]           own, and those of the others that are installed
  python -m benchmarks.front --http NAME                    streams through one of them
  python -m benchmarks.hostile --http NAME                  attacks on one of them

A line per probe, a column per server; `docs/server.md` has the table. `install` is how the other two benchmarks put a
server of others in this one's place: it runs in the same process, over the same listener, on the same loop.
"""

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import json
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import uvloop

from dsv3.server.config import Deadlines
from dsv3.server.http import serving
from dsv3.server.http.api_server import bind
from dsv3.server.http.exchange import ADMIT, REQUEST_ID, WRITER
from dsv3.server.http.http_server import ConnectionLimit

OWN = "own"
OTHERS = {"uvicorn-httptools": "uvicorn", "uvicorn-h11": "uvicorn", "hypercorn": "hypercorn", "granian": "granian"}
"""Servers of others, by the package that each needs."""

_CLOSE_S = 3
_MIB = 2**20
_PATIENCE_S = 8.0  # then a probe says "never"
_DEADLINE_S = 2.0  # what servers are told, where they can be told


def install(name: str) -> None:
    """Has `dsv3.server.http.serving` use the server of that name in this process."""
    if name != OWN:
        serving.HttpServer = functools.partial(OtherServer, name)


class _Events:
    """What a stream needs of its connection: events go to the server one by one, and gather while it is busy."""

    def __init__(self, send):
        self._send, self._loop = send, asyncio.get_running_loop()
        self._waiting, self._is_busy, self._is_held = bytearray(), False, False
        self._idle = asyncio.Event()
        self._idle.set()
        self._on_pause = self._on_resume = lambda: None

    def claim(self, http_version, on_pause, on_resume) -> None:
        self._on_pause, self._on_resume = on_pause, on_resume

    def free(self) -> None:
        self._on_pause = self._on_resume = lambda: None

    def write(self, data: bytes) -> None:
        self._waiting += data + b"\n\n"
        if not self._is_busy:
            self._push()
        elif len(self._waiting) > 2**14 and not self._is_held:
            self._is_held = True
            self._on_pause()

    def _push(self) -> None:
        body, self._waiting = bytes(self._waiting), bytearray()
        message = {"type": "http.response.body", "body": body, "more_body": True}
        task = asyncio.Task(_sent(self._send, message), loop=self._loop, eager_start=True)
        if not task.done():
            self._is_busy = True
            self._idle.clear()
            task.add_done_callback(self._pushed)

    def _pushed(self, task: asyncio.Task) -> None:
        self._is_busy = False
        if self._waiting:
            self._push()
        if not self._is_busy:
            self._idle.set()
            if self._is_held:
                self._is_held = False
                self._on_resume()

    async def drained(self) -> None:
        await self._idle.wait()


async def _sent(send, message) -> None:
    with contextlib.suppress(Exception):  # servers differ in what they raise for a client that has gone
        await send(message)


def _adapted(app, limit: ConnectionLimit):
    """Returns `app` for servers that know ASGI alone."""

    async def adapted(scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        events, request_id = _Events(send), uuid.uuid4().hex

        async def sent(message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await events.drained()
            await send(message)

        place = _Place()
        limit.open(place)
        extensions = {WRITER: events, ADMIT: lambda: limit.admit(place), REQUEST_ID: request_id}
        try:
            await app({**scope, "headers": list(scope["headers"]), "extensions": extensions}, receive, sent)
        finally:
            limit.close(place)

    return adapted


class _Place:
    def abort(self) -> None:
        """A request cannot close its connection in ASGI."""


class OtherServer:
    """A server of others, with the methods of `HttpServer`."""

    def __init__(self, name: str, app, listener: socket.socket, limit: ConnectionLimit, deadlines: Deadlines, *_):
        self._make = {"uvicorn": self._uvicorn, "hypercorn": self._hypercorn, "granian": self._granian}[OTHERS[name]]
        self._name, self._app, self._deadlines = name, _adapted(app, limit), deadlines
        self._listener = listener

    def start(self) -> None:
        self._stop, work = self._make()
        self._serving = asyncio.ensure_future(work)

    def reload(self) -> None:
        """None of them reads a certificate anew."""

    async def close(self) -> None:
        self._stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._serving, 10 * _CLOSE_S)

    def _uvicorn(self):
        import uvicorn

        config = uvicorn.Config(
            self._app,
            http=self._name.removeprefix("uvicorn-"),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=self._deadlines.keep_alive_s,
            timeout_graceful_shutdown=_CLOSE_S,
            h11_max_incomplete_event_size=2**16,
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # signals are the application's
        return lambda: setattr(server, "should_exit", True), server.serve([self._listener])

    def _hypercorn(self):
        from hypercorn.asyncio import serve
        from hypercorn.config import Config

        config, stop = Config(), asyncio.Event()
        config.bind = [f"fd://{self._listener.detach()}"]
        config.errorlog = None
        config.keep_alive_timeout = self._deadlines.head_s  # of heads and idle connections alike
        config.graceful_timeout = _CLOSE_S
        config.h11_max_incomplete_size = 2**16
        return stop.set, serve(self._app, config, shutdown_trigger=stop.wait)

    def _granian(self):
        from granian._granian import SocketHolder
        from granian.constants import HTTPModes, Interfaces
        from granian.http import HTTP1Settings
        from granian.server.embed import Server

        limits = HTTP1Settings(header_read_timeout=int(self._deadlines.head_s * 1e3), max_buffer_size=2**16)
        options = {"http": HTTPModes.http1, "interface": Interfaces.ASGINL, "http1_settings": limits}
        server = Server(self._app, **options, websockets=False, log_enabled=False, backpressure=2**16)
        listener = SocketHolder(self._listener.detach(), False, 2048)
        # Embedded, it binds an address of its own; an inherited socket is not foreseen.
        server._init_shared_socket = lambda: vars(server).update(_ssp=None, _shd=listener)
        server.workers_kill_timeout = _CLOSE_S
        return server.stop, server.serve()


# What follows serves an application for the probes, in a process of its own, and probes it.


class _Toy:
    """The application of the probes; `/state` says what its streams have seen."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"sent": 0, "held": None, "gone": None}

    async def __call__(self, scope, receive, send) -> None:
        path = scope["path"]
        if path == "/stream":
            await self._stream(scope, receive, send)
            return
        size, more = 0, path == "/echo"
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        body = json.dumps(self.state).encode() if path == "/state" else b"%d" % size
        headers = [(b"content-length", b"%d" % len(body))]
        status = 401 if path == "/refused" else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, scope, receive, send) -> None:
        """Streams until it is held, and waits for the client's end."""
        state, pace = self.state, b"slow" in scope["query_string"]
        state.update(sent=0, held=None, gone=None)
        writer, is_held = scope["extensions"][WRITER], asyncio.Event()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        writer.claim(scope["http_version"], is_held.set, is_held.clear)
        watching = asyncio.ensure_future(_until_gone(receive))
        while not watching.done():
            if not is_held.is_set() and state["sent"] < 64 * _MIB:
                writer.write(b"x" * 1000)
                state["sent"] += 1000
            elif state["held"] is None:
                state["held"] = time.monotonic()
            await asyncio.sleep(0.05 if pace or is_held.is_set() else 0)
        state["gone"] = time.monotonic()
        writer.free()


async def _until_gone(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _serve(name: str) -> None:
    install(name)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    deadlines = Deadlines(head_s=_DEADLINE_S, keep_alive_s=_DEADLINE_S, write_s=_DEADLINE_S, linger_s=1.0)
    server = serving.HttpServer(_Toy(), listener, ConnectionLimit(65536), deadlines)
    server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await server.close()


class _Server:
    """A server in a process of its own."""

    def __init__(self, name: str):
        command = [sys.executable, "-m", "benchmarks.http_servers", "--serve", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())
        self._usage = psutil.Process(self.process.pid)
        self.get("/")

    def memory(self) -> float:
        return self._usage.memory_info().rss / _MIB

    def cpu_s(self) -> float:
        times = self._usage.cpu_times()
        return times.user + times.system

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=_PATIENCE_S)

    @contextlib.contextmanager
    def connected(self, first: bytes = b"") -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=_PATIENCE_S) as connection:
            connection.sendall(first)
            yield connection

    def end(self) -> float:
        """Ends it; returns how many seconds that took."""
        started = time.monotonic()
        if not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(2 * _PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return time.monotonic() - started


_GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
_POST = b"POST %b HTTP/1.1\r\nHost: localhost\r\n"


def _until_closed(connection: socket.socket, feed: bytes = b"") -> str:
    """Reads until the server hangs up; sends `feed` again and again meanwhile. Returns when, and the status."""
    started, data = time.monotonic(), b""
    connection.settimeout(0.1)
    while (passed := time.monotonic() - started) < _PATIENCE_S:
        try:
            if feed:
                connection.sendall(feed)
            piece = connection.recv(2**16)
            data += piece
            if not piece:
                break
        except TimeoutError:
            continue
        except OSError:
            break
    else:
        return "never"
    status = data[9:12].decode() if data.startswith(b"HTTP/") else "no answer"
    return f"{passed:.1f} s, {status}"


def _half_head(server: _Server) -> str:
    with server.connected(_GET) as connection:
        return _until_closed(connection)


def _trickled_head(server: _Server) -> str:
    with server.connected(_GET + b"x: ") as connection:
        return _until_closed(connection, b"a")


def _endless_head(server: _Server) -> str:
    """Sends a head of 64 MiB, of headers of 1 kB each."""
    before, sent = server.memory(), 0
    with server.connected(_GET) as connection:
        connection.settimeout(1.0)
        try:
            while sent < 64 * _MIB:
                connection.sendall((b"x: " + b"a" * 1000 + b"\r\n") * 16)
                sent += 16 * 1005
        except OSError:
            pass
        growth = server.memory() - before
        return f"{'all of it' if sent >= 64 * _MIB else 'refused'}, +{growth:.0f} MiB"


def _two_lengths(server: _Server) -> str:
    lines = _POST % b"/echo" + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server.connected(lines + b"0\r\n\r\n" + _GET + b"\r\n") as connection:
        connection.settimeout(1.0)
        data = b""
        with contextlib.suppress(OSError):
            while piece := connection.recv(2**16):
                data += piece
        return f"{data[9:12].decode()}, {data.count(b'HTTP/1.1 ')} answered"


def _unread_stream(server: _Server) -> str:
    """Asks for a stream and reads nothing of it."""
    before = server.memory()
    with server.connected() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(_GET.replace(b"/ ", b"/stream ") + b"\r\n")
        time.sleep(_DEADLINE_S + 2)
        state = server.get("/state").json()
        growth = server.memory() - before
    held = f"held after {state['sent'] / _MIB:.1f} MiB (+{growth:.0f})" if state["held"] else "not held"
    return f"{held}, {'cut off' if state['gone'] else 'kept'}"


def _hung_up(server: _Server) -> str:
    """Reads a little of a stream and hangs up."""
    with server.connected(_GET.replace(b"/ ", b"/stream?slow ") + b"\r\n") as connection:
        connection.recv(100)
    started = time.monotonic()
    while time.monotonic() - started < _PATIENCE_S:
        if (gone := server.get("/state").json()["gone"]) is not None:
            return f"{max(0.0, gone - started) * 1e3:.0f} ms"
        time.sleep(0.02)
    return "never"


def _tiny_chunks(server: _Server) -> str:
    """Sends 1-byte chunks for 3 s; says how many were taken and how slow others are answered."""
    used, sent, worst, until = server.cpu_s(), 0, 0.0, time.monotonic() + 3
    asked = time.monotonic()
    with server.connected(_POST % b"/echo" + b"Transfer-Encoding: chunked\r\n\r\n") as connection:
        try:
            while time.monotonic() < until:
                connection.sendall(b"1\r\na\r\n" * 10_000)
                sent += 10_000
                if time.monotonic() - asked > 0.3:
                    asked = time.monotonic()
                    server.get("/")
                    worst = max(worst, time.monotonic() - asked)
        except OSError:
            return f"refused after {sent:,}, {server.cpu_s() - used:.2f} s"
    return f"{sent:,} taken, {server.cpu_s() - used:.2f} s, others wait {worst * 1e3:.0f} ms"


def _many_idle(server: _Server) -> str:
    """Opens 2,000 connections with half a head each."""
    before, used = server.memory(), server.cpu_s()
    with contextlib.ExitStack() as stack:
        for _ in range(2000):
            stack.enter_context(server.connected(_GET))
        growth = (server.memory() - before) * 1024 / 2000
        return f"{growth:.1f} KiB each, {(server.cpu_s() - used) * 1e6 / 2000:.0f} us each"


def _stopped(server: _Server) -> str:
    """Stops it with a stream open."""
    with server.connected(_GET.replace(b"/ ", b"/stream?slow ") + b"\r\n") as connection:
        connection.recv(100)
        return f"{server.end():.1f} s, status {server.process.returncode}"


PROBES: dict[str, Callable[[_Server], str]] = {
    "half a head": _half_head,
    "a head of a byte per 0.1 s": _trickled_head,
    "a head of 64 MiB": _endless_head,
    "two lengths, a request behind": _two_lengths,
    "a stream that is not read": _unread_stream,
    "a stream hung up": _hung_up,
    "1-byte chunks": _tiny_chunks,
    "2,000 half heads": _many_idle,
    "stopped with a stream open": _stopped,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--servers", default=",".join([OWN, *OTHERS]))
    parser.add_argument("--serve", default=None, help="serve for the probes: a part of this command")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        uvloop.run(_serve(arguments.serve))
        return
    chosen = arguments.servers.split(",")
    names = [name for name in chosen if name == OWN or importlib.util.find_spec(OTHERS[name]) is not None]
    print(f"| | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}", flush=True)
    for title, probe in PROBES.items():
        if arguments.only not in title:
            continue
        cells = []
        for name in names:
            server = _Server(name)
            try:
                cells.append(probe(server))
            except (OSError, httpx.HTTPError) as error:
                cells.append(type(error).__name__)
            finally:
                server.end()
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
