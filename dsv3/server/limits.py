"""Limits on memory and processing that all clients of an API server share; no client has a quota of its own.

| limit | protects | used by |
|---|---|---|
| `MAX_BODY_BYTES`: one body | memory | `http.bodies` |
| `Budget`: all requests, from the first byte of a body to the end of the response | memory | `http.app`, routers |
| `DecodeThrottle`: small bodies per iteration of the event loop | latency of streams | `BodyReader` |
| `WorkerQueue`: size, bytes and waiting time of a queue | memory, latency of clients | `templates`, `grammars` |
| `ThreadQueue`: the same for slow work in a thread | the event loop | bodies, texts, long prompts |

`serving.request_parsing` limits what a body is parsed into, `http.http_server.ConnectionLimit` HTTP connections.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MAX_BODY_BYTES = 32 * 2**20
# Small work has separate workers, so that large work does not delay it; small bodies are decoded on the event loop.
SMALL_BYTES = 64 * 1024
# For bodies of up to `SMALL_BYTES`: 1,024 of the largest.
SMALL_BUDGET_BYTES = 64 * 2**20
# For larger bodies: eight of the largest, or 300 prompts of 131,072 tokens.
LARGE_BUDGET_BYTES = 256 * 2**20
# Of a worker queue: two of the largest bodies. The JSON parsed from them takes up to 20 times as much.
MAX_WAITING = 1024
MAX_WAITING_BYTES = 64 * 2**20
# A request that has waited so long for a worker gets 503; requests of batches wait without limit.
WAIT_S = 30.0
BUSY = "the server is busy with other requests; try again"
# Minimum that the throttle counts for a body, for the fixed cost of a request.
_MIN_BYTES = 4096


class WorkersBusy(Exception):
    """The queue of the workers is full, or the wait took too long; the work may be retried later."""


class Budget:
    """Bytes that all requests may hold together, in one share for small requests and one for large ones."""

    def __init__(self, small: int = SMALL_BUDGET_BYTES, large: int = LARGE_BUDGET_BYTES):
        self._free = [small, large]

    @contextlib.contextmanager
    def reserve(self) -> Iterator["Reservation"]:
        """Yields an empty reservation for one request, which is released at the end of the `with`."""
        reservation = Reservation(self._free)
        try:
            yield reservation
        finally:
            reservation.release()


class Reservation:
    """The bytes that one request holds of a budget; it moves to the other share when it becomes large."""

    def __init__(self, free: list[int]):
        self.nbytes = 0
        self._free = free

    def grow(self, nbytes: int) -> None:
        """Reserves `nbytes` more; raises WorkersBusy, without a change, if the share has too few."""
        size = self.nbytes + nbytes
        before, after = self.nbytes > SMALL_BYTES, size > SMALL_BYTES
        needed = size if before != after else nbytes
        if needed > self._free[after]:
            raise WorkersBusy(BUSY)
        self._free[after] -= needed
        if before != after:
            self._free[before] += self.nbytes
        self.nbytes = size

    def release(self) -> None:
        self._free[self.nbytes > SMALL_BYTES] += self.nbytes
        self.nbytes = 0


class WorkerQueue[W]:
    """A queue in front of workers of one kind, each of which runs one item at a time; the last one used runs the next.

    At most `requests` items wait, of `nbytes` together, for at most `wait_s` seconds (None: without limit).
    """

    def __init__(
        self,
        workers: Sequence[W],
        wait_s: float | None = WAIT_S,
        requests: int = MAX_WAITING,
        nbytes: int = MAX_WAITING_BYTES,
    ):
        self._wait_s, self._max_waiting, self._max_bytes = wait_s, requests, nbytes
        self._idle = list(reversed(workers))
        self._free = asyncio.Semaphore(len(workers))
        self._waiting = self._waiting_bytes = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def run[R](self, nbytes: int, work: Callable[[W], Awaitable[R]]) -> R:
        """Runs `work` with a worker and returns its result; raises its exceptions, and WorkersBusy if it cannot start.

        If the caller is cancelled, work in the queue is dropped. Work that has started finishes and its result is
        dropped, so it must have a time limit of its own.
        """
        is_full = self._waiting >= self._max_waiting or self._waiting_bytes + nbytes > self._max_bytes
        if self._is_closed or (is_full and self._free.locked()):
            raise WorkersBusy(BUSY)
        self._waiting, self._waiting_bytes = self._waiting + 1, self._waiting_bytes + nbytes
        try:
            await asyncio.wait_for(self._free.acquire(), self._wait_s)
        except TimeoutError:
            raise WorkersBusy(BUSY) from None
        finally:
            self._waiting, self._waiting_bytes = self._waiting - 1, self._waiting_bytes - nbytes
        if self._is_closed:
            raise WorkersBusy(BUSY)
        task = asyncio.create_task(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        try:
            return await asyncio.shield(task)
        finally:
            del task  # an error's traceback references this frame: breaks the cycle, which would need the collector

    async def close(self) -> None:
        """Cancels all work, queued and running."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _ in range(self._waiting):
            self._free.release()  # `run` then raises WorkersBusy

    async def _run[R](self, work: Callable[[W], Awaitable[R]]) -> R:
        worker = self._idle.pop()
        try:
            return await work(worker)
        finally:
            self._idle.append(worker)
            self._free.release()

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio logs that it was never retrieved


class ThreadQueue:
    """A `WorkerQueue` of one thread, for slow work that would block the event loop."""

    def __init__(self, name: str, wait_s: float | None = WAIT_S):
        self._thread = ThreadPoolExecutor(1, name)
        self._workers = WorkerQueue([self._thread], wait_s)

    async def run[T](self, nbytes: int, work: Callable[[], T]) -> T:
        """Runs `work` in the thread and returns its result; raises its exceptions, and WorkersBusy."""
        loop = asyncio.get_running_loop()
        return await self._workers.run(nbytes, lambda thread: loop.run_in_executor(thread, work))

    async def close(self) -> None:
        """Cancels queued work and ends the thread after the current work."""
        await self._workers.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


class DecodeThrottle:
    """Admits bodies for decoding in order of arrival, up to `nbytes` per iteration of the event loop."""

    def __init__(self, nbytes: int = SMALL_BYTES):
        self._nbytes = self._left = nbytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_scheduled = False

    async def wait(self, nbytes: int) -> None:
        """Waits until a body of `nbytes` may be decoded; a cancelled call counts nothing."""
        nbytes = max(nbytes, _MIN_BYTES)
        if self._left > 0:
            self._spend(nbytes)
            return
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, admitted))
        await admitted

    def _spend(self, nbytes: int) -> None:
        self._left -= nbytes
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._refill)

    def _refill(self) -> None:
        self._is_scheduled, self._left = False, self._nbytes
        while self._waiting and self._left > 0:
            nbytes, admitted = self._waiting.popleft()
            if not admitted.done():
                admitted.set_result(None)
                self._spend(nbytes)


class BodyReader(ThreadQueue):
    """Decodes bodies of up to `SMALL_BYTES` on the event loop, throttled, and larger ones in its thread."""

    def __init__(self, wait_s: float | None = WAIT_S):
        super().__init__("read", wait_s)
        self._throttle = DecodeThrottle()

    async def run[T](self, nbytes: int, work: Callable[[], T]) -> T:
        """Runs `work`, which decodes a body of `nbytes`, and returns its result; raises WorkersBusy."""
        if nbytes > SMALL_BYTES:
            return await super().run(nbytes, work)
        await self._throttle.wait(nbytes)
        return work()
