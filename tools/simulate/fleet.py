"""A fleet in virtual time: sessions come, the router chooses, instances step, pages are handed over.

The way of a request is that of `router`. A prompt of a page or more goes to a prefill instance for one
token, where there are such. Then the request goes to an instance that answers, which fetches the whole pages and
computes the rest.
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
from tools.simulate.options import Pressure, Routing, Rule
from tools.simulate.pages import Handed, Pages, SimulatedStore, WorkerTime
from tools.simulate.pool import Place, SimulatedPool
from tools.simulate.prompts import SimulatedRequest, keys_of
from tools.simulate.record import End, RequestLog
from tools.simulate.times import InstanceTimes, VirtualClock
from tools.simulate.traffic import Session, TracedRequest

_RETRY_S = 1.0  # a client that was refused comes again with its next request


class SettingError(ValueError):
    """What is to be simulated contradicts itself; the text says what to change."""


@dataclasses.dataclass(frozen=True)
class InstanceGroup:
    """Instances of one deployment: `count` of them, or as many as `rule` says, `count` at first."""

    times: InstanceTimes
    count: int
    rule: Rule | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is simulated: instances that answer, those that compute prompts for them if there are any, and how.

    `host_gib` of host memory per instance take pages of prompts, `store_gib` are a store that all share. Raises
    SettingError for what contradicts itself.
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
            raise SettingError(f"{self.answering.times.name} only computes prompts; give a deployment that decodes")
        if self.prefilling is None and self.answering.times.role == "decode":
            raise SettingError(f"{self.answering.times.name} computes no prompts; give a deployment that prefills, too")
        if self.store_gib and not self.host_gib:
            raise SettingError("a store needs host memory, through which its pages pass")
        for group in self.groups:
            if group.count < 1:
                raise SettingError(f"{group.times.name}: {group.count} instances; at least 1 must run")
            try:
                self.limits(group.times)
            except ValueError as error:
                raise SettingError(f"{group.times.name}: {error}") from None

    def limits(self, times: InstanceTimes) -> EngineConfig:
        """Returns the limits of an instance: what answers alone has no prefix cache, as it looks up nothing."""
        computes = times.role != "decode"
        return times.limits(self.max_model_len, shares=computes, offload_gib=self.host_gib * computes)

    @property
    def groups(self) -> tuple[InstanceGroup, ...]:
        """The kinds of instances."""
        return (self.answering,) if self.prefilling is None else (self.prefilling, self.answering)


@dataclasses.dataclass(eq=False, slots=True)
class _Active:
    """A request on its way, the place it has, and who waits for its end."""

    asked: SimulatedRequest
    keys: tuple[Key, ...]
    prompt: Prompt
    ended: Callable[[End], None]
    pool: "SimulatedPool | None" = None
    booking: Booking | None = None
    is_prefill: bool = False


class SimulatedFleet:
    """The whole; `record` has what became of the requests."""

    def __init__(self, setting: Setting, clock: VirtualClock, record: RequestLog) -> None:
        self.setting, self.clock, self.record = setting, clock, record
        self._longest = min(setting.limits(group.times).max_model_len for group in setting.groups)
        self._work = WorkerTime(clock)
        self._store = self._make_store()
        self._active: dict[int, _Active] = {}
        self.expects_more = True
        self._last_end: dict[SimulatedInstance, float] = {}
        self._calm: dict[SimulatedPool, int] = {}
        self._gone: dict[SimulatedPool, tuple[float, Totals]] = {}  # seconds and work of instances that are no more
        self.pages: list[Pages] = []
        self.answering = self._open(setting.answering, decodes=True)
        self.prefilling = None if setting.prefilling is None else self._open(setting.prefilling, decodes=False)

    @property
    def pools(self) -> tuple[tuple[SimulatedPool, InstanceGroup], ...]:
        """The pools with what they are made of."""
        answering = (self.answering, self.setting.answering)
        if self.prefilling is None or self.setting.prefilling is None:
            return (answering,)
        return (self.prefilling, self.setting.prefilling), answering

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._active)

    @property
    def is_over(self) -> bool:
        """Whether all requests have ended, and no more come."""
        return not self._active and not self.expects_more

    def nodes(self, pool: SimulatedPool, group: InstanceGroup) -> int:
        """Returns the nodes that a pool has, also those that start or drain."""
        return len(pool.places) * group.times.nodes

    # Requests

    def come(self, ask: TracedRequest, ended: Callable[[End], None]) -> None:
        """Takes a request; `ended` is called once, when it has ended."""
        tokens = ask.prompt
        number = self.record.arrive(self.clock.now, tokens)
        if tokens >= self._longest:
            self.record.end(number, self.clock.now, "too long")
            ended("too long")
            return
        keys = tuple(keys_of(ask.content, self.setting.answering.times.page_size))
        known = keys[:MAX_PAGES]
        prompt = Prompt(known, tokens, known if self.setting.routing == "events" else None)
        asked = SimulatedRequest(number, ask.content, tokens, min(tokens + ask.answer, self._longest))
        active = self._active[number] = _Active(asked, keys, prompt, ended)
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
        place: Place = booking.instance  # type: ignore[assignment]
        asked, delay = active.asked, 0.0
        if active.is_prefill:
            asked = asked._replace(max_length=asked.tokens + 1)
        elif self.prefilling is not None and self.setting.prefilling is not None and active.prompt.keys:
            delay = self.setting.prefilling.times.hand_over_seconds(active.prompt.tokens)
        if delay:
            self.clock.at(self.clock.now + delay, lambda: place.instance.submit(asked, active.keys))
        else:
            place.instance.submit(asked, active.keys)

    def _hear(self, instance: SimulatedInstance, outputs: StepOutputs) -> None:
        """Takes in what a step has given."""
        now = self.clock.now
        before, self._last_end[instance] = self._last_end.get(instance, np.nan), now
        for rows in outputs.columns:
            self.record.note_tokens(rows.ids, now, before)
        found = [(self._active[output.request_id], output) for output in outputs.details]
        if told := [output.request_id for active, output in found if output.token_ids and not active.is_prefill]:
            self.record.note_tokens(np.array(told), now, before)
        for active, output in found:
            if active.is_prefill:
                self._prefilled(active, output.num_cached_tokens)
                continue
            if np.isnan(self.record.first[output.request_id]):
                self._began(active, output.num_cached_tokens)
            if output.finish_reason is not None:
                self._end(active, "answered")

    def _prefilled(self, active: _Active, cached: int) -> None:
        self.record.cached[active.asked.number] = cached
        self._leave(active)
        active.is_prefill = False
        self._book(active, self.answering)

    def _began(self, active: _Active, cached: int) -> None:
        number = active.asked.number
        self.record.note_first(number, self.clock.now)
        if self.prefilling is None:
            self.record.cached[number] = cached
        assert active.booking is not None
        # The router is told of the tokens as they come; here once, as of an answer half way.
        active.booking.answer((active.asked.max_length - active.asked.tokens) // 2)

    def _leave(self, active: _Active) -> None:
        assert active.booking is not None and active.pool is not None
        booking, active.booking = active.booking, None
        active.pool.close(booking)

    def _end(self, active: _Active, end: End) -> None:
        del self._active[active.asked.number]
        if active.booking is not None:
            self._leave(active)
        self.record.end(active.asked.number, self.clock.now, end)
        active.ended(end)

    # Instances

    def _open(self, group: InstanceGroup, *, decodes: bool) -> SimulatedPool:
        pool = SimulatedPool(self.clock, decodes=decodes, routing=self.setting.routing, seed=self.setting.seed)
        self._gone[pool], self._calm[pool] = (0.0, Totals()), 0
        for _ in range(group.count):
            self._start(pool, group).is_up = True
        if group.rule is not None:
            rule = group.rule
            self.clock.at(rule.period_s, lambda: self._look(pool, group, rule))
        return pool

    def _start(self, pool: SimulatedPool, group: InstanceGroup) -> Place:
        instance, alone = self._instance(group.times), group.count == 1 and group.rule is None
        pool.places.append(Place(instance, self.clock.now, alone=alone))
        return pool.places[-1]

    def _instance(self, times: InstanceTimes) -> SimulatedInstance:
        limits = self.setting.limits(times)
        return SimulatedInstance(
            times, limits, self.clock, self._hear, lambda view, wake: self._pages(times, view, wake)
        )

    def _pages(self, times: InstanceTimes, view: EngineView, wake: Callable[[], None]) -> Pages | Handed | None:
        if times.role == "decode":
            return Handed(view.scheduler)
        if not self.setting.host_gib:
            return None
        self.pages.append(Pages(view, times, self._work, wake, self.setting.host_gib * 2**30, self._store))
        return self.pages[-1]

    def _make_store(self) -> SimulatedStore | None:
        first = self.setting.groups[0].times
        if not self.setting.store_gib:
            return None
        limit = int(self.setting.store_gib * 2**30) // first.page_bytes
        return SimulatedStore(self._work, limit, first.page_bytes, first.link)

    def _look(self, pool: SimulatedPool, group: InstanceGroup, rule: Rule) -> None:
        """Starts or drains an instance where the rule says so."""
        serving = [place for place in pool.places if place.is_up and not place.is_draining]
        wish = rule.wants([pressure_of(place.instance, pool.num_waiting, len(serving)) for place in serving])
        starting = any(not place.is_up for place in pool.places)
        self._calm[pool] = self._calm[pool] + 1 if wish < 0 else 0
        if wish > 0 and not starting and len(serving) < rule.most:
            place = self._start(pool, group)
            self.clock.at(self.clock.now + rule.start_s, lambda: self._serve(pool, place))
        elif self._calm[pool] >= rule.calm and len(serving) > rule.least and not starting:
            self._calm[pool] = 0
            # That with the fewest requests, of equals the youngest, whose cache has the least.
            last = min(reversed(serving), key=lambda place: place.load.requests)
            last.is_draining = True
            self._drained(pool, last)
        for place in [place for place in pool.places if place.is_draining]:
            self._drained(pool, place)
        self.clock.at(self.clock.now + rule.period_s, lambda: self._look(pool, group, rule))

    def _serve(self, pool: SimulatedPool, place: Place) -> None:
        place.is_up = True
        pool.look()

    def _drained(self, pool: SimulatedPool, place: Place) -> None:
        """Lets a draining instance go that has nothing left to do."""
        if place in pool.places and not place.load.requests and place.instance.is_idle:
            pool.places.remove(place)
            seconds, totals = self._gone[pool]
            self._gone[pool] = seconds + self.clock.now - place.since, totals + place.instance.totals

    def done(self, pool: SimulatedPool) -> tuple[float, Totals]:
        """Returns the seconds that instances of a pool have run, all together, and what they have done."""
        seconds, totals = self._gone[pool]
        for place in pool.places:
            seconds, totals = seconds + self.clock.now - place.since, totals + place.instance.totals
        return seconds, totals


def pressure_of(instance: SimulatedInstance, waiting: int, among: int) -> Pressure:
    """Returns what an instance has before it; `waiting` requests of the router are shared `among` so many."""
    slots = instance.cfg.max_num_seqs * instance.cfg.num_ranks
    pages, mine = instance.use
    return Pressure(instance.waiting_tokens / instance.times.prompt_rate, max(pages, mine + waiting / among / slots))


def replay(fleet: SimulatedFleet, sessions: Iterable[Session], until: float | None) -> None:
    """Has sessions come at their times; each session's next request comes when the one before has ended."""
    pending = iter(sessions)

    def next_one() -> None:
        session = next(pending, None)
        if session is None or (until is not None and session.at >= until):
            fleet.expects_more = False
        else:
            fleet.clock.at(session.at, lambda: begin(session))

    def begin(session: Session) -> None:
        next_one()
        _go_on(fleet, iter(session.asks))

    next_one()


def _go_on(fleet: SimulatedFleet, asks: Iterator[TracedRequest]) -> None:
    ask = next(asks, None)
    if ask is not None:
        fleet.come(ask, lambda end: _go_on(fleet, asks))


def hold(fleet: SimulatedFleet, asks: Iterator[TracedRequest], concurrency: int, ramp_s: float, until: float) -> None:
    """Keeps as many requests on their way: each client's next one comes when the one before has ended."""

    def ask_next(end: End = "answered") -> None:
        pause = 0.0 if end == "answered" else _RETRY_S
        if fleet.clock.now + pause < until:
            fleet.clock.at(fleet.clock.now + pause, go)

    def go() -> None:
        ask = next(asks, None)
        if ask is not None:
            fleet.come(ask, ask_next)

    for i in range(concurrency):
        fleet.clock.at(ramp_s * i / concurrency, go)
