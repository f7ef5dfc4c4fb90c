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
from tools.simulate.instance import SimulatedInstance
from tools.simulate.options import Routing
from tools.simulate.pages import SimulatedPagesPlanner, SimulatedStore, TransferredPages, WorkerTime
from tools.simulate.pool import InstanceGroup, PoolMember, SimulatedPool
from tools.simulate.prompts import SimulatedRequest, page_keys
from tools.simulate.record import Outcome, RequestLog
from tools.simulate.times import InstanceTimes, VirtualClock
from tools.simulate.traffic import Session, TracedRequest

_RETRY_S = 1.0  # a client of the closed loop sends its next request this long after a refusal


class FleetConfigError(ValueError):
    """A contradictory fleet; the message says what to change."""


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
    pool: SimulatedPool | None = None
    booking: Booking | None = None
    is_prefill: bool = False


class SimulatedFleet:
    """All pools of instances; `record` logs the requests."""

    def __init__(self, config: FleetConfig, clock: VirtualClock, record: RequestLog) -> None:
        self.config, self.clock, self.record = config, clock, record
        self._longest = min(config.limits(group.times).max_model_len for group in config.groups)
        self._work = WorkerTime(clock)
        self._store = self._make_store()
        self.active: dict[int, _Active] = {}  # requests that have not ended, by number
        self.expects_more = True
        self._last_end: dict[SimulatedInstance, float] = {}
        self.pages: list[SimulatedPagesPlanner] = []
        self.answering = self._open_pool(config.answering, decodes=True)
        self.prefilling = None if config.prefilling is None else self._open_pool(config.prefilling, decodes=False)
        self.pools = (self.answering,) if self.prefilling is None else (self.prefilling, self.answering)

    @property
    def is_over(self) -> bool:
        """Whether all requests have ended and no more will arrive."""
        return not self.active and not self.expects_more

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
        active = self.active[number] = _Active(request, keys, prompt, on_end)
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
        elif self.prefilling is not None and active.prompt.keys:
            delay = self.prefilling.group.times.transfer_seconds(active.prompt.tokens)
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
        found = [(self.active[output.request_id], output) for output in outputs.details]
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
        del self.active[active.request.number]
        if active.booking is not None:
            self._release(active)
        self.record.on_end(active.request.number, self.clock.now, end)
        active.on_end(end)

    def _open_pool(self, group: InstanceGroup, *, decodes: bool) -> SimulatedPool:
        config, times = self.config, group.times
        limits = config.limits(times)

        def make() -> SimulatedInstance:
            return SimulatedInstance(
                times, limits, self.clock, self._on_outputs, lambda view, wake: self._pages(times, view, wake)
            )

        return SimulatedPool(group, self.clock, make, decodes=decodes, routing=config.routing, seed=config.seed)

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
