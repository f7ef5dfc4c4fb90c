"""Instances of one role, and the bounded queue in front of them."""

import asyncio
import collections
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence

from dsv3.server.answers.errors import QUEUE_FULL, unavailable
from router.choice import choose
from router.instance import Booking, Instance
from router.prompt import Prompt

_RETRY_S = 1
_LOOK_S = 0.1  # rests end without anybody saying so


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
