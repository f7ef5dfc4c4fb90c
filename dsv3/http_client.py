"""Speaks HTTP/1.1 over asyncio streams: h11 for the protocol, asyncio for the sockets, one request at a time each.

A general client costs too much here: at 128 streams httpx takes 2.5 times the processor time of this module per event
(docs/benchmarking.md). The latencies of a fast server would show it.
"""

import asyncio
import contextlib
import dataclasses
import re
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import h11

READ_BYTES = 1 << 16
_JOINED_BYTES = 1 << 16  # requests up to this size are one write: one packet, one wake-up of the server
MAX_ERROR_BODY_BYTES = 1 << 16

_HOST = re.compile(r"[0-9a-z._-]+|[0-9a-f:.]+(%[0-9a-z._-]+)?")
_PATH = re.compile(r"[!-~]*")


Body = bytes | Sequence[bytes | memoryview]
"""A request's body, or its parts; large ones are not copied."""


class RequestFailed(Exception):
    """A request got no usable answer. `kind` is the short name under which the report counts it."""

    def __init__(self, kind: str, detail: str):
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclasses.dataclass(frozen=True)
class Address:
    """The address of a server; `prefix` is the path in front of `/v1`."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Returns the address in `http[s]://host[:port][/prefix][/v1]`, an international name in its ASCII form.

        Raises ValueError for anything else, and for a name that no resolver or no request line takes.
        """
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = (parts.hostname or "").encode("idna").decode("ascii"), parts.port
        except ValueError:  # UnicodeError is one
            host, port = "", None
        if not _HOST.fullmatch(host) or parts.scheme not in ("http", "https") or not _PATH.fullmatch(parts.path):
            raise ValueError(f"--url {url!r}: expected http://HOST:PORT or https://HOST:PORT")
        tls = parts.scheme == "https"
        return cls(host, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))


class ServerSentEvents:
    """Cuts a body into the data of its events (WHATWG HTML 9.2.6); comments and other fields are skipped."""

    def __init__(self, limit: int):
        self._limit = limit
        self._buffer = bytearray()
        self._is_cut = False  # behind a carriage return, which may be half the end of a line

    def push(self, data: bytes) -> Iterator[bytes]:
        """Yields the data of each event that is complete; raises RequestFailed for one of more than `limit` bytes.

        Each byte is searched once, however many pieces an event comes in.
        """
        data = b"\r" + data if self._is_cut else data
        self._is_cut = data.endswith(b"\r")
        searched, start = max(0, len(self._buffer) - 1), 0
        self._buffer += (data[:-1] if self._is_cut else data).replace(b"\r\n", b"\n")
        while (end := self._buffer.find(b"\n\n", searched)) >= 0:
            event = bytes(memoryview(self._buffer)[start:end])
            start = searched = end + 2
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
        del self._buffer[:start]
        if len(self._buffer) > self._limit:
            raise RequestFailed("malformed", f"an event of more than {self._limit} bytes")


class Response:
    """An answer that is being read: its status, its headers (names in lower case) and its body."""

    def __init__(self, connection: "_Connection", head: h11.Response):
        self._connection = connection
        self.status = head.status_code
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the body as it arrives. Raises RequestFailed "disconnected" when the server closes inside it."""
        while True:
            event = await self._connection.next_event()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            elif isinstance(event, h11.ConnectionClosed):
                raise RequestFailed("disconnected", "the server closed the connection inside an answer")

    async def read(self, limit: int) -> bytes:
        """Returns the body, cut off after `limit` bytes."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > limit:
                break
        return bytes(body[:limit])


