"""Speaks HTTP/1.1 as a client of other servers: aiohttp, with bounds, kinds of errors and nothing that it does unasked.

No redirection is followed, no cookie kept, no proxy of the environment used, nothing decompressed.
"""

import contextlib
import dataclasses
import re
import ssl
import types
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import aiohttp
import yarl

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


class StreamedResponse:
    """An answer that is being read: its status, its headers (names in any case) and its body."""

    def __init__(self, found: aiohttp.ClientResponse):
        self._content = found.content
        self.status = found.status
        self.headers: Mapping[str, str] = found.headers

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the body as it arrives. Raises RequestFailed "disconnected" when the server closes inside it."""
        while True:
            with _failures("inside an answer"):
                piece = await self._content.readany()
            if not piece:
                return
            yield piece

    async def read(self, limit: int) -> bytes:
        """Returns the body, cut off after `limit` bytes."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > limit:
                break
        return bytes(body[:limit])


class Client:
    """Sends requests to one server, over connections that it keeps where the last answer has come to its end.

    `tls` says whom to trust at https://, in place of the system's authorities.
    """

    def __init__(self, address: Address, api_key: str | None = None, tls: ssl.SSLContext | None = None):
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._base = f"{'https' if address.tls else 'http'}://{host}:{address.port}{address.prefix}"
        self._tls = (tls or ssl.create_default_context()) if address.tls else True
        self._headers = {"Host": f"{host}:{address.port}", "User-Agent": "dsv3", "Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether each request has a new connection

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, body: Body = b"") -> AsyncIterator[StreamedResponse]:
        """Sends one request and yields its response, whose body is to be read inside the `async with`.

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
    ) -> AsyncIterator[StreamedResponse]:
        """Does what `request` does, for any status. `fresh` sends over a new connection, hence once at most."""
        found = await self._exchange(method, path, body, self._headers | dict(headers or {}), fresh)
        try:
            yield StreamedResponse(found)
        finally:
            found.close()  # the connection, unless the answer has come to its end

    async def close(self) -> None:
        """Closes the idle connections."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    async def _exchange(
        self, method: str, path: str, body: Body, headers: Mapping[str, str], fresh: bool
    ) -> aiohttp.ClientResponse:
        kept: list[object] = []
        if not fresh:
            try:
                return await self._send(False, method, path, body, headers, kept)
            except RequestFailed as error:
                # The server may close an idle connection while the next request is on its way: that is no failure.
                if error.kind != "disconnected" or not kept:
                    raise
        return await self._send(True, method, path, body, headers, kept)

    async def _send(
        self, fresh: bool, method: str, path: str, body: Body, headers: Mapping[str, str], kept: list[object]
    ) -> aiohttp.ClientResponse:
        """Sends a request and returns the head of its answer; adds to `kept` where an idle connection is used."""
        parts = [body] if isinstance(body, bytes) else body
        size = sum(map(len, parts))
        with _failures("before it answered"):
            return await self._session(fresh).request(
                method,
                yarl.URL(self._base + path, encoded=True),
                data=b"".join(parts) if size <= _JOINED_BYTES else _each(parts),
                headers={**headers, "Content-Length": str(size)},
                allow_redirects=False,
                trace_request_ctx=kept,
            )

    def _session(self, fresh: bool) -> aiohttp.ClientSession:
        """Returns the session of such requests, which keeps connections unless each is to be new."""
        if fresh not in self._sessions:
            noting = aiohttp.TraceConfig()
            noting.on_connection_reuseconn.append(_note_kept)
            self._sessions[fresh] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._tls, force_close=fresh),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # callers bound what they wait for
                skip_auto_headers=("Accept-Encoding",),
                auto_decompress=False,
                trace_configs=[noting],
            )
        return self._sessions[fresh]


async def _note_kept(session: object, context: types.SimpleNamespace, params: object) -> None:
    context.trace_request_ctx.append(params)


async def _each(parts: Sequence[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    for part in parts:
        yield part


@contextlib.contextmanager
def _failures(when: str) -> Iterator[None]:
    """Turns what aiohttp raises into RequestFailed."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise RequestFailed("connect", f"{error.host}:{error.port}: {error.os_error}") from error
    except (aiohttp.ClientResponseError, aiohttp.http.HttpProcessingError) as error:
        raise RequestFailed("protocol", error.message) from error
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
        raise RequestFailed("disconnected", f"the server closed the connection {when}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise RequestFailed("disconnected", str(error)) from error
