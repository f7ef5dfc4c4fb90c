"""Simulates a fleet in virtual time: sessions arrive, the router places requests, instances step and transfer pages.

Requests take the path of `router`. With prefill instances, a prompt of a page or more first goes to one of them for one
token. The request then goes to an answering instance, which fetches the whole pages and computes the rest.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.engine.job import EngineView
from dsv3.kv_cache.page_keys import Key
from dsv3.scheduler.request import StepOutputs
from router.instance import Booking
from router.request import MAX_PAGES, Prompt
from tools.simulate.instance import SimulatedInstance, Totals
from tools.simulate.options import Pressure, Routing, ScalingPolicy
from tools.simulate.pages import SimulatedPagesPlanner, SimulatedStore, TransferredPages, WorkerTime
from tools.simulate.pool import PoolMember, SimulatedPool
from tools.simulate.prompts import SimulatedRequest, page_keys
from tools.simulate.record import Outcome, RequestLog
from tools.simulate.times import InstanceTimes, VirtualClock
from tools.simulate.traffic import Session, TracedRequest

_RETRY_S = 1.0  # a client of the closed loop sends its next request this long after a refusal


class FleetConfigError(ValueError):
    """A contradictory fleet; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class InstanceGroup:
    """Instances of one deployment: `count` at the start; `policy` adds and removes some, if given."""

    times: InstanceTimes
    count: int
    policy: ScalingPolicy | None = None


@dataclasses.dataclass(frozen=True)
class FleetConfig:
    """The simulated fleet: instances that answer, and optionally instances that compute prompts for them.

    `host_gib` of host memory per instance keep offloaded pages of prompts, `store_gib` are a store that all share.
    Raises FleetConfigError for contradictions.
    """

    answering: InstanceGroup
    prefilling: InstanceGroup | None = None
    max_model_len: int | None = None
    routing: Routing = "cost"
    host_gib: float = 0.0
    store_gib: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.answering.times.role == "prefill":
            raise FleetConfigError(f"{self.answering.times.name} only computes prompts; give a deployment that decodes")
        if self.prefilling is None and self.answering.times.role == "decode":
            raise FleetConfigError(
                f"{self.answering.times.name} computes no prompts; give a deployment that prefills, too"
            )
        if self.store_gib and not self.host_gib:
            raise FleetConfigError("a store needs host memory, through which its pages pass")
        for group in self.groups:
            if group.count < 1:
                raise FleetConfigError(f"{group.times.name}: {group.count} instances; at least 1 must run")
            try:
                self.limits(group.times)
            except ValueError as error:
                raise FleetConfigError(f"{group.times.name}: {error}") from None

    def limits(self, times: InstanceTimes) -> EngineConfig:
        """Returns the limits of an instance; decode instances have neither prefix cache nor offloading."""
        computes = times.role != "decode"
        return times.limits(self.max_model_len, prefix_caching=computes, offload_gib=self.host_gib * computes)

    @property
    def groups(self) -> tuple[InstanceGroup, ...]:
        """All groups of instances; prefill's is first."""
        return (self.answering,) if self.prefilling is None else (self.prefilling, self.answering)


@dataclasses.dataclass(eq=False, slots=True)
class _Active:
    """A request in flight, its booking at an instance, and the callback for its end."""

    request: SimulatedRequest
    keys: tuple[Key, ...]
    prompt: Prompt
    on_end: Callable[[Outcome], None]
    pool: "SimulatedPool | None" = None
    booking: Booking | None = None
    is_prefill: bool = False


