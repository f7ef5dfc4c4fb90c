"""Instances of one role as the router knows them, and those that wait for one.

`choose`, `Booking`, `InstanceLoad` and `SentPages` are the router's own. The queue in front of them is the model of
`router.members.Pool`, which waits in real time: first come, first served, bounded in length and in time.
"""

import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Callable

from router.instance import Booking, Breaker
from router.policy import InFlightPrompts, InstanceLoad, SentPages, choose
from router.request import Prompt
from tools.simulate.instance import SimulatedInstance
from tools.simulate.options import Routing
from tools.simulate.times import VirtualClock

MOST_WAITING, WAIT_S = 1024, 30.0
"""The router's own bounds, `max_num_queued_reqs` and `queue_timeout`."""


class Place:
    """An instance behind the router: it starts, serves, and drains before it goes. `load` is what the router sent.

    What is `alone` is not chosen among others, so that nothing depends on what has been sent there.
    """

    def __init__(self, instance: SimulatedInstance, since: float, *, alone: bool) -> None:
        self.instance, self.since = instance, since
        self.load, self.flying = InstanceLoad(ranks=instance.cfg.num_ranks), InFlightPrompts()
        self.sent = SentPages(0) if alone else SentPages()
        self.breaker = Breaker()
        self.concurrency = 2 * instance.cfg.max_num_seqs * instance.cfg.num_ranks
        self.is_up = self.is_draining = False

    @property
    def has_room(self) -> bool:
        """Whether a request may be sent now."""
        return self.is_up and not self.is_draining and self.load.requests < self.concurrency

    def overlap(self, prompt: Prompt, near: int) -> int:
        """Returns how many pages of a prompt it finds: as its ranks know, or else as the router has sent there.

        They may be as many as `near`.
        """
        if prompt.spelled is None:
            return self.sent.overlap(prompt.keys, near)
        return max(self.instance.scheduler.pages.found(prompt.spelled), self.flying.overlap(prompt.keys))


@dataclasses.dataclass(eq=False, slots=True)
class _Waiting:
    prompt: Prompt
    take: Callable[[Booking], None] | None
    refuse: Callable[[], None]


class SimulatedPool:
    """Gives each request the instance where it costs least, or the next in turn."""

    def __init__(self, clock: VirtualClock, *, decodes: bool, routing: Routing, seed: int) -> None:
        self.places: list[Place] = []
        self._clock, self._decodes, self._routing = clock, decodes, routing
        self._chance, self._turns = random.Random(seed), itertools.count()
        self._waiting: deque[_Waiting] = deque()

    @property
    def num_waiting(self) -> int:
        """Requests for which no instance has room."""
        return sum(each.take is not None for each in self._waiting)

    def book(self, prompt: Prompt, take: Callable[[Booking], None], refuse: Callable[[], None]) -> None:
        """Calls `take` with a place, now or once there is one; or `refuse`."""
        booking = None if self._waiting else self._place(prompt)
        if booking is not None:
            take(booking)
        elif len(self._waiting) >= MOST_WAITING:
            refuse()
        else:
            entry = _Waiting(prompt, take, refuse)
            self._waiting.append(entry)
            self._clock.at(self._clock.now + WAIT_S, lambda: self._give_up(entry))

    def close(self, booking: Booking) -> None:
        """Takes a request off its instance's load, and looks after those that wait."""
        booking.close()
        self.look()

    def look(self) -> None:
        """Gives those that wait their places, as far as there are any."""
        while self._waiting:
            entry = self._waiting[0]
            if entry.take is not None:
                if (booking := self._place(entry.prompt)) is None:
                    return
                take, entry.take = entry.take, None
                self._waiting.popleft()
                take(booking)
            else:
                self._waiting.popleft()

    def _give_up(self, entry: _Waiting) -> None:
        if entry.take is not None:
            entry.take = None
            self._waiting.remove(entry)
            entry.refuse()

    def _place(self, prompt: Prompt) -> Booking | None:
        free = [place for place in self.places if place.has_room]
        if not free:
            return None
        if self._routing == "round_robin":
            free = [free[next(self._turns) % len(free)]]
        pages = list[int]()
        for place in free:
            pages.append(place.overlap(prompt, pages[-1] if pages else 0))
        loads = [place.load for place in free]
        chosen = 0  # of one there is nothing to choose
        if len(free) > 1:
            chosen = choose(prompt, loads, pages, decodes=self._decodes, chance=self._chance)
        return Booking(free[chosen], prompt, pages[chosen])  # type: ignore[arg-type]
