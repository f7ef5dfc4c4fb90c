"""Pools of instances, each behind a bounded queue, and membership: instances from the options, and registered ones."""

import asyncio
import collections
import contextlib
import hmac
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

import msgspec

from dsv3.http_client import Address
from dsv3.server.protocol.errors import QUEUE_FULL, ApiError, invalid, unavailable
from dsv3.server.serving.request_parsing import read_fields
from router.instance import Booking, Instance
from router.policy import choose
from router.request import Prompt

_RETRY_S = 1
_DISPATCH_S = 0.1  # back-offs end without an event
_ABSENT_S = 5.0  # an instance that runs registers with a new router in this time
LEASE_S = 10.0
"""Seconds after which an instance that has not renewed its registration gets no more requests."""
MAX_REGISTERED = 1024
_MAX_URL = 2048


_Entry = tuple[Prompt, asyncio.Future[Booking | None]]


class Pool:
    """Dispatches each request to the instance where it costs least; queues in order of arrival while all are full.

    Requests are refused when no instance has been reachable for 5 s: they would wait for nothing.
    """

    def __init__(self, instances: Sequence[Instance], *, decodes: bool, max_queued: int, queue_s: float):
        self.instances = list(instances)
        self._decodes, self._max_queued, self._queue_s = decodes, max_queued, queue_s
        self._waiting: dict[str | None, collections.deque[_Entry]] = {}  # by the version that they wait for
        self._chance = random.Random()
        self._reachable_at = time.monotonic()

    @property
    def is_up(self) -> bool:
        """Whether any instance is healthy."""
        return any(instance.is_up for instance in self.instances)

    @property
    def versions(self) -> collections.Counter[str]:
        """How many instances of each version are healthy."""
        return collections.Counter(instance.version for instance in self.instances if instance.is_up)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def book(self, prompt: Prompt, version: str | None = None) -> AsyncIterator[Booking]:
        """Yields a booking at an instance; raises ApiError 503 where the queue is full or no instance takes it in time.

        It is one of `version`, unless that is None or no such instance is healthy. Each version has its own queue.
        """
        booking = None if self._waiting.get(version) else self._try_book(prompt, version)
        if booking is None:
            booking = await self._wait(prompt, version)
        try:
            yield booking
        finally:
            booking.close()
            self.dispatch()

    def dispatch(self) -> None:
        """Books queued requests, in the order of each queue, until no instance accepts one."""
        for version, queue in list(self._waiting.items()):
            while queue:
                prompt, future = queue[0]
                if not future.done():
                    if (booking := self._try_book(prompt, version)) is None:
                        break
                    future.set_result(booking)
                queue.popleft()
            if not queue:
                del self._waiting[version]

    async def keep_dispatching(self) -> None:
        """Dispatches every 0.1 s, or refuses all where no instance is reachable, until it is cancelled."""
        while True:
            await asyncio.sleep(_DISPATCH_S)
            self.dispatch()
            if self._has_none():
                for _, future in itertools.chain(*self._waiting.values()):
                    if not future.done():
                        future.set_result(None)
                self._waiting.clear()

    def _has_none(self) -> bool:
        """Returns whether no instance has been reachable for a while."""
        if any(instance.is_reachable for instance in self.instances):
            self._reachable_at = time.monotonic()
        return time.monotonic() - self._reachable_at > _ABSENT_S

    def _try_book(self, prompt: Prompt, version: str | None) -> Booking | None:
        free = [instance for instance in self.instances if instance.accepts_requests]
        if version is not None and any(each.is_up and each.version == version for each in self.instances):
            free = [instance for instance in free if instance.version == version]
        if not free:
            return None
        pages = [instance.overlap(prompt) for instance in free]
        loads = [instance.load for instance in free]
        index = choose(prompt, loads, pages, decodes=self._decodes, chance=self._chance)
        return Booking(free[index], prompt, pages[index])

    async def _wait(self, prompt: Prompt, version: str | None) -> Booking:
        if self._has_none():
            raise unavailable("no instance is reachable", "no_instance", _RETRY_S)
        if self.num_waiting >= self._max_queued:
            raise unavailable("the router's queue is full", QUEUE_FULL, _RETRY_S)
        future: asyncio.Future[Booking | None] = asyncio.get_running_loop().create_future()
        entry = prompt, future
        self._waiting.setdefault(version, collections.deque()).append(entry)
        try:
            async with asyncio.timeout(self._queue_s):
                booking = await asyncio.shield(future)
        except TimeoutError:
            self._dequeue(entry, version)
            raise unavailable("no instance accepted the request in time", "no_instance", _RETRY_S) from None
        except BaseException:
            self._dequeue(entry, version)
            raise
        if booking is None:
            raise unavailable("no instance is reachable", "no_instance", _RETRY_S)
        return booking

    def _dequeue(self, entry: _Entry, version: str | None) -> None:
        """Removes an entry from the queue, or closes the booking that came too late for it."""
        future = entry[1]
        if future.done() and not future.cancelled():
            if (booking := future.result()) is not None:
                booking.close()
                self.dispatch()
        else:
            future.cancel()
            with contextlib.suppress(ValueError):
                self._waiting.get(version, collections.deque()).remove(entry)


