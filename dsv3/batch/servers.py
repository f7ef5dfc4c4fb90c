"""Answers batch lines by running servers: each line by one of them, and by another one where that fails.

Lines that begin alike go to the same server while it has room, so that its prefix cache serves them. What may pass is
tried again: a full queue, a server that starts, ends or is gone. So replicas of one model share a job. Every other
status is an answer, whatever its body is: asked again, a proxy refuses what is too large for it again.
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
from dsv3.files import read_secret
from dsv3.http_client import Address, Client, RequestFailed
from dsv3.scheduler.request import BATCH_PRIORITY

DEFAULT_CONCURRENCY = 64
MAX_CONCURRENCY = 4096
_MAX_ANSWER_BYTES = 2**28
_MAX_REFUSAL_BYTES = 2**20
_SHOWN_CHARS = 500  # of a body that is no JSON
_MAX_KEY_BYTES = 4096
_REQUEST_S = 3600.0  # a host that vanishes without a word costs so much time
_START_S = 10.0
_REST_S = 0.1, 5.0  # of a server that was busy or gone; twice as long each time
_MAX_FAILURES = 3  # 5xx of one line, which may be the line's own fault
_PASSING = frozenset({408, 425, 429, 503})  # not 504: a line that takes too long for a gateway does so again
_ALIKE_BYTES = 1024
_log = logging.getLogger("dsv3.batch")


class _ModelEntry(msgspec.Struct):
    id: str
    owned_by: str = ""
    max_num_seqs: int | None = None


class _Models(msgspec.Struct):
    data: list[_ModelEntry]


class _ServerAnswer(msgspec.Struct):
    """What is read of an answer."""

    id: Any = ""
    usage: Any = None

    @property
    def output_tokens(self) -> int:
        tokens = self.usage.get("completion_tokens") if isinstance(self.usage, dict) else None
        return tokens if isinstance(tokens, int) else 0


class _Asked(msgspec.Struct):
    priority: Any = None
    stream: Any = None


_answer, _asked = msgspec.json.Decoder(_ServerAnswer), msgspec.json.Decoder(_Asked)


@dataclasses.dataclass(eq=False)
class _Server:
    """A server and what is known of it: how many requests it has and may have, and until when it is left alone."""

    url: str
    client: Client
    limit: int = 0
    model: str = ""
    is_ours: bool = False
    running: int = 0
    rest_s: float = _REST_S[0]
    rests_until: float = 0.0

    def rank(self, beginning: bytes) -> bytes:
        """Returns by what servers are ordered for lines that begin so: each has the first place for its share."""
        return hashlib.blake2b(self.url.encode() + b"\0" + beginning, digest_size=8).digest()

    def rest(self) -> None:
        """Leaves the server alone for a while, the longer the more often."""
        self.rests_until = time.monotonic() + self.rest_s
        self.rest_s = min(2 * self.rest_s, _REST_S[1])


class ServersCompleter:
    """Answers by `servers`, of one model; gives up when none has answered for `timeout_s` seconds."""

    def __init__(self, servers: list[_Server], timeout_s: float, priority: int | None):
        self._servers, self._timeout_s, self._priority = servers, timeout_s, priority
        self._answered_at = time.monotonic()
        self._freed = asyncio.Event()

    @property
    def concurrency(self) -> int:
        """Requests of all servers together."""
        return sum(server.limit for server in self._servers)

    @property
    def model(self) -> str:
        """The model that all servers have."""
        return self._servers[0].model

    async def complete(self, url: str, body: bytes) -> Reply:
        """See `Completer`; raises BatchError where no server answers, or one refuses the key or sends elsewhere."""
        if _asked.decode(body).stream:
            return Reply(400, "", _error(400, "stream: a batch has no streams; leave it out"))
        failures = 0
        while True:
            server = await self._choose(body[:_ALIKE_BYTES])
            server.running += 1
            try:
                reply = await self._ask(server, url, body)
            finally:
                server.running -= 1
                self._freed.set()
            if reply is not None and (reply.status < 500 or (failures := failures + 1) == _MAX_FAILURES):
                return reply

    async def _ask(self, server: _Server, url: str, body: bytes) -> Reply | None:
        """Returns a server's answer, None where it has to be asked again."""
        try:
            async with asyncio.timeout(_REQUEST_S):
                status, content = await self._exchange(server, url, self._with_priority(server, body))
                refuses_all = status == 403 and await self._refuses_all(server, url)
        except (RequestFailed, TimeoutError) as error:
            return self._noted(server, f"{server.url}: {error or 'timeout'}")
        if status in (401, 407) or refuses_all:
            raise BatchError(f"{server.url} refuses the API key ({status}); see --server_api_key_file")
        if 300 <= status < 400:
            raise BatchError(f"{server.url} answers with a redirection ({status}); name the address that it leads to")
        found = _read(content)
        if status in _PASSING or (found is None and (status == 502 or status < 400)):
            words = content[:_SHOWN_CHARS].decode("utf-8", "replace")
            return self._noted(server, f"{server.url}: status {status}: {words}")
        self._answered_at, server.rest_s = time.monotonic(), _REST_S[0]
        if found is None:
            return Reply(status, "", _wrapped(status, content))
        name = found.id if isinstance(found.id, str) else ""
        return Reply(status, name, msgspec.Raw(_one_line(content)), found.output_tokens if status == 200 else 0)

    async def _refuses_all(self, server: _Server, url: str) -> bool:
        """Returns whether a server says 403 to a request that asks for nothing, too.

        So a wrong key at a proxy ends the batch, at its first line or in its middle, and a refusal of one line is that
        line's answer, whichever lines came before it.
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

    def _noted(self, server: _Server, why: str) -> Reply | None:
        """Notes that a server has not answered; returns None. Raises BatchError when none has answered for too long."""
        _log.debug("%s", why)
        server.rest()
        if time.monotonic() - self._answered_at > self._timeout_s:
            raise BatchError(f"no server has answered for {self._timeout_s:g} s; the last error: {why}")
        return None

    async def _choose(self, beginning: bytes) -> _Server:
        """Waits for a server with room; of several, the first one for lines that begin so."""
        while True:
            now = time.monotonic()
            free = [s for s in self._servers if s.running < s.limit and s.rests_until <= now]
            if free:
                return max(free, key=lambda server: server.rank(beginning))
            self._freed.clear()
            resting = [s.rests_until - now for s in self._servers if s.rests_until > now and s.running < s.limit]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), max(0.001, min(resting)) if resting else None)

    def _with_priority(self, server: _Server, body: bytes) -> bytes:
        """Returns a body that says its priority; its own, if it has one, comes later in it and so counts."""
        priority = self._priority
        if priority is None and server.is_ours:
            priority = BATCH_PRIORITY
        if priority is None or _asked.decode(body).priority is not None:
            return body
        rest = body.lstrip()[1:]
        comma = b"" if rest.lstrip().startswith(b"}") else b","
        return b'{"priority":%d%b%b' % (priority, comma, rest)


def _read(content: bytes) -> _ServerAnswer | None:
    """Returns what counts in an answer, None for one that is no JSON object."""
    try:
        content.decode()
        return _answer.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _one_line(content: bytes) -> bytes:
    """Returns JSON without line feeds, as the output needs it."""
    return msgspec.json.format(content, indent=-1) if b"\n" in content else content


def _wrapped(status: int, content: bytes) -> dict[str, Any]:
    """Returns the error that stands for a body that is no JSON, such as a proxy's page."""
    words = " ".join(content.decode("utf-8", "replace").split())[:_SHOWN_CHARS]
    return _error(status, f"status {status}: {words}")


