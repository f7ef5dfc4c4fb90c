"""Where servers and routers decode request bodies: small ones on the event loop, a large one in a thread."""

import asyncio
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dsv3.server.turns import Turns
from dsv3.server.workers import BOUNDS, WAIT_S, Workers

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
