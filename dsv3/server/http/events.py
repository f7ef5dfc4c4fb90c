"""Server-sent events: the events of an answer, written to its connection as they come."""

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsv3.server.answers.answer import Answer
from dsv3.server.answers.errors import ApiError
from dsv3.server.http.bodies import ClientGone, unless_disconnected
from dsv3.server.http.errors import path_of, response_of
from dsv3.server.http.writer import EXTENSION, Writer


class EventStream(Response):
    """The events that `answer` makes.

    The first event is awaited before the status is sent, so that a refused request gets a proper status; a later error
    becomes an event. The answer is closed as soon as the client has gone. While the client does not read, the answer is
    on hold, so that tokens gather in it and not in the connection's buffer. `on_close` is called when it is closed.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, on_close: Callable[[], None]):
        self.status_code = 200
        self.background = None
        self._answer, self._on_close = answer, on_close
        self._waiting: list[bytes] = []
        self._writer: Writer | None = None
        self._has_begun = asyncio.Event()
        self._ended: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer: Writer = scope["extensions"][EXTENSION]
        try:
            await unless_disconnected(receive, self._stream(writer, scope, receive, send))
        except ClientGone:
            return
        finally:
            self._answer.close()
            self._on_close()
            writer.free()

    async def _stream(self, writer: Writer, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._answer.start(self._on_event, self._on_end)
        except ApiError as error:
            await response_of(error, path_of(scope))(scope, receive, send)
            return
        await self._has_begun.wait()
        if not self._waiting and (refusal := self._ended.result()) is not None:
            await response_of(refusal, path_of(scope))(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        writer.claim(scope["http_version"], self._answer.hold, self._answer.release)
        for event in self._waiting:
            writer.write(event)
        self._waiting, self._writer = [], writer
        if (failure := await self._ended) is not None:
            writer.write(self._answer.failure(failure))
        await send({"type": "http.response.body", "body": self._answer.farewell, "more_body": False})

    def _on_event(self, event: bytes) -> None:
        if self._writer is not None:
            self._writer.write(event)
        else:
            self._waiting.append(event)
            self._has_begun.set()

    def _on_end(self, error: ApiError | None) -> None:
        if not self._ended.done():  # else the client has gone, and the answer is about to be closed
            self._ended.set_result(error)
        self._has_begun.set()