class Registration(msgspec.Struct, forbid_unknown_fields=True):
    """A registration: URL, role, and whether the instance leaves."""

    url: str
    role: Literal["both", "prefill", "decode"] = "both"
    leaves: bool = False


def read_registration(body: bytes | bytearray) -> Registration:
    """Parses a registration; raises ApiError 400."""
    found = read_fields(Registration, body)
    try:
        if len(found.url) > _MAX_URL:
            raise ValueError
        Address.parse(found.url)
    except ValueError:
        raise invalid(f"url: {found.url[:100]!r} is not http://HOST:PORT or https://HOST:PORT") from None
    return found


class Members:
    """Probes the health of all instances; leases membership to those that register with `key`, for `LEASE_S` each time.

    `forget` is called with the URL of each one that has left.
    """

    def __init__(
        self,
        pools: dict[str, Pool],
        make: Callable[[str], Instance],
        interval_s: float,
        notify: Callable[[str], None],
        key: str | None = None,
        forget: Callable[[str], None] = lambda url: None,
    ):
        self._forget = forget
        self._pools, self._make, self._interval_s, self._notify = pools, make, interval_s, notify
        self._key = key
        self._tasks: dict[Instance, asyncio.Task[None]] = {}
        self._dispatching: list[asyncio.Task[None]] = []
        self._registered: dict[str, tuple[Pool, Instance]] = {}

    def start(self) -> None:
        """Starts probing, and the dispatching of the pools."""
        for pool in set(self._pools.values()):
            self._dispatching.append(asyncio.create_task(pool.keep_dispatching()))
            for instance in pool.instances:
                self._tasks[instance] = asyncio.create_task(self._probe(pool, instance))

    async def close(self) -> None:
        """Ends what `start` and registrations have started, and closes the instances."""
        tasks = [*self._dispatching, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for instance in self._tasks:
            await instance.close()

    @property
    def has_key(self) -> bool:
        """Whether instances need a key to register."""
        return self._key is not None

    def authorize(self, given: str | None) -> None:
        """Raises ApiError 401 for an instance that does not know the key."""
        if self._key is None:
            return
        scheme, _, key = (given or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._key.encode()):
            raise ApiError(401, "missing or wrong key", kind="authentication_error", code="invalid_api_key")

    def register(self, registration: Registration) -> dict[str, Any]:
        """Adds, renews or removes an instance; returns its lease. Raises ApiError for one that is refused."""
        if registration.leaves:
            self._leave(registration.url)
            return {"lease_s": 0.0}
        pool = self._pools.get(registration.role)
        if pool is None:
            text = f"role: this router has no pool for {registration.role}; it has {', '.join(sorted(self._pools))}"
            raise invalid(text)
        known = self._registered.get(registration.url)
        if known is None:
            self._join(registration.url, pool)
        elif known[0] is pool:
            known[1].lease_until = time.monotonic() + LEASE_S
        else:  # another role at the same URL: it joins when the old entry has drained, since registrations repeat
            self._leave(registration.url)
        return {"lease_s": LEASE_S}

    def _join(self, url: str, pool: Pool) -> None:
        for other in set(self._pools.values()):
            if any(each.url == url for each in other.instances):  # named at the start
                if other is not pool:
                    raise invalid(f"role: {url} has been named at the start with another role")
                return
        if len(self._registered) >= MAX_REGISTERED:
            raise unavailable(f"{MAX_REGISTERED} instances have registered already", "too_many_instances")
        instance = self._make(url)
        instance.lease_until = time.monotonic() + LEASE_S
        pool.instances.append(instance)
        self._registered[url] = pool, instance
        self._tasks[instance] = asyncio.create_task(self._probe(pool, instance))

    def _leave(self, url: str) -> None:
        """Ends an instance's lease: it gets no more requests and may finish those it has."""
        found = self._registered.get(url)
        if found is not None:
            found[1].lease_until = 0.0

    async def _probe(self, pool: Pool, instance: Instance) -> None:
        """Probes an instance until its lease has ended and its last request is done; logs changes of its state."""
        logged = ""
        while True:
            await instance.probe()
            state = instance.status if instance.is_leased(time.monotonic()) else "left"
            if state != logged:
                logged = state
                self._notify(f"{instance.url}: {logged}")
            if logged == "left" and not instance.load.requests:
                break
            pool.dispatch()
            await asyncio.sleep(self._interval_s)
        pool.instances.remove(instance)
        self._registered.pop(instance.url, None)
        self._tasks.pop(instance, None)
        await instance.close()
        self._forget(instance.url)