def _error(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


@contextlib.asynccontextmanager
async def servers_completer(options: BatchOptions) -> AsyncIterator[ServersCompleter]:
    """Yields a completer for the servers that the options name, for the time of the `async with`.

    Raises BatchError where one cannot be asked for its model, or they have different ones.
    """
    key = _key(options.server_api_key_file)
    servers = []
    for url in options.server:
        try:
            servers.append(_Server(url, Client(Address.parse(url), key)))
        except ValueError:
            raise BatchError(f"--server {url!r}: expected http://HOST:PORT or https://HOST:PORT") from None
    try:
        await asyncio.gather(*(_introduce(server, options) for server in servers))
        if len(names := {server.model for server in servers}) > 1:
            raise BatchError(f"the servers have different models: {', '.join(sorted(names))}")
        yield ServersCompleter(servers, options.server_timeout, options.priority)
    finally:
        for server in servers:
            await server.client.close()


async def _introduce(server: _Server, options: BatchOptions) -> None:
    """Asks a server which model it has, for as long as it starts."""
    until, words = time.monotonic() + options.server_timeout, ""
    while time.monotonic() < until:
        try:
            async with asyncio.timeout(_START_S), server.client.request("GET", "/v1/models") as response:
                models = msgspec.json.decode(await response.read(2**20), type=_Models).data
        except RequestFailed as error:
            if error.kind in ("http 401", "http 403", "http 404"):
                raise BatchError(f"{server.url}: {error}") from None
            words = str(error)
        except TimeoutError:
            words = "timeout"
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
            words = "the engine is starting"
        await asyncio.sleep(0.5)
    raise BatchError(f"{server.url} cannot be reached: {words}")


def _key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return read_secret(path, _MAX_KEY_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        raise BatchError(f"server_api_key_file: {error}") from None
