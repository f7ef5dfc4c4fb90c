"""HTTP/1.1 client over aiohttp with bounded reads and typed errors.

Follows no redirects, keeps no cookies, uses no proxy of the environment and decompresses nothing.
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

_JOINED_BYTES = 1 << 16  # a request up to this size is one write, hence one wake-up of the server
MAX_ERROR_BODY_BYTES = 1 << 16

_HOST = re.compile(r"[0-9a-z._-]+|[0-9a-f:.]+(%[0-9a-z._-]+)?")
_PATH = re.compile(r"[!-~]*")


Body = bytes | Sequence[bytes | memoryview]
"""A request's body, or its parts, which are not copied if they are large."""


class RequestFailed(Exception):
    """A request got no usable response. `kind` is a short name, for reports that count failures."""

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
        """Returns the address in `http[s]://host[:port][/prefix][/v1]`; an international host name becomes ASCII.

        Raises ValueError for any other text.
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
    """Splits a body into the data of server-sent events (WHATWG HTML 9.2.6); skips comments and other fields."""

    def __init__(self, limit: int):
        self._limit = limit
        self._buffer = bytearray()
        self._is_cut = False  # after a carriage return, which may be half of a line's end

    def push(self, data: bytes) -> Iterator[bytes]:
        """Yields the data of each complete event; raises RequestFailed for an event of more than `limit` bytes.

        Searches each byte once, however many pieces an event comes in.
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
    """A response whose body is being read; `headers` ignore the case of names."""

    def __init__(self, response: aiohttp.ClientResponse):
        self._content = response.content
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the body as it arrives; raises RequestFailed "disconnected" if the server closes inside it."""
        while True:
            with _request_errors("inside a response"):
                piece = await self._content.readany()
            if not piece:
                return
            yield piece

    async def read(self, limit: int) -> bytes:
        """Returns the first `limit` bytes of the body."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > limit:
                break
        return bytes(body[:limit])


class Client:
    """Sends requests to one server and keeps its connections alive.

    `tls` replaces the system's certificate authorities for https://.
    """

    def __init__(self, address: Address, api_key: str | None = None, tls: ssl.SSLContext | None = None):
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._base = f"{'https' if address.tls else 'http'}://{host}:{address.port}{address.prefix}"
        self._tls = (tls or ssl.create_default_context()) if address.tls else True
        self._headers = {"Host": f"{host}:{address.port}", "User-Agent": "dsv3", "Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether each request opens a new connection

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, body: Body = b"") -> AsyncIterator[StreamedResponse]:
        """Sends one request and yields its response, whose body must be read inside the `async with`.

        Raises RequestFailed: "connect" if no connection can be opened, "http STATUS" with the body for any status but
        200, "disconnected" if the connection ends too early, "protocol" if the response is not HTTP.
        """
        async with self.exchange(method, path, body) as response:
            if response.status != 200:
                content = await response.read(MAX_ERROR_BODY_BYTES)
                raise RequestFailed(f"http {response.status}", content.decode("utf-8", "replace").strip())
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
        """Does the same as `request` for any status. `fresh` opens a new connection, so the request is sent once."""
        reused: list[object] = []
        arguments = method, path, body, self._headers | dict(headers or {}), reused
        try:
            response = await self._send(fresh, *arguments)
        except RequestFailed as error:
            # The server may close an idle connection while a request is sent on it: retry on a new one.
            if error.kind != "disconnected" or not reused:
                raise
            response = await self._send(True, *arguments)
        try:
            yield StreamedResponse(response)
        finally:
            response.close()  # the connection, unless the response is complete

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    async def _send(
        self, fresh: bool, method: str, path: str, body: Body, headers: Mapping[str, str], reused: list[object]
    ) -> aiohttp.ClientResponse:
        """Sends a request and returns the response's head; appends to `reused` if it reuses an idle connection."""
        parts = [body] if isinstance(body, bytes) else body
        size = sum(map(len, parts))
        with _request_errors("before it answered"):
            return await self._session(fresh).request(
                method,
                yarl.URL(self._base + path, encoded=True),
                data=b"".join(parts) if size <= _JOINED_BYTES else _each(parts),
                headers={**headers, "Content-Length": str(size)},
                allow_redirects=False,
                trace_request_ctx=reused,
            )

    def _session(self, fresh: bool) -> aiohttp.ClientSession:
        """Returns the session whose requests each open a new connection, or the one that keeps connections alive."""
        if fresh not in self._sessions:
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_on_reuse)
            self._sessions[fresh] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._tls, force_close=fresh),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # callers set timeouts
                skip_auto_headers=("Accept-Encoding",),
                auto_decompress=False,
                trace_configs=[trace],
            )
        return self._sessions[fresh]


async def _on_reuse(session: object, context: types.SimpleNamespace, params: object) -> None:
    context.trace_request_ctx.append(params)


async def _each(parts: Sequence[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    for part in parts:
        yield part


@contextlib.contextmanager
def _request_errors(when: str) -> Iterator[None]:
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