class Client:
    """Sends requests to one server, over connections that it keeps where the last answer was read to its end.

    `tls` says whom to trust at https://, in place of the system's authorities.
    """

    def __init__(self, address: Address, api_key: str | None = None, tls: ssl.SSLContext | None = None):
        self._address = address
        self._idle: list[_Connection] = []
        self._tls = (tls or ssl.create_default_context()) if address.tls else None
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._headers = {"Host": f"{host}:{address.port}", "User-Agent": "dsv3", "Accept": "*/*"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, body: Body = b"") -> AsyncIterator[Response]:
        """Sends one request and yields its Response, whose body is to be read inside the `async with`.

        Raises RequestFailed: "connect" where no connection can be made, "http STATUS" with the server's words for any
        status but 200, "disconnected" where the connection ends too early, "protocol" where the answer is not HTTP.
        """
        async with self.exchange(method, path, body) as response:
            if response.status != 200:
                words = await response.read(MAX_ERROR_BODY_BYTES)
                raise RequestFailed(f"http {response.status}", words.decode("utf-8", "replace").strip())
            yield response

    @contextlib.asynccontextmanager
    async def exchange(
        self,
        method: str,
        path: str,
        body: Body = b"",
        headers: Mapping[str, str] | None = None,
        *,
        fresh: bool = False,
    ) -> AsyncIterator[Response]:
        """Does what `request` does, for any status. `fresh` sends over a new connection, hence once at most."""
        connection, head = await self._exchange(method, path, body, self._headers | dict(headers or {}), fresh)
        try:
            yield Response(connection, head)
        finally:
            self._release(connection)

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(
        self, method: str, path: str, body: Body, headers: Mapping[str, str], fresh: bool
    ) -> tuple["_Connection", h11.Response]:
        kept = None if fresh else self._take_idle()
        if kept is not None:
            try:
                return kept, await self._send(kept, method, path, body, headers)
            except RequestFailed as error:
                # The server may close an idle connection while the next request is on its way: that is no failure.
                if error.kind != "disconnected":
                    raise
        made = await self._connect()
        return made, await self._send(made, method, path, body, headers)

    async def _send(
        self, connection: "_Connection", method: str, path: str, body: Body, headers: Mapping[str, str]
    ) -> h11.Response:
        try:
            return await connection.send(method, self._address.prefix + path, headers, body)
        except BaseException:
            connection.close()
            raise

    async def _connect(self) -> "_Connection":
        try:
            reader, writer = await asyncio.open_connection(self._address.host, self._address.port, ssl=self._tls)
        except OSError as error:
            raise RequestFailed("connect", f"{self._address.host}:{self._address.port}: {error}") from error
        return _Connection(reader, writer)

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.usable():
                return connection
            connection.close()
        return None

    def _release(self, connection: "_Connection") -> None:
        if connection.recycle():
            self._idle.append(connection)
        else:
            connection.close()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._protocol = h11.Connection(h11.CLIENT)

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: Body) -> h11.Response:
        """Sends a request and returns the head of its answer."""
        parts = [body] if isinstance(body, bytes) else body
        size = sum(map(len, parts))
        fields = [*headers.items(), ("Content-Type", "application/json"), ("Content-Length", str(size))]
        head = h11.Request(method=method, target=path, headers=fields)
        events = [head, *(h11.Data(data=part) for part in parts), h11.EndOfMessage()]  # type: ignore[arg-type]
        written = [data for event in events if (data := self._protocol.send(event))]
        for data in written if size > _JOINED_BYTES else [b"".join(written)]:
            self._writer.write(data)
        while True:
            event = await self.next_event()
            if isinstance(event, h11.Response):
                return event
            if isinstance(event, h11.ConnectionClosed):
                raise RequestFailed("disconnected", "the server closed the connection before it answered")

    async def next_event(self) -> object:
        try:
            while (event := self._protocol.next_event()) is h11.NEED_DATA:
                self._protocol.receive_data(await self._reader.read(READ_BYTES))
            return event
        except h11.RemoteProtocolError as error:
            if self._reader.at_eof():
                raise RequestFailed("disconnected", "the server closed the connection inside an answer") from error
            raise RequestFailed("protocol", str(error)) from error
        except OSError as error:
            raise RequestFailed("disconnected", str(error)) from error

    def usable(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    def recycle(self) -> bool:
        """Makes the connection ready for another request; returns False where the last answer does not allow it."""
        if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
            return False
        self._protocol.start_next_cycle()
        return self.usable()

    def close(self) -> None:
        self._writer.close()
