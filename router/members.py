"""The pools of instances with the bounded queue in front of each, and who belongs to them.

Members are the instances that the router was told of, and those that register for a time.
"""

import asyncio
import collections
import contextlib
import hmac
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

import msgspec

from dsv3.http_client import Address
from dsv3.server.protocol.errors import QUEUE_FULL, ApiError, invalid, unavailable
from router.instance import Booking, Instance
from router.policy import choose
from router.request import Prompt

_RETRY_S = 1
_LOOK_S = 0.1  # rests end without anybody saying so
LEASE_S = 10.0
"""An instance that has not said for so long that it is there gets no more requests."""
MAX_REGISTERED = 1024
_MAX_URL = 2048


class Pool:
    """Gives each request the instance where it costs least, in order of arrival where none has room."""

    def __init__(self, instances: Sequence[Instance], *, decodes: bool, max_queued: int, queue_s: float):
        self.instances = list(instances)
        self._decodes, self._max_queued, self._queue_s = decodes, max_queued, queue_s
        self._waiting: collections.deque[tuple[Prompt, asyncio.Future[Booking]]] = collections.deque()
        self._chance = random.Random()

    @property
    def is_up(self) -> bool:
        """Whether any instance is well."""
        now = time.monotonic()
        return any(instance.status == "ok" and instance.is_leased(now) for instance in self.instances)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def book(self, prompt: Prompt) -> AsyncIterator[Booking]:
        """Yields a place at an instance; raises ApiError 503 where the queue is full or the wait too long."""
        booking = None if self._waiting else self._place(prompt)
        if booking is None:
            booking = await self._wait(prompt)
        try:
            yield booking
        finally:
            booking.close()
            self.look()

    def look(self) -> None:
        """Gives those who wait their places, as far as there are any."""
        while self._waiting:
            prompt, future = self._waiting[0]
            if not future.done():
                if (booking := self._place(prompt)) is None:
                    return
                future.set_result(booking)
            self._waiting.popleft()

    async def keep_looking(self) -> None:
        """Looks again and again."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def _place(self, prompt: Prompt) -> Booking | None:
        free = [instance for instance in self.instances if instance.has_room]
        if not free:
            return None
        pages = [instance.overlap(prompt) for instance in free]
        loads = [instance.load for instance in free]
        place = choose(prompt, loads, pages, decodes=self._decodes, chance=self._chance)
        return Booking(free[place], prompt, pages[place])

    async def _wait(self, prompt: Prompt) -> Booking:
        if len(self._waiting) >= self._max_queued:
            raise unavailable("the router's queue is full", QUEUE_FULL, _RETRY_S)
        future: asyncio.Future[Booking] = asyncio.get_running_loop().create_future()
        entry = prompt, future
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(self._queue_s):
                return await asyncio.shield(future)
        except TimeoutError:
            self._leave(entry)
            raise unavailable("no instance has had room for the request", "no_instance", _RETRY_S) from None
        except BaseException:
            self._leave(entry)
            raise

    def _leave(self, entry: tuple[Prompt, asyncio.Future[Booking]]) -> None:
        """Takes out of the queue who no longer waits, or gives back the place that came too late."""
        future = entry[1]
        if future.done() and not future.cancelled():
            future.result().close()
            self.look()
        else:
            future.cancel()
            with contextlib.suppress(ValueError):
                self._waiting.remove(entry)


class Registration(msgspec.Struct, forbid_unknown_fields=True):
    """What an instance says of itself: where it answers, what it does, and whether it leaves."""

    url: str
    role: Literal["both", "prefill", "decode"] = "both"
    leaves: bool = False


_decoder = msgspec.json.Decoder(Registration)


def read_registration(body: bytes | bytearray) -> Registration:
    """Reads what an instance has sent; raises ApiError 400."""
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the registration cannot be read: {error}") from None
    try:
        if len(found.url) > _MAX_URL:
            raise ValueError
        Address.parse(found.url)
    except ValueError:
        raise invalid(f"url: {found.url[:100]!r} is not http://HOST:PORT or https://HOST:PORT") from None
    return found


class Members:
    """Watches the health of all instances, and has those that register for `LEASE_S`. `key` is what these must know.

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
        self._registered: dict[str, tuple[Pool, Instance]] = {}

    def start(self) -> None:
        """Begins to watch."""
        for pool in set(self._pools.values()):
            for instance in pool.instances:
                self._tasks[instance] = asyncio.create_task(self._watch(pool, instance))

    async def close(self) -> None:
        """Ends all watching."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for instance in self._tasks:
            await instance.close()

    def admit(self, given: str | None) -> None:
        """Raises ApiError 401 for an instance that does not know the key."""
        if self._key is None:
            return
        scheme, _, key = (given or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._key.encode()):
            raise ApiError(401, "missing or wrong key", kind="authentication_error", code="invalid_api_key")

    def hear(self, said: Registration) -> dict[str, Any]:
        """Takes in a registration; returns what the instance is told. Raises ApiError for one that cannot be had."""
        if said.leaves:
            self._leave(said.url)
            return {"lease_s": 0.0}
        pool = self._pools.get(said.role)
        if pool is None:
            text = f"role: the router has no use for {said.role}; it has {', '.join(sorted(self._pools))}"
            raise invalid(text)
        known = self._registered.get(said.url)
        if known is None:
            self._join(said.url, pool)
        elif known[0] is pool:
            known[1].lease_until = time.monotonic() + LEASE_S
        else:  # another process has taken its place; it joins when that has left, since it says again that it is there
            self._leave(said.url)
        return {"lease_s": LEASE_S}

    def _join(self, url: str, pool: Pool) -> None:
        if any(each.url == url for each in pool.instances):  # named at the start
            return
        if len(self._registered) >= MAX_REGISTERED:
            raise unavailable(f"{MAX_REGISTERED} instances have registered already", "too_many_instances")
        instance = self._make(url)
        instance.lease_until = time.monotonic() + LEASE_S
        pool.instances.append(instance)
        self._registered[url] = pool, instance
        self._tasks[instance] = asyncio.create_task(self._watch(pool, instance))

    def _leave(self, url: str) -> None:
        """Gives an instance no more requests; what it has of them it may finish."""
        found = self._registered.get(url)
        if found is not None:
            found[1].lease_until = 0.0

    async def _watch(self, pool: Pool, instance: Instance) -> None:
        """Asks an instance for its health again and again, until its lease has ended and nothing is left there."""
        told = ""
        while True:
            await instance.probe()
            state = instance.status if instance.is_leased(time.monotonic()) else "left"
            if state != told:
                told = state
                self._notify(f"{instance.url}: {told}")
            if told == "left" and not instance.load.requests:
                break
            pool.look()
            await asyncio.sleep(self._interval_s)
        pool.instances.remove(instance)
        self._registered.pop(instance.url, None)
        self._tasks.pop(instance, None)
        await instance.close()
        self._forget(instance.url)
