"""The instances of one role behind the router: its view of them, its queue of requests, and their scaling.

`choose`, `Booking`, `InstanceLoad` and `SentPages` are the router's own. The queue models `router.members.Pool` in
virtual time: first in, first out, bounded in length and waiting time.
"""

import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Callable

from dsv3.scheduler.sent_pages import SentPages
from router.instance import Booking, CircuitBreaker
from router.policy import InFlightPrompts, InstanceLoad, choose
from router.request import Prompt
from tools.simulate.instance import SimulatedInstance, Totals
from tools.simulate.options import Routing, ScalingPolicy
from tools.simulate.times import InstanceTimes, VirtualClock

MOST_WAITING, WAIT_S = 1024, 30.0
"""The router's own bounds, `max_num_queued_reqs` and `queue_timeout`."""


@dataclasses.dataclass(frozen=True)
class InstanceGroup:
    """Instances of one deployment: `count` at the start; `policy` adds and removes some, if given."""

    times: InstanceTimes
    count: int
    policy: ScalingPolicy | None = None


class PoolMember:
    """An instance behind the router. It starts, serves, and drains; `load` is what the router has sent to it.

    An instance that is always `alone` in its pool needs no memory of the pages sent to it.
    """

    def __init__(self, instance: SimulatedInstance, since: float, *, alone: bool) -> None:
        self.instance, self.since = instance, since
        self.load, self.in_flight = InstanceLoad(ranks=instance.cfg.num_ranks), InFlightPrompts()
        self.sent = SentPages(0) if alone else SentPages()
        self.breaker = CircuitBreaker()
        self.concurrency = 2 * instance.cfg.max_num_seqs * instance.cfg.num_ranks
        self.is_up = self.is_draining = False

    @property
    def accepts_requests(self) -> bool:
        """Whether the router may send a request now."""
        return self.is_up and not self.is_draining and self.load.requests < self.concurrency

    def overlap(self, prompt: Prompt, near: int) -> int:
        """Returns the expected prefix hits of a prompt in pages, from KV events or else from earlier requests.

        `near` is a guess at which the search starts.
        """
        if prompt.token_keys is None:
            return self.sent.overlap(prompt.keys, near)
        return max(self.instance.scheduler.pages.longest_match(prompt.token_keys), self.in_flight.overlap(prompt.keys))


@dataclasses.dataclass(eq=False, slots=True)
class _Waiting:
    prompt: Prompt
    on_booked: Callable[[Booking], None]
    on_refused: Callable[[], None]


class SimulatedPool:
    """Books each request at the instance of the least cost, or the next in turn; `make` returns a new instance."""

    def __init__(
        self,
        group: InstanceGroup,
        clock: VirtualClock,
        make: Callable[[], SimulatedInstance],
        *,
        decodes: bool,
        routing: Routing,
        seed: int,
    ) -> None:
        self.group, self.members = group, list[PoolMember]()
        self._clock, self._make, self._decodes, self._routing = clock, make, decodes, routing
        self._random, self._next_in_turn = random.Random(seed), itertools.count()
        self._waiting: deque[_Waiting] = deque()
        self._low_checks = 0  # successive ones
        self._removed = 0.0, Totals()  # seconds and work of removed instances
        for _ in range(group.count):
            self._start().is_up = True
        if group.policy is not None:
            policy = group.policy
            clock.call_at(policy.period_s, lambda: self._scale(policy))

    @property
    def nodes(self) -> int:
        """Nodes, including those of instances that start or drain."""
        return len(self.members) * self.group.times.nodes

    @property
    def totals(self) -> tuple[float, Totals]:
        """The seconds that all instances together have run, and their totals."""
        seconds, totals = self._removed
        for member in self.members:
            seconds, totals = seconds + self._clock.now - member.since, totals + member.instance.totals
        return seconds, totals

    def book(self, prompt: Prompt, on_booked: Callable[[Booking], None], on_refused: Callable[[], None]) -> None:
        """Calls `on_booked` when an instance has capacity, or `on_refused` if the queue is full or times out."""
        booking = None if self._waiting else self._reserve(prompt)
        if booking is not None:
            on_booked(booking)
        elif len(self._waiting) >= MOST_WAITING:
            on_refused()
        else:
            entry = _Waiting(prompt, on_booked, on_refused)
            self._waiting.append(entry)
            self._clock.call_at(self._clock.now + WAIT_S, lambda: self._on_timeout(entry))

    def close(self, booking: Booking) -> None:
        """Removes a request from its instance's load, and dispatches queued requests."""
        booking.close()
        self.dispatch()

    def dispatch(self) -> None:
        """Books queued requests in order while instances have capacity."""
        while self._waiting:
            entry = self._waiting[0]
            if (booking := self._reserve(entry.prompt)) is None:
                return
            self._waiting.popleft()
            entry.on_booked(booking)

    def _on_timeout(self, entry: _Waiting) -> None:
        if entry in self._waiting:
            self._waiting.remove(entry)
            entry.on_refused()

    def _reserve(self, prompt: Prompt) -> Booking | None:
        free = [member for member in self.members if member.accepts_requests]
        if not free:
            return None
        if self._routing == "round_robin":
            free = [free[next(self._next_in_turn) % len(free)]]
        pages = list[int]()
        for member in free:
            pages.append(member.overlap(prompt, pages[-1] if pages else 0))
        loads = [member.load for member in free]
        chosen = 0
        if len(free) > 1:
            chosen = choose(prompt, loads, pages, decodes=self._decodes, chance=self._random)
        return Booking(free[chosen], prompt, pages[chosen])  # type: ignore[arg-type]

    def _start(self) -> PoolMember:
        alone = self.group.count == 1 and self.group.policy is None
        self.members.append(PoolMember(self._make(), self._clock.now, alone=alone))
        return self.members[-1]

    def _scale(self, policy: ScalingPolicy) -> None:
        """Starts or drains an instance where the policy says so."""
        serving = [member for member in self.members if member.is_up and not member.is_draining]
        change = policy.decide([self._pressure(member.instance, len(serving)) for member in serving])
        starting = any(not member.is_up for member in self.members)
        self._low_checks = self._low_checks + 1 if change < 0 else 0
        if change > 0 and not starting and len(serving) < policy.max_instances:
            member = self._start()
            self._clock.call_at(self._clock.now + policy.start_s, lambda: self._on_started(member))
        elif self._low_checks >= policy.scale_down_checks and len(serving) > policy.min_instances and not starting:
            self._low_checks = 0
            # The one with the fewest requests, or the youngest of these, as it caches the least.
            min(reversed(serving), key=lambda member: member.load.requests).is_draining = True
        for member in [member for member in self.members if member.is_draining]:
            if not member.load.requests and member.instance.is_idle:
                self.members.remove(member)
                seconds, totals = self._removed
                self._removed = seconds + self._clock.now - member.since, totals + member.instance.totals
        self._clock.call_at(self._clock.now + policy.period_s, lambda: self._scale(policy))

    def _on_started(self, member: PoolMember) -> None:
        member.is_up = True
        self.dispatch()

    def _pressure(self, instance: SimulatedInstance, serving: int) -> tuple[float, float]:
        """Returns the load of an instance; requests in the queue are divided among the `serving` ones."""
        slots = instance.cfg.max_num_seqs * instance.cfg.num_ranks
        pages, mine = instance.use
        use = max(pages, mine + len(self._waiting) / serving / slots)
        return instance.waiting_tokens / instance.times.prompt_rate, use
