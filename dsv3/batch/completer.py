"""Answers batch lines with the server's own application, called in this process: no socket, no HTTP, the same code.

So a line's body means exactly what it means to `launch.serve`, refusals included. The engine runs in a process of its
own, as under the server; this one reads, tokenises, detokenises and writes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from dsv3.api.app import make_app
from dsv3.api.errors import invalid
from dsv3.api.server import ServerConfig, make_service
from dsv3.api.service import Service
from dsv3.batch.journal import BatchError
from dsv3.batch.run import Answer

_BUSY_SECONDS = 0.05
# When the engine dies, the failures of its requests arrive before the news of its death.
_OBITUARY_SECONDS = 2.0


class _Asked(msgspec.Struct):
    """The one field of a request that a batch treats differently from a server."""

    stream: Any = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _ErrorCode(msgspec.Struct):
    code: Any = None
    message: str = ""


class _Answered(msgspec.Struct):
    id: str = ""
    usage: _Usage | None = None
    error: _ErrorCode = msgspec.field(default_factory=_ErrorCode)


_asked = msgspec.json.Decoder(_Asked)
_answered = msgspec.json.Decoder(_Answered)


class ServerCompleter:
    """Answers through a `Service` whose engine is ready."""

    def __init__(self, service: Service):
        self._service = service
        self._app = make_app(service, api_key=None)

    @property
    def concurrency(self) -> int:
        """Lines to answer at a time: twice what the engine runs, so that one waits for each slot that falls free."""
        info = self._service.engine.info
        assert info is not None  # the engine is ready
        return 2 * info.max_num_seqs

    async def complete(self, url: str, body: bytes) -> Answer:
        """See `Completer`; raises BatchError when the engine has stopped."""
        if _asked.decode(body).stream:
            refused = invalid("stream: a batch has no streams; leave it out", "stream", "unsupported_parameter")
            return Answer(refused.status, "", msgspec.Raw(refused.envelope()))
        while True:
            status, reply = await call(self._app, url, body)
            found = _answered.decode(reply)
            if status == 503 and found.error.code == "queue_full":
                await asyncio.sleep(_BUSY_SECONDS)
                continue
            if status == 503:
                raise BatchError(found.error.message)
            if status >= 500:
                await self._check_engine()
            return Answer(status, found.id, msgspec.Raw(reply), found.usage.completion_tokens if found.usage else 0)

    async def _check_engine(self) -> None:
        """Raises BatchError where a failure was the whole engine's: its requests are then not answered."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._service.engine.ended.wait(), _OBITUARY_SECONDS)
        if self._service.status != "ok" or self._service.reason:
            raise BatchError(self._service.reason)


async def call(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of an ASGI application's answer to a POST of JSON."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
    }
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    replies: list[Message] = []

    async def receive() -> Message:
        if requests:
            return requests.pop()
        return await asyncio.get_running_loop().create_future()  # the caller stays connected

    async def send(message: Message) -> None:
        replies.append(message)

    await app(scope, receive, send)
    return replies[0]["status"], b"".join(message.get("body", b"") for message in replies[1:])


@contextlib.asynccontextmanager
async def server_completer(config: ServerConfig) -> AsyncIterator[ServerCompleter]:
    """A completer for the time of the `async with`, its engine loaded and warm.

    Raises BatchError when the model's files cannot be used or the engine cannot start.
    """
    try:
        service = await make_service(config)
    except ValueError as error:
        raise BatchError(str(error)) from error
    try:
        await service.engine.start()
        await service.engine.settled.wait()
        if service.status != "ok":
            raise BatchError(service.reason)
        yield ServerCompleter(service)
    finally:
        await service.close()
