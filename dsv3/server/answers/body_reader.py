"""Where servers and routers decode request bodies: small ones on the event loop, a large one in a thread."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dsv3.server.workers import BOUNDS, WAIT_S, Workers

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


SMALL_BYTES = 256 * 1024
"""Bodies up to this size are decoded on the event loop, which takes 7 ms at most."""


class BodyReader:
    """Decodes small bodies in turns, a slice of bytes per turn of the event loop, and large ones one at a time."""

    def __init__(self, wait_s: float | None = WAIT_S):
        self._turns = Turns()
        self._thread = ThreadPoolExecutor(1, "read")
        self._workers = Workers([self._thread], dataclasses.replace(BOUNDS, wait_s=wait_s))

    async def run[T](self, nbytes: int, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which decodes a body of `nbytes`; raises WorkersBusy where too much waits."""
        if nbytes <= SMALL_BYTES:
            await self._turns.wait(nbytes)
            return work()
        loop = asyncio.get_running_loop()
        return await self._workers.run(nbytes, lambda thread: loop.run_in_executor(thread, work))

    async def close(self) -> None:
        """Cancels what waits and ends the thread."""
        await self._workers.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