class SimulatedFleet:
    """All pools of instances; `record` logs the requests."""

    def __init__(self, config: FleetConfig, clock: VirtualClock, record: RequestLog) -> None:
        self.config, self.clock, self.record = config, clock, record
        self._longest = min(config.limits(group.times).max_model_len for group in config.groups)
        self._work = WorkerTime(clock)
        self._store = self._make_store()
        self._active: dict[int, _Active] = {}
        self.expects_more = True
        self._last_end: dict[SimulatedInstance, float] = {}
        self._low_checks: dict[SimulatedPool, int] = {}
        self._removed: dict[SimulatedPool, tuple[float, Totals]] = {}  # seconds and work of removed instances
        self.pages: list[SimulatedPagesPlanner] = []
        self.answering = self._open_pool(config.answering, decodes=True)
        self.prefilling = None if config.prefilling is None else self._open_pool(config.prefilling, decodes=False)

    @property
    def pools(self) -> tuple[tuple[SimulatedPool, InstanceGroup], ...]:
        """The pools with their groups; prefill's is first."""
        answering = (self.answering, self.config.answering)
        if self.prefilling is None or self.config.prefilling is None:
            return (answering,)
        return (self.prefilling, self.config.prefilling), answering

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._active)

    @property
    def is_over(self) -> bool:
        """Whether all requests have ended and no more will arrive."""
        return not self._active and not self.expects_more

    def nodes(self, pool: SimulatedPool, group: InstanceGroup) -> int:
        """Returns the nodes of a pool, including instances that start or drain."""
        return len(pool.members) * group.times.nodes

    # Requests

    def submit(self, traced: TracedRequest, on_end: Callable[[Outcome], None]) -> None:
        """Submits a request; calls `on_end` once, when it ends."""
        tokens = traced.prompt
        number = self.record.on_arrival(self.clock.now, tokens)
        if tokens >= self._longest:
            self.record.on_end(number, self.clock.now, "too long")
            on_end("too long")
            return
        keys = tuple(page_keys(traced.content, self.config.answering.times.page_size))
        known = keys[:MAX_PAGES]
        prompt = Prompt(known, tokens, known if self.config.routing == "events" else None)
        request = SimulatedRequest(number, traced.content, tokens, min(tokens + traced.answer, self._longest))
        active = self._active[number] = _Active(request, keys, prompt, on_end)
        if self.prefilling is not None and prompt.keys:
            active.is_prefill = True
            self._book(active, self.prefilling)
        else:
            self._book(active, self.answering)

    def _book(self, active: _Active, pool: SimulatedPool) -> None:
        active.pool = pool
        pool.book(active.prompt, lambda booking: self._send(active, booking), lambda: self._end(active, "refused"))

    def _send(self, active: _Active, booking: Booking) -> None:
        active.booking = booking
        member: PoolMember = booking.instance  # type: ignore[assignment]
        request, delay = active.request, 0.0
        if active.is_prefill:
            request = request._replace(max_length=request.tokens + 1)
        elif self.prefilling is not None and self.config.prefilling is not None and active.prompt.keys:
            delay = self.config.prefilling.times.transfer_seconds(active.prompt.tokens)
        if delay:
            self.clock.call_at(self.clock.now + delay, lambda: member.instance.submit(request, active.keys))
        else:
            member.instance.submit(request, active.keys)

    def _on_outputs(self, instance: SimulatedInstance, outputs: StepOutputs) -> None:
        """Processes the outputs of a step."""
        now = self.clock.now
        before, self._last_end[instance] = self._last_end.get(instance, np.nan), now
        for rows in outputs.columns:
            self.record.record_tokens(rows.ids, now, before)
        found = [(self._active[output.request_id], output) for output in outputs.details]
        if advanced := [output.request_id for active, output in found if output.token_ids and not active.is_prefill]:
            self.record.record_tokens(np.array(advanced), now, before)
        for active, output in found:
            if active.is_prefill:
                self._on_prefilled(active, output.num_cached_tokens)
                continue
            if np.isnan(self.record.first[output.request_id]):
                self._on_first_token(active, output.num_cached_tokens)
            if output.finish_reason is not None:
                self._end(active, "answered")

    def _on_prefilled(self, active: _Active, cached: int) -> None:
        self.record.cached[active.request.number] = cached
        self._release(active)
        active.is_prefill = False
        self._book(active, self.answering)

    def _on_first_token(self, active: _Active, cached: int) -> None:
        number = active.request.number
        self.record.first[number] = self.clock.now
        if self.prefilling is None:
            self.record.cached[number] = cached
        assert active.booking is not None
        # The router counts each token; here half of the answer is counted once.
        active.booking.on_tokens((active.request.max_length - active.request.tokens) // 2)

    def _release(self, active: _Active) -> None:
        assert active.booking is not None and active.pool is not None
        booking, active.booking = active.booking, None
        active.pool.close(booking)

    def _end(self, active: _Active, end: Outcome) -> None:
        del self._active[active.request.number]
        if active.booking is not None:
            self._release(active)
        self.record.on_end(active.request.number, self.clock.now, end)
        active.on_end(end)

    # Instances

    def _open_pool(self, group: InstanceGroup, *, decodes: bool) -> SimulatedPool:
        pool = SimulatedPool(self.clock, decodes=decodes, routing=self.config.routing, seed=self.config.seed)
        self._removed[pool], self._low_checks[pool] = (0.0, Totals()), 0
        for _ in range(group.count):
            self._start(pool, group).is_up = True
        if group.policy is not None:
            policy = group.policy
            self.clock.call_at(policy.period_s, lambda: self._scale(pool, group, policy))
        return pool

    def _start(self, pool: SimulatedPool, group: InstanceGroup) -> PoolMember:
        instance, alone = self._instance(group.times), group.count == 1 and group.policy is None
        pool.members.append(PoolMember(instance, self.clock.now, alone=alone))
        return pool.members[-1]

    def _instance(self, times: InstanceTimes) -> SimulatedInstance:
        limits = self.config.limits(times)
        return SimulatedInstance(
            times, limits, self.clock, self._on_outputs, lambda view, wake: self._pages(times, view, wake)
        )

    def _pages(
        self, times: InstanceTimes, view: EngineView, wake: Callable[[], None]
    ) -> SimulatedPagesPlanner | TransferredPages | None:
        if times.role == "decode":
            return TransferredPages(view.scheduler)
        if not self.config.host_gib:
            return None
        self.pages.append(
            SimulatedPagesPlanner(view, times, self._work, wake, self.config.host_gib * 2**30, self._store)
        )
        return self.pages[-1]

    def _make_store(self) -> SimulatedStore | None:
        first = self.config.groups[0].times
        if not self.config.store_gib:
            return None
        limit = int(self.config.store_gib * 2**30) // first.page_bytes
        return SimulatedStore(self._work, limit, first.page_bytes, first.link)

    def _scale(self, pool: SimulatedPool, group: InstanceGroup, policy: ScalingPolicy) -> None:
        """Starts or drains an instance where the rule says so."""
        serving = [member for member in pool.members if member.is_up and not member.is_draining]
        change = policy.decide(
            [instance_pressure(member.instance, pool.num_waiting, len(serving)) for member in serving]
        )
        starting = any(not member.is_up for member in pool.members)
        self._low_checks[pool] = self._low_checks[pool] + 1 if change < 0 else 0
        if change > 0 and not starting and len(serving) < policy.max_instances:
            member = self._start(pool, group)
            self.clock.call_at(self.clock.now + policy.start_s, lambda: self._on_started(pool, member))
        elif (
            self._low_checks[pool] >= policy.scale_down_checks and len(serving) > policy.min_instances and not starting
        ):
            self._low_checks[pool] = 0
            # The one with the fewest requests, or the youngest of these, as it caches the least.
            last = min(reversed(serving), key=lambda member: member.load.requests)
            last.is_draining = True
            self._remove_if_drained(pool, last)
        for member in [member for member in pool.members if member.is_draining]:
            self._remove_if_drained(pool, member)
        self.clock.call_at(self.clock.now + policy.period_s, lambda: self._scale(pool, group, policy))

    def _on_started(self, pool: SimulatedPool, member: PoolMember) -> None:
        member.is_up = True
        pool.dispatch()

    def _remove_if_drained(self, pool: SimulatedPool, member: PoolMember) -> None:
        """Removes a draining instance if it is idle."""
        if member in pool.members and not member.load.requests and member.instance.is_idle:
            pool.members.remove(member)
            seconds, totals = self._removed[pool]
            self._removed[pool] = seconds + self.clock.now - member.since, totals + member.instance.totals

    def pool_totals(self, pool: SimulatedPool) -> tuple[float, Totals]:
        """Returns the total seconds that instances of a pool have run, and their totals."""
        seconds, totals = self._removed[pool]
        for member in pool.members:
            seconds, totals = seconds + self.clock.now - member.since, totals + member.instance.totals
        return seconds, totals


def instance_pressure(instance: SimulatedInstance, waiting: int, among: int) -> Pressure:
    """Returns the load of an instance; the router's `waiting` requests are divided `among` so many instances."""
    slots = instance.cfg.max_num_seqs * instance.cfg.num_ranks
    pages, mine = instance.use
    return Pressure(instance.waiting_tokens / instance.times.prompt_rate, max(pages, mine + waiting / among / slots))


def replay(fleet: SimulatedFleet, sessions: Iterable[Session], until: float | None) -> None:
    """Schedules sessions at their times until `until`; a session's next request follows the end of the previous one."""
    pending = iter(sessions)

    def next_one() -> None:
        session = next(pending, None)
        if session is None or (until is not None and session.at >= until):
            fleet.expects_more = False
        else:
            fleet.clock.call_at(session.at, lambda: begin(session))

    def begin(session: Session) -> None:
        next_one()
        _submit_next(fleet, iter(session.requests))

    next_one()


def _submit_next(fleet: SimulatedFleet, requests: Iterator[TracedRequest]) -> None:
    traced = next(requests, None)
    if traced is not None:
        fleet.submit(traced, lambda end: _submit_next(fleet, requests))


def closed_loop(
    fleet: SimulatedFleet, requests: Iterator[TracedRequest], concurrency: int, ramp_s: float, until: float
) -> None:
    """Keeps `concurrency` requests in flight until `until`; clients start over the first `ramp_s` seconds."""

    def schedule_next(end: Outcome = "answered") -> None:
        pause = 0.0 if end == "answered" else _RETRY_S
        if fleet.clock.now + pause < until:
            fleet.clock.call_at(fleet.clock.now + pause, submit_next)

    def submit_next() -> None:
        traced = next(requests, None)
        if traced is not None:
            fleet.submit(traced, schedule_next)

    for i in range(concurrency):
        fleet.clock.call_at(ramp_s * i / concurrency, submit_next)
