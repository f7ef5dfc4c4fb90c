"""Bounds what all requests together do on the event loop before everything else has its turn."""

import asyncio
from collections import deque

# The body of the costliest small chat: 2.7 ms from its last byte to its template worker (`benchmarks/README.md`).
SLICE_BYTES = 64 * 1024
# Counts as so many bytes at least: what is done for a request however small its body is.
_LEAST_BYTES = 4096


class Turns:
    """Lets requests begin with their bodies in the order in which these came, a slice of bytes per turn of the loop."""

    def __init__(self, nbytes: int = SLICE_BYTES):
        self._nbytes = self._left = nbytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_scheduled = False

    async def wait(self, nbytes: int) -> None:
        """Returns when a body of `nbytes` may be read; who is cancelled meanwhile takes nobody's turn."""
        nbytes = max(nbytes, _LEAST_BYTES)
        if self._left > 0:
            self._take(nbytes)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        await turn

    def _take(self, nbytes: int) -> None:
        self._left -= nbytes
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        self._is_scheduled, self._left = False, self._nbytes
        while self._waiting and self._left > 0:
            nbytes, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._take(nbytes)
