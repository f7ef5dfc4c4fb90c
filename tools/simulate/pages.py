"""KV offloading and KV transfer in virtual time: the engine's own tiers and planner, with simulated copies.

`Tiers`, `HostPool` and `PagesPlanner` are the engine's. A job of a tier's threads takes the time of its bytes at a
given rate, no byte is copied, and a store is a bounded list of keys.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from dsv3.engine.job import EngineView, Planned
from dsv3.engine.jobs.pages import OpenedTiers, PagesCommand, PagesPlanner, page_buckets
from dsv3.kv_cache.page_keys import Key
from dsv3.kv_cache.tiers.host_pool import HostPool, blocks_within, host_pool_bytes
from dsv3.kv_cache.tiers.tiers import Tiers
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.scheduler import Scheduler
from tools.simulate.times import InstanceTimes, VirtualClock

COPY_RATE = 2**28 / 5e-3
"""Bytes per second between a device and its host: as `dsv3.engine.limits.TIER_STEP_BYTES` has it."""
HOST_RATE = 5e9
"""Bytes per second that one thread copies and verifies in host memory: an assumption."""


class WorkerTime:
    """The virtual time of the threads' jobs: a job ends later by the seconds that it spends."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.spent = clock, 0.0

    def now(self) -> float:
        """Returns the virtual time, including the seconds that the current job has spent."""
        return self.clock.now + self.spent

    def spend(self, seconds: float) -> None:
        """Adds seconds to the current job."""
        self.spent += seconds


class SimulatedWorkers(Executor):
    """Threads in virtual time: a job runs when it starts, and its future completes after the time that it spends."""

    def __init__(self, work: WorkerTime, count: int, done: Callable[[], None]) -> None:
        self._work, self._idle, self._done = work, count, done
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queues a job."""
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        self._work.clock.call_at(self._work.now(), self._begin)
        return future

    def _begin(self) -> None:
        while self._idle and self._waiting:
            future, job = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                self._idle -= 1
                self._run(future, job)

    def _run(self, future: Future[Any], job: Callable[[], Any]) -> None:
        self._work.spent = 0.0
        result = job()
        end, self._work.spent = self._work.now(), 0.0
        self._work.clock.call_at(end, lambda: self._end(future, result))

    def _end(self, future: Future[Any], result: Any) -> None:
        self._idle += 1
        future.set_result(result)
        self._begin()
        self._done()


class SimulatedHostPool(HostPool):
    """A host pool that stores one byte per page and takes the time of copying all."""

    def __init__(self, work: WorkerTime, num_blocks: int, page_bytes: int) -> None:
        super().__init__(np.zeros(host_pool_bytes(num_blocks, 1), np.uint8), 1, num_blocks)
        self._work, self.payload_bytes = work, page_bytes

    def put(self, key: Key, payload: np.ndarray) -> bool:
        """Stores a page; returns whether it is new."""
        self._work.spend(self.payload_bytes / HOST_RATE)
        return super().put(key, payload[:1])

    def get(self, key: Key, out: np.ndarray) -> bool:
        """Reads a page; returns whether it is there."""
        self._work.spend(self.payload_bytes / HOST_RATE)
        return super().get(key, out[:1])


class SimulatedStore:
    """A store that several instances share, as a list of keys: an LRU cache of at most `limit` pages."""

    def __init__(self, work: WorkerTime, limit: int, page_bytes: int, rate: float) -> None:
        self.damaged = self.evictions = 0
        self._work, self._limit, self._page_bytes, self._rate = work, limit, page_bytes, rate
        self._keys: OrderedDict[Key, None] = OrderedDict()

    @property
    def bytes_held(self) -> int:
        """Bytes of all stored pages."""
        return len(self._keys) * self._page_bytes

    def count(self, keys: Sequence[Key]) -> int:
        """Returns the length of the prefix of `keys` that is stored."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def get(self, keys: Sequence[Key], out: np.ndarray) -> int:
        """Reads the stored prefix of `keys`; returns its length."""
        found = self.count(keys)
        for key in keys[:found]:
            self._keys.move_to_end(key)
        self._spend(found)
        return found

    def put(self, keys: Sequence[Key], payloads: np.ndarray) -> int:
        """Writes the pages that are not stored yet; returns how many."""
        new = [key for key in keys if key not in self._keys]
        self._keys.update(dict.fromkeys(new))
        while len(self._keys) > self._limit:
            self._keys.popitem(last=False)
            self.evictions += 1
        self._spend(len(new))
        return len(new)

    def delete(self, keys: Sequence[Key]) -> None:
        """Deletes pages."""
        for key in keys:
            self._keys.pop(key, None)

    def _spend(self, pages: int) -> None:
        self._work.spend(pages * self._page_bytes / self._rate)


class _PolledTiers(Tiers):
    """Tiers that never block: the end of a job wakes the engine."""

    def wait(self, seconds: float) -> None:
        """Returns at once."""


class SimulatedPagesPlanner(PagesPlanner):
    """The engine's planner of page copies, over tiers in virtual time."""

    def __init__(
        self,
        view: EngineView,
        times: InstanceTimes,
        work: WorkerTime,
        wake: Callable[[], None],
        host_bytes: float,
        store: SimulatedStore | None,
    ) -> None:
        size = times.page_bytes
        host_pool = SimulatedHostPool(work, blocks_within(int(host_bytes), size), size)
        tiers = _PolledTiers(
            page_buckets(size),
            host_pool,
            store,
            workers=lambda count, _: SimulatedWorkers(work, count, wake),
            now=work.now,
            page_size=times.page_size,
            window_parts=-(-times.window_bytes // size),
        )
        super().__init__(view, OpenedTiers(tiers, None, None))
        self._page = np.broadcast_to(np.zeros(1, np.uint8), (1, page_buckets(size)[-1], size))

    def on_results(self, planned: Planned, results: tuple[np.ndarray, ...], outputs: StepOutputs) -> None:
        """Stores the pages that were copied off the devices in the tiers."""
        assert isinstance(planned.command, PagesCommand)
        copies = sum(len(copy.keys) for copy in planned.command.out)
        super().on_results(planned, (self._page,) * copies, outputs)


def copy_seconds(command: PagesCommand, times: InstanceTimes) -> float:
    """Returns the seconds of copies between devices and host, on the rank with the most pages."""
    most = sum(int((copy.pages >= 0).sum(axis=1).max()) for copy in (*command.out, *command.into))
    return most * times.page_bytes / COPY_RATE


class _TransferredTiers(Tiers):
    """The tiers of a decode instance to which prefill instances have transferred all whole pages."""

    def __init__(self) -> None:  # without threads and memory
        self.window_parts = 0

    def nearest(self, ranks: Iterator[int]) -> None:
        """Does nothing: pages are not fetched from other ranks."""

    def record_query(self, pages: int) -> None:
        """Does nothing: queries are not counted."""

    def num_loadable(self, keys: Sequence[Key], first: int, found: int) -> int:
        """Returns the number of available pages: all."""
        return len(keys) - first

    def lacks(self, key: Key) -> bool:
        """Returns False: nothing is offloaded."""
        return False


class TransferredPages:
    """Loads a prompt's whole pages at once; the fleet has already waited for their transfer."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        scheduler.attach_tiers(_TransferredTiers())

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Starts the prefill of all requests whose pages load."""
        for sequence in list(self._scheduler.loading):
            self._scheduler.on_loaded(
                sequence, sequence.load_stop - sequence.prefilled // self._scheduler.cfg.page_size
            )
            self._scheduler.begin_prefill(sequence)
        return []
