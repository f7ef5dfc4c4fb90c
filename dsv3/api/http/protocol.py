"""The HTTP/1.1 server beneath the application: uvicorn's with h11, and a short way for streamed bodies.

h11 bounds headers, which httptools does not. Its state machine, uvicorn's `send` and a task's wake-up cost more than
making the token's event, so a stream that has sent its head writes its chunks to the transport itself; h11 only learns
of the end. Nothing else in the package knows which server this is.
"""

import asyncio
import contextlib
from collections.abc import Callable, Generator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

EXTENSION = "dsv3.event_writer"
"""Key of the connection's `EventWriter` in an ASGI scope's extensions."""

_MAX_HEADER_BYTES = 64 * 1024
_CLOSE_CONNECTIONS_S = 3
_WRITE_DEADLINE_S = 120.0


class EventWriter:
    """A connection, for the response that streams on it.

    A client that does not read for `_WRITE_DEADLINE_S` seconds is cut off, whatever is sent to it.
    """

    def __init__(self, transport: asyncio.Transport):
        self._transport = transport
        self._is_chunked = True
        self._on_pause: Callable[[], None] | None = None
        self._on_resume: Callable[[], None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def claim(self, http_version: str, on_pause: Callable[[], None], on_resume: Callable[[], None]) -> None:
        """Has a response told when the client's reading holds it up, and when it may go on."""
        self._is_chunked = http_version == "1.1"
        self._on_pause, self._on_resume = on_pause, on_resume

    def free(self) -> None:
        """Ends what `claim` began."""
        self._on_pause = self._on_resume = None

    def write(self, data: bytes) -> None:
        """Writes one server-sent event as a chunk of the body."""
        if self._transport.is_closing():
            return
        if self._is_chunked:
            self._transport.write(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))
        else:
            self._transport.write(b"data: %b\n\n" % data)

    def pause(self) -> None:
        """Notes that the client reads more slowly than it is written to."""
        self._deadline = asyncio.get_running_loop().call_later(_WRITE_DEADLINE_S, self._transport.abort)
        if self._on_pause is not None:
            self._on_pause()

    def resume(self) -> None:
        """Notes that the client has read."""
        self.stop_clock()
        if self._on_resume is not None:
            self._on_resume()

    def stop_clock(self) -> None:
        """Lets the deadline go."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Protocol(H11Protocol):
    """uvicorn's protocol, with the connection's `EventWriter` in each scope."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._app: ASGIApp = self.app
        self.app = self._serve

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._writer = EventWriter(transport)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {EXTENSION: self._writer}
        await self._app(scope, receive, send)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writer.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writer.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writer.free()
        self._writer.stop_clock()
        super().connection_lost(exc)


class HttpServer(uvicorn.Server):
    """Serves an application; without uvicorn's own signal handling, since others decide when it stops."""

    def __init__(self, app: ASGIApp):
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
                ws="none",
                lifespan="off",
                access_log=False,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=_CLOSE_CONNECTIONS_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
