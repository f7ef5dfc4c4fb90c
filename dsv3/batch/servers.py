"""Sends batch lines to running servers of one model, and retries a line on another one where a server fails.

Lines with a common prefix go to the same server while it has capacity, to use its prefix cache. Temporary failures are
retried: a full queue, a server that starts, stops or is gone. Any other status is recorded, since the line may cause
it: a proxy that refuses a large body would refuse it again.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from dsv3.batch.journal import BatchError
from dsv3.batch.options import BatchOptions
from dsv3.batch.run import Reply
from dsv3.files import read_api_key
from dsv3.http_client import Address, Client, RequestFailed
from dsv3.scheduler.request import BATCH_PRIORITY

DEFAULT_CONCURRENCY = 64
MAX_CONCURRENCY = 4096
_MAX_ANSWER_BYTES = 2**28
_MAX_REFUSAL_BYTES = 2**20
_SHOWN_CHARS = 500  # of a body that is not JSON
_REQUEST_S = 3600.0  # bounds the wait for a host that vanishes without closing its connections
_START_S = 10.0
_BACKOFF_S = 0.1, 5.0  # after a server was busy or gone; doubles each time
_MAX_FAILURES = 3  # 5xx of one line; its own content may cause them
_RETRIED = frozenset({408, 425, 429, 503})  # not 504: a line that takes too long for a gateway does so again
_PREFIX_BYTES = 1024
_log = logging.getLogger("dsv3.batch")


class _ModelEntry(msgspec.Struct):
    id: str
    owned_by: str = ""
    max_num_seqs: int | None = None


class _Models(msgspec.Struct):
    data: list[_ModelEntry]


class _ServerAnswer(msgspec.Struct):
    """The fields of an answer that are used."""

    id: Any = ""
    usage: Any = None

    @property
    def output_tokens(self) -> int:
        tokens = self.usage.get("completion_tokens") if isinstance(self.usage, dict) else None
        return tokens if isinstance(tokens, int) else 0


class _RequestFields(msgspec.Struct):
    priority: Any = None
    stream: Any = None


_answer, _request_fields = msgspec.json.Decoder(_ServerAnswer), msgspec.json.Decoder(_RequestFields)


@dataclasses.dataclass(eq=False)
class _Server:
    """A server, its requests in flight, their limit, and the time until which it gets none after a failure."""

    url: str
    client: Client
    limit: int = 0
    model: str = ""
    is_ours: bool = False
    running: int = 0
    backoff_s: float = _BACKOFF_S[0]
    available_at: float = 0.0

    def rank(self, beginning: bytes) -> bytes:
        """Returns the server's rank for a prefix (rendezvous hashing): each server is first for its share of them."""
        return hashlib.blake2b(self.url.encode() + b"\0" + beginning, digest_size=8).digest()

    def back_off(self) -> None:
        """Makes the server unavailable for a while, twice as long each time."""
        self.available_at = time.monotonic() + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, _BACKOFF_S[1])


class RemoteCompleter:
    """Answers lines through `servers` of one model; gives up when none has answered for `timeout_s` seconds."""

    def __init__(self, servers: list[_Server], timeout_s: float, priority: int | None):
        self._servers, self._timeout_s, self._priority = servers, timeout_s, priority
        self._answered_at = time.monotonic()
        self._freed = asyncio.Event()

    @property
    def concurrency(self) -> int:
        """The limit on requests in flight of all servers together."""
        return sum(server.limit for server in self._servers)

    @property
    def model(self) -> str:
        """The name of the model that all servers have."""
        return self._servers[0].model

    async def complete(self, url: str, body: bytes) -> Reply:
        """See `Completer`; raises BatchError where no server answers, or one refuses the API key or redirects."""
        if _request_fields.decode(body).stream:
            return Reply(400, "", _error(400, "stream: not available in a batch; leave it out"))
        failures = 0
        while True:
            server = await self._next_server(body[:_PREFIX_BYTES])
            server.running += 1
            try:
                reply = await self._try(server, url, body)
            finally:
                server.running -= 1
                self._freed.set()
            if reply is not None and (reply.status < 500 or (failures := failures + 1) == _MAX_FAILURES):
                return reply

    async def _try(self, server: _Server, url: str, body: bytes) -> Reply | None:
        """Sends a line to a server; returns None where it must be retried."""
        try:
            async with asyncio.timeout(_REQUEST_S):
                status, content = await self._exchange(server, url, self._with_priority(server, body))
                refuses_key = status == 403 and await self._refuses_key(server, url)
        except (RequestFailed, TimeoutError) as error:
            return self._record_failure(server, f"{server.url}: {error or 'timeout'}")
        if status in (401, 407) or refuses_key:
            raise BatchError(f"{server.url} refuses the API key ({status}); see --server_api_key_file")
        if 300 <= status < 400:
            raise BatchError(f"{server.url} redirects ({status}); pass the target's address to --server")
        found = _read(content)
        if status in _RETRIED or (found is None and (status == 502 or status < 400)):
            text = content[:_SHOWN_CHARS].decode("utf-8", "replace")
            return self._record_failure(server, f"{server.url}: status {status}: {text}")
        self._answered_at, server.backoff_s = time.monotonic(), _BACKOFF_S[0]
        if found is None:
            return Reply(status, "", _wrapped(status, content))
        name = found.id if isinstance(found.id, str) else ""
        return Reply(status, name, msgspec.Raw(_one_line(content)), found.output_tokens if status == 200 else 0)

    async def _refuses_key(self, server: _Server, url: str) -> bool:
        """Returns whether a server answers an empty request with 403, too.

        A wrong key thus ends the batch, and the refusal of one line is that line's answer.
        """
        status, _ = await self._exchange(server, url, b"{}")
        return status == 403

    async def _exchange(self, server: _Server, url: str, body: bytes) -> tuple[int, bytes]:
        async with server.client.exchange("POST", url, body) as response:
            if response.status != 200:
                return response.status, await response.read(_MAX_REFUSAL_BYTES)
            content = await response.read(_MAX_ANSWER_BYTES + 1)
        if len(content) > _MAX_ANSWER_BYTES:
            raise BatchError(f"{server.url}: an answer has more than {_MAX_ANSWER_BYTES} bytes; lower max_tokens")
        return 200, content

    def _record_failure(self, server: _Server, why: str) -> Reply | None:
        """Backs off from a server; returns None. Raises BatchError when no server has answered for too long."""
        _log.debug("%s", why)
        server.back_off()
        if time.monotonic() - self._answered_at > self._timeout_s:
            raise BatchError(f"no server has answered for {self._timeout_s:g} s; the last error: {why}")
        return None

    async def _next_server(self, beginning: bytes) -> _Server:
        """Waits for a server with capacity; returns the one with the highest rank for the prefix."""
        while True:
            now = time.monotonic()
            free = [s for s in self._servers if s.running < s.limit and s.available_at <= now]
            if free:
                return max(free, key=lambda server: server.rank(beginning))
            self._freed.clear()
            waits = [s.available_at - now for s in self._servers if s.available_at > now and s.running < s.limit]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), max(0.001, min(waits)) if waits else None)

    def _with_priority(self, server: _Server, body: bytes) -> bytes:
        """Returns the body with a priority, unless it has its own."""
        priority = self._priority
        if priority is None and server.is_ours:
            priority = BATCH_PRIORITY
        if priority is None or _request_fields.decode(body).priority is not None:
            return body
        rest = body.lstrip()[1:]
        comma = b"" if rest.lstrip().startswith(b"}") else b","
        return b'{"priority":%d%b%b' % (priority, comma, rest)


