"""What goes out on a connection: whole replies in pieces, streamed events, and the deadline of both."""

import asyncio
from collections.abc import Callable

EXTENSION = "dsv3.writer"
"""Key of the connection's `Writer` in an ASGI scope's extensions."""

_PIECE_BYTES = 64 * 1024


class Writer:
    """A connection, for the responses on it.

    A client that takes nothing for `deadline_s` seconds is cut off, whatever is sent to it, and what was meant for it
    is forgotten at once. A task's wake-up costs more than making a token's event, so a stream that has sent its head
    writes its chunks to the transport itself.
    """

    def __init__(self, transport: asyncio.Transport, deadline_s: float):
        self.num_bytes = 0
        self._transport, self._deadline_s = transport, deadline_s
        self._is_closing = False
        self._is_chunked = True
        self._on_pause: Callable[[], None] | None = None
        self._on_resume: Callable[[], None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_ready = asyncio.Event()
        self._is_ready.set()

    def claim(self, http_version: str, on_pause: Callable[[], None], on_resume: Callable[[], None]) -> None:
        """Has a response told when the client's reading holds it up, and when it may go on."""
        self._is_chunked = http_version == "1.1"
        self._on_pause, self._on_resume = on_pause, on_resume

    def free(self) -> None:
        """Ends what `claim` began."""
        self._on_pause = self._on_resume = None

    def write(self, data: bytes) -> None:
        """Writes the lines of one server-sent event as a chunk of the body."""
        if self.is_closing:
            return
        if self._is_chunked:
            self._transport.write(b"%x\r\n%b\n\n\r\n" % (len(data) + 2, data))
        else:
            self._transport.write(b"%b\n\n" % data)
        self.num_bytes += len(data)

    async def send(self, data: bytes) -> None:
        """Writes bytes as the client takes them, so that the transport holds few of them."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            await self._is_ready.wait()
            if self.is_closing:
                return
            self._transport.write(view[start : start + _PIECE_BYTES])
            self.num_bytes += len(view[start : start + _PIECE_BYTES])

    def pause(self) -> None:
        """Notes that the client reads more slowly than it is written to."""
        self._is_ready.clear()
        self._start_clock()
        if self._on_pause is not None:
            self._on_pause()

    def resume(self) -> None:
        """Notes that the client has read."""
        self._is_ready.set()
        if not self._is_closing:
            self.stop_clock()
        if self._on_resume is not None:
            self._on_resume()

    @property
    def is_closing(self) -> bool:
        """Whether nothing is written any more."""
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection when all is written, within the deadline."""
        self._is_closing = True
        self._transport.close()
        self._start_clock()

    def half_close(self, seconds: float) -> None:
        """Lets the client read what is written and know that it was the last; closes the connection after `seconds`.

        A connection that is closed while its client still writes is reset, and then the client may not see the answer.
        """
        self._is_closing = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()  # TLS: reads and drops what comes until the client closes its end
        self.stop_clock()
        self._start_clock(seconds)

    def abort(self) -> None:
        """Closes the connection now, and forgets what is not written."""
        self._transport.abort()

    def lost(self) -> None:
        """Notes that the connection is closed."""
        self.free()
        self.stop_clock()
        self._is_ready.set()

    def stop_clock(self) -> None:
        """Lets the deadline go."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _start_clock(self, seconds: float | None = None) -> None:
        if self._deadline is None:
            delay = self._deadline_s if seconds is None else seconds
            self._deadline = asyncio.get_running_loop().call_later(delay, self._transport.abort)
