"""What the requests of all clients may hold and use together: bytes, turns of the event loop, threads, processes.

| bound | protects | used by |
|---|---|---|
| `MAX_BODY_BYTES`: a body | memory | `http.bodies` |
| `Budget`: all requests, from the first byte of a body to the end of its answer | memory | `http.app`, routers |
| `Turns`: small bodies per turn of the event loop | streams of others | `BodyReader` |
| `Workers`: what waits for a process, how long, how large | memory, and time of clients | `templates`, `grammars` |
| `Thread`: the same for slow work that no process does | the event loop | bodies, texts, long prompts |

What one body may make of its bytes is bounded by `answers.reading`, and how many connections there are by
`http.listening`. Clients share all of it; none has a part of its own.
"""

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

MAX_BODY_BYTES = 32 * 2**20
# Small work has workers of its own, so that large work delays none of it; small bodies are decoded on the event loop.
SMALL_BYTES = 64 * 1024
# Bodies of up to `SMALL_BYTES`, whatever the larger ones hold: 1,024 of the longest.
SMALL_BUDGET_BYTES = 64 * 2**20
# Eight of the largest bodies, or 300 prompts of 131,072 tokens.
LARGE_BUDGET_BYTES = 256 * 2**20
# What waits for workers of one kind: two of the largest bodies. Parsed JSON beside it takes up to 20 times as much.
MAX_WAITING = 1024
MAX_WAITING_BYTES = 64 * 2**20
# A request that has waited so long for a worker gets 503; a batch waits on.
WAIT_S = 30.0
BUSY = "the server is busy with other requests; try again"
# Counts as so many bytes at least: what is done for a request however small its body is.
_LEAST_BYTES = 4096


class WorkersBusy(Exception):
    """Too much waits for the workers already, or they were busy for too long; the same work may be done later."""


class Budget:
    """Bytes that the requests of all clients may hold together; small and large ones have a share each."""

    def __init__(self, small: int = SMALL_BUDGET_BYTES, large: int = LARGE_BUDGET_BYTES):
        self._free = [small, large]

    @contextlib.contextmanager
    def hold(self) -> Iterator["Reservation"]:
        """Yields what one request holds, nothing yet; its bytes are given back at the end of the `with`."""
        reservation = Reservation(self._free)
        try:
            yield reservation
        finally:
            reservation.release()


class Reservation:
    """What one request holds of a budget: it moves to the other share when it becomes large."""

    def __init__(self, free: list[int]):
        self.nbytes = 0
        self._free = free

    def grow(self, nbytes: int) -> None:
        """Takes some more bytes; raises WorkersBusy where there are none, and takes none then."""
        size = self.nbytes + nbytes
        before, after = self.nbytes > SMALL_BYTES, size > SMALL_BYTES
        taken = size if before != after else nbytes
        if taken > self._free[after]:
            raise WorkersBusy(BUSY)
        self._free[after] -= taken
        if before != after:
            self._free[before] += self.nbytes
        self.nbytes = size

    def release(self) -> None:
        """Gives all of it back."""
        self._free[self.nbytes > SMALL_BYTES] += self.nbytes
        self.nbytes = 0


@dataclasses.dataclass(eq=False)
class _WorkItem[W]:
    work: Callable[[W], Awaitable]
    nbytes: int
    result: asyncio.Future
    has_begun: bool = False


class Workers[W]:
    """Workers of one kind behind a queue, each of which does one thing at a time; the last one used is the next.

    At most `requests` wait, of `nbytes` together, for at most `wait_s` seconds (None: as long as it takes).
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
        self._waiting: deque[_WorkItem[W]] = deque()
        self._waiting_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run[R](self, nbytes: int, work: Callable[[W], Awaitable[R]]) -> R:
        """Returns what `work` makes of a worker; raises what it raises, and WorkersBusy where it is not begun.

        When the caller is cancelled, work that has not begun is dropped. What has begun is finished, and its result is
        dropped: it must be bounded by itself.
        """
        job = self._admit(nbytes, work)
        try:
            await asyncio.wait([job.result], timeout=self._wait_s)
            if not job.has_begun:
                raise WorkersBusy(BUSY)
            return await job.result
        finally:
            self._withdraw(job)
            del job  # an error's traceback holds this frame: kept here, both would wait for the garbage collector

    async def close(self) -> None:
        """Gives up what is waiting and what has begun."""
        for job in self._waiting:
            job.result.cancel()
        self._waiting.clear()
        self._waiting_bytes = 0
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _admit[R](self, nbytes: int, work: Callable[[W], Awaitable[R]]) -> _WorkItem[W]:
        is_full = len(self._waiting) >= self._max_waiting or self._waiting_bytes + nbytes > self._max_bytes
        if is_full and not self._idle:
            raise WorkersBusy(BUSY)
        job = _WorkItem(work, nbytes, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._waiting_bytes += nbytes
        self._dispatch()
        return job

    def _withdraw(self, job: _WorkItem[W]) -> None:
        """Forgets a job that has not begun; nobody asks for its result any more."""
        if not job.has_begun and job in self._waiting:
            self._waiting.remove(job)
            self._waiting_bytes -= job.nbytes
        if not job.result.cancel() and not job.result.cancelled():
            job.result.exception()  # else asyncio logs that nobody has looked at it

    def _dispatch(self) -> None:
        while self._idle and self._waiting:
            worker, job = self._idle.pop(), self._waiting.popleft()
            self._waiting_bytes -= job.nbytes
            job.has_begun = True
            task = asyncio.get_running_loop().create_task(self._do(worker, job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _do(self, worker: W, job: _WorkItem[W]) -> None:
        try:
            result = await job.work(worker)
            if not job.result.done():
                job.result.set_result(result)
        except Exception as error:
            if not job.result.done():
                job.result.set_exception(error)
        finally:
            job.result.cancel()  # no effect but where this task itself was cancelled
            del job  # as in `run`
            self._idle.append(worker)
            self._dispatch()


class Thread:
    """One thread behind the queue of `Workers`: slow work is done there, beside the event loop, one piece at a time."""

    def __init__(self, name: str, wait_s: float | None = WAIT_S):
        self._thread = ThreadPoolExecutor(1, name)
        self._workers = Workers([self._thread], wait_s)

    async def run[T](self, nbytes: int, work: Callable[[], T]) -> T:
        """Returns the result of `work`; raises what it raises, and WorkersBusy where too much waits."""
        loop = asyncio.get_running_loop()
        return await self._workers.run(nbytes, lambda thread: loop.run_in_executor(thread, work))

    async def close(self) -> None:
        """Cancels what waits and ends the thread; what has begun is finished."""
        await self._workers.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


class Turns:
    """Lets requests begin with their bodies in the order in which these came, a slice of bytes per turn of the loop."""

    def __init__(self, nbytes: int = SMALL_BYTES):
        self._nbytes = self._left = nbytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_scheduled = False

    async def wait(self, nbytes: int) -> None:
        """Returns when a body of `nbytes` may be read; a call that is cancelled meanwhile takes no turn."""
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


class BodyReader(Thread):
    """Decodes bodies of up to `SMALL_BYTES` in turns on the event loop, larger ones in its thread, one at a time."""

    def __init__(self, wait_s: float | None = WAIT_S):
        super().__init__("read", wait_s)
        self._turns = Turns()

    async def run[T](self, nbytes: int, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which decodes a body of `nbytes`; raises WorkersBusy where too much waits."""
        if nbytes > SMALL_BYTES:
            return await super().run(nbytes, work)
        await self._turns.wait(nbytes)
        return work()