def _read(content: bytes) -> _ServerAnswer | None:
    """Parses an answer; None where it is not a JSON object."""
    try:
        content.decode()
        return _answer.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _one_line(content: bytes) -> bytes:
    """Returns JSON on one line, as the output needs it."""
    return msgspec.json.format(content, indent=-1) if b"\n" in content else content


def _wrapped(status: int, content: bytes) -> dict[str, Any]:
    """Returns an error in OpenAI's format for a body that is not JSON, such as a proxy's page."""
    text = " ".join(content.decode("utf-8", "replace").split())[:_SHOWN_CHARS]
    return _error(status, f"status {status}: {text}")


def _error(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


@contextlib.asynccontextmanager
async def remote_completer(options: BatchOptions) -> AsyncIterator[RemoteCompleter]:
    """Yields a completer for the servers of the options; closes its connections at the end.

    Raises BatchError where a server cannot be reached or they serve different models.
    """
    key, servers = None, []
    if options.server_api_key_file is not None:
        try:
            key = read_api_key(options.server_api_key_file, "server_api_key_file")
        except ValueError as error:
            raise BatchError(str(error)) from None
    for url in options.server:
        try:
            servers.append(_Server(url, Client(Address.parse(url), key)))
        except ValueError:
            raise BatchError(f"--server {url!r}: expected http://HOST:PORT or https://HOST:PORT") from None
    try:
        await asyncio.gather(*(_query_model(server, options) for server in servers))
        if len(names := {server.model for server in servers}) > 1:
            raise BatchError(f"the servers have different models: {', '.join(sorted(names))}")
        yield RemoteCompleter(servers, options.server_timeout, options.priority)
    finally:
        for server in servers:
            await server.client.close()


async def _query_model(server: _Server, options: BatchOptions) -> None:
    """Queries a server's model and limit; waits while it starts."""
    until, text = time.monotonic() + options.server_timeout, ""
    while time.monotonic() < until:
        try:
            async with asyncio.timeout(_START_S), server.client.request("GET", "/v1/models") as response:
                models = msgspec.json.decode(await response.read(2**20), type=_Models).data
        except RequestFailed as error:
            if error.kind in ("http 401", "http 403", "http 404"):
                raise BatchError(f"{server.url}: {error}") from None
            text = str(error)
        except TimeoutError:
            text = "timeout"
        except msgspec.MsgspecError as error:
            raise BatchError(f"{server.url}/v1/models is not OpenAI's: {error}") from None
        else:
            if not models:
                raise BatchError(f"{server.url} serves no model")
            first = models[0]
            if first.max_num_seqs is not None or first.owned_by != "dsv3":
                server.model, server.is_ours = first.id, first.owned_by == "dsv3"
                limit = options.concurrency or 2 * (first.max_num_seqs or DEFAULT_CONCURRENCY // 2)
                server.limit = min(limit, MAX_CONCURRENCY)
                return
            text = "the engine is starting"
        await asyncio.sleep(0.5)
    raise BatchError(f"{server.url} cannot be reached: {text}")
