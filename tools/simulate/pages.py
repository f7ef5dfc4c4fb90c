"""Pages below the devices in virtual time: the real tiers and their planner, with modelled copies; and a hand-over.

`Tiers`, `HostPool` and `PagesPlanner` are the engine's. What is the model's: a job of a tier's threads takes as long as
its bytes at a stated rate, no byte is copied, and a store is a bounded list of keys.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from dsv3.engine.job import EngineView, Planned
from dsv3.engine.jobs.pages import Opened, PagesCommand, PagesPlanner, page_buckets
from dsv3.kv_cache.page_keys import Key
from dsv3.kv_cache.tiers.counts import TierCounts
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
    """Virtual time as jobs of threads see it: what they `spend` ends them later."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.spent = clock, 0.0

    def now(self) -> float:
        """Returns the time, with what the job under way has spent."""
        return self.clock.now + self.spent

    def spend(self, seconds: float) -> None:
        """Notes that the job under way takes longer."""
        self.spent += seconds


class SimulatedWorkers(Executor):
    """Threads in virtual time: each job does its work when it begins, and is done when its time is spent."""

    def __init__(self, work: WorkerTime, count: int, done: Callable[[], None]) -> None:
        self._work, self._idle, self._done = work, count, done
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queues a job behind those that wait."""
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        self._work.clock.at(self._work.now(), self._begin)
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
        self._work.clock.at(end, lambda: self._end(future, result))

    def _end(self, future: Future[Any], result: Any) -> None:
        self._idle += 1
        future.set_result(result)
        self._begin()
        self._done()


class SimulatedHostPool(HostPool):
    """Host memory whose values have one byte and take the time of a page's bytes."""

    def __init__(self, work: WorkerTime, num_blocks: int, page_bytes: int) -> None:
        super().__init__(np.zeros(host_pool_bytes(num_blocks, 1), np.uint8), 1, num_blocks)
        self._work, self.value_bytes = work, page_bytes

    def put(self, key: Key, payload: np.ndarray) -> bool:
        """Keeps a value."""
        self._work.spend(self.value_bytes / HOST_RATE)
        return super().put(key, payload[:1])

    def get(self, key: Key, out: np.ndarray) -> bool:
        """Finds a value."""
        self._work.spend(self.value_bytes / HOST_RATE)
        return super().get(key, out[:1])


class SimulatedStore:
    """A store that several instances share, as keys: at most `limit` pages, the least recently used ones go."""

    def __init__(self, work: WorkerTime, limit: int, page_bytes: int, rate: float) -> None:
        self.damaged = self.evictions = 0
        self._work, self._limit, self._page_bytes, self._rate = work, limit, page_bytes, rate
        self._keys: OrderedDict[Key, None] = OrderedDict()

    @property
    def bytes_held(self) -> int:
        """Bytes of the pages."""
        return len(self._keys) * self._page_bytes

    def count(self, keys: Sequence[Key]) -> int:
        """Returns how many of `keys` are there, from the first on."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def get(self, keys: Sequence[Key], out: np.ndarray) -> int:
        """Reads pages; returns how many are there, from the first on."""
        found = self.count(keys)
        for key in keys[:found]:
            self._keys.move_to_end(key)
        self._spend(found)
        return found

    def put(self, keys: Sequence[Key], payloads: np.ndarray) -> int:
        """Writes pages that are not there yet; returns how many."""
        new = [key for key in keys if key not in self._keys]
        self._keys.update(dict.fromkeys(new))
        while len(self._keys) > self._limit:
            self._keys.popitem(last=False)
            self.evictions += 1
        self._spend(len(new))
        return len(new)

    def delete(self, keys: Sequence[Key]) -> None:
        """Drops pages."""
        for key in keys:
            self._keys.pop(key, None)

    def _spend(self, pages: int) -> None:
        self._work.spend(pages * self._page_bytes / self._rate)


class _PolledTiers(Tiers):
    """Tiers for which nobody waits: a job that ends wakes the engine."""

    def wait(self, seconds: float) -> None:
        """Returns at once."""


class Pages:
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
        self.tiers = _PolledTiers(
            page_buckets(size),
            host_pool,
            store,
            workers=lambda count, _: SimulatedWorkers(work, count, wake),
            now=work.now,
            page_size=times.page_size,
        )
        self._planner = PagesPlanner(view, Opened(self.tiers, None, None))
        self._page = np.broadcast_to(np.zeros(1, np.uint8), (1, page_buckets(size)[-1], size))

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Plans what can be copied now."""
        return self._planner.plan(step)

    def collect(self, planned: Planned, results: list[np.ndarray], outputs: StepOutputs) -> None:
        """Hands what has left the devices to the tiers."""
        assert isinstance(planned.command, PagesCommand)
        copies = sum(len(copy.keys) for copy in planned.command.out)
        self._planner.collect(planned, (self._page,) * copies, outputs)

    def counts(self) -> dict[str, TierCounts]:
        """Returns what each tier has counted."""
        return self.tiers.counts()


def copy_seconds(command: PagesCommand, times: InstanceTimes) -> float:
    """Returns how long copies take between devices and host, on the rank with the most pages."""
    most = sum(int((copy.pages >= 0).sum(axis=1).max()) for copy in (*command.out, *command.into))
    return most * times.page_bytes / COPY_RATE


class _HandedTiers(Tiers):
    """Stands in for the tiers of a decode instance, where another one has computed the prompts' whole pages."""

    def __init__(self) -> None:  # without threads and memory
        pass

    def nearest(self, ranks: Iterator[int]) -> None:
        """Has nobody to ask."""

    def note_query(self, pages: int) -> None:
        """Counts nothing."""

    def within_reach(self, keys: Sequence[Key], first: int, found: int) -> int:
        """Returns how many pages are there: all."""
        return len(keys) - first

    def lacks(self, key: Key) -> bool:
        """Wants no page of the devices."""
        return False


class Handed:
    """Brings a prompt's whole pages to its slot at once: the time of their way is the fleet's."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        scheduler.attach_tiers(_HandedTiers())

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Lets those begin that have got their slot."""
        for sequence in list(self._scheduler.loading):
            self._scheduler.note_loaded(
                sequence, sequence.load_stop - sequence.prefilled // self._scheduler.cfg.page_size
            )
            self._scheduler.begin_prefill(sequence)
        return []

    def counts(self) -> dict[str, TierCounts]:
        """Returns nothing: no tier is asked."""
        return {}
