"""A few workers behind a bounded queue: processes that render templates and threads that tokenise are used through one.

The bounds of both stand here. They say what the requests of all clients of a front may hold while they wait.
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

# Small work has workers of its own, so that large work delays none of it.
SMALL_BYTES = 64 * 1024
# Whoever has waited so long for a worker is told to come again; a batch waits on.
WAIT_S = 30.0
BUSY = "the server is busy with other requests; try again"


class WorkersBusy(Exception):
    """Too much waits for the workers already, or they were busy for too long; the same work may be done later."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How much may wait for workers of one kind, and for how long (None: as long as it takes)."""

    requests: int
    nbytes: int
    wait_s: float | None = WAIT_S


# Two of the largest bodies. A waiting request holds its parsed JSON besides, up to 20 times as much.
BOUNDS = Bounds(requests=1024, nbytes=64 * 2**20)


@dataclasses.dataclass(eq=False)
class _Job[W]:
    work: Callable[[W], Awaitable]
    nbytes: int
    result: asyncio.Future
    has_begun: bool = False


class Workers[W]:
    """Workers of one kind, each of which does one thing at a time; the last one used is the first to be used again."""

    def __init__(self, workers: Sequence[W], bounds: Bounds):
        self._bounds = bounds
        self._idle = list(reversed(workers))
        self._waiting: deque[_Job[W]] = deque()
        self._waiting_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run[R](self, nbytes: int, work: Callable[[W], Awaitable[R]]) -> R:
        """Returns what `work` makes of a worker; raises what it raises, and WorkersBusy where it is not begun.

        When the caller is cancelled, work that has not begun is dropped. What has begun is finished, and its result is
        dropped: it must be bounded by itself.
        """
        job = self._admit(nbytes, work)
        try:
            await asyncio.wait([job.result], timeout=self._bounds.wait_s)
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

    def _admit[R](self, nbytes: int, work: Callable[[W], Awaitable[R]]) -> _Job[W]:
        bounds = self._bounds
        if not self._idle and (len(self._waiting) >= bounds.requests or self._waiting_bytes + nbytes > bounds.nbytes):
            raise WorkersBusy(BUSY)
        job = _Job(work, nbytes, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._waiting_bytes += nbytes
        self._dispatch()
        return job

    def _withdraw(self, job: _Job[W]) -> None:
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

    async def _do(self, worker: W, job: _Job[W]) -> None:
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
