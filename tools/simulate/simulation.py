"""A simulation from its options: what comes, for how long, looks at the fleet meanwhile, and what comes of it."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.plan.published_day import CHART, LOADS
from tools.simulate.fleet import InstanceGroup, Setting, SimulatedFleet, hold, replay
from tools.simulate.options import SimulateOptions
from tools.simulate.record import RequestLog
from tools.simulate.times import InstanceTimes, VirtualClock
from tools.simulate.traffic import Lengths, Session, TracedRequest, TrafficError, drawn, open_loop, read_trace

_LOOKS = 240
_TRACE_PERIOD_S = 15.0
_LEAST_S = 1e-9


@dataclasses.dataclass(frozen=True)
class FleetSnapshot:
    """The fleet at a time: nodes and mean use of cache or slots by role, and totals so far."""

    at: float
    nodes: dict[str, int]
    use: dict[str, float]
    queue_s: float
    in_flight: int
    arrived: int
    output_tokens: int


def watch(fleet: SimulatedFleet, period: float) -> list[FleetSnapshot]:
    """Has the fleet looked at every `period` seconds of virtual time; returns the list that is filled then."""
    snapshots: list[FleetSnapshot] = []

    def look() -> None:
        nodes: dict[str, int] = {}
        use: dict[str, float] = {}
        queue = 0.0
        for pool, group in fleet.pools:
            role, up = group.times.role, [place.instance for place in pool.places if place.is_up]
            nodes[role] = fleet.nodes(pool, group)
            use[role] = sum(max(each.use) for each in up) / len(up)
            if role != "decode":
                queue = max(each.waiting_tokens / each.times.prompt_rate for each in up)
        record, now = fleet.record, fleet.clock.now
        snapshots.append(FleetSnapshot(now, nodes, use, queue, fleet.in_flight, record.count, record.output_tokens))
        fleet.clock.at(now + period, look)

    fleet.clock.at(0.0, look)
    return snapshots


def simulate(
    options: SimulateOptions, by_name: dict[str, InstanceTimes]
) -> tuple[dict[str, Any], list[FleetSnapshot], RequestLog]:
    """Runs a simulation on `by_name`, by deployment; returns figures as plain data, and what a picture needs.

    Raises SettingError for what contradicts itself, TrafficError for a trace that cannot be read.
    """
    setting = setting_of(options, by_name)
    clock, record = VirtualClock(), RequestLog(options.warm_up)
    fleet = SimulatedFleet(setting, clock, record)
    snapshots = watch(fleet, options.seconds / _LOOKS if options.seconds else _TRACE_PERIOD_S)
    began = time.perf_counter(), time.process_time()
    _load(options, fleet)
    clock.run(options.seconds, lambda: fleet.is_over)
    figures = record.figures(clock.now, options.limits) | _of_fleet(fleet)
    wall, processor = time.perf_counter() - began[0], time.process_time() - began[1]
    figures["simulator"] = {"wall_s": wall, "processor_s": processor, "virtual_s": clock.now}
    return figures, snapshots, record


def setting_of(options: SimulateOptions, by_name: dict[str, InstanceTimes]) -> Setting:
    """Returns what is simulated; raises SettingError for what contradicts itself."""

    def group(name: str, count: int) -> InstanceGroup:
        return InstanceGroup(by_name[name], count, options.rule)

    prefilling = None
    if options.instances is not None:
        answering = group(options.instances, options.num_instances)
    else:
        assert options.prefill is not None and options.decode is not None
        prefilling, answering = group(options.prefill, options.num_prefill), group(options.decode, options.num_decode)
    return Setting(
        answering,
        prefilling,
        options.max_model_len,
        options.routing,
        options.kv_offloading_size,
        options.kv_store_size,
        options.seed,
    )


def _load(options: SimulateOptions, fleet: SimulatedFleet) -> None:
    """Has the requests come."""
    if options.trace is not None:
        replay(fleet, _traced(options), options.seconds)
        return
    lengths = Lengths(options.prompt, options.answer, options.shared, options.num_prefixes)
    asks = drawn(lengths, options.max_model_len, options.seed)
    assert options.seconds is not None
    if options.concurrency is not None:
        hold(fleet, asks, options.concurrency, options.ramp_up, options.seconds)
        return
    assert options.request_rate is not None
    rate, most = (day_rate(options.seconds), 2.0) if options.day else (lambda _: 1.0, 1.0)
    mean = options.request_rate
    replay(fleet, open_loop(asks, lambda at: mean * rate(at), mean * most, options.seed), options.seconds)


def _traced(options: SimulateOptions) -> list[Session]:
    """Returns the sessions of a trace, with times."""
    assert options.trace is not None
    sessions, has_times = read_trace(Path(options.trace))
    if has_times and options.request_rate is not None:
        raise TrafficError(f"{options.trace}: says when requests come; leave out --request_rate")
    if not has_times and options.request_rate is None:
        raise TrafficError(f"{options.trace}: says not when conversations begin; give --request_rate")
    if has_times or options.request_rate is None:
        return sessions
    rate = options.request_rate
    marks = open_loop((TracedRequest((), 0) for _ in sessions), lambda _: rate, rate, options.seed)
    return [Session(mark.at, session.asks) for mark, session in zip(marks, sessions, strict=True)]


def day_rate(seconds: float) -> Callable[[float], float]:
    """Returns DeepSeek's day, compressed to `seconds`, as load over its mean by time."""
    ends = [*itertools.accumulate(hours / 24 * seconds for hours, _, _ in CHART)]

    def rate(now: float) -> float:
        return next((load for end, load in zip(ends, LOADS, strict=True) if now < end), LOADS[-1])

    return rate


def _of_fleet(fleet: SimulatedFleet) -> dict[str, Any]:
    """Returns nodes, steps and hits by role and tier."""
    roles = {}
    for pool, group in fleet.pools:
        seconds, done = fleet.done(pool)
        roles[group.times.role] = {
            "times": group.times.name,
            "nodes": seconds / max(fleet.clock.now, _LEAST_S) * group.times.nodes,
            "gpus_per_node": group.times.gpus_per_node,
            "steps": done.steps,
            "busy": done.busy_s / max(seconds, _LEAST_S),
            "decode_step_ms": done.decode_s / max(1, done.decode_steps) * 1e3,
            "preemptions": done.preemptions,
            "found_on_device": done.prefix_hits / max(1, done.prefix_queries),
        }
    tiers: dict[str, dict[str, float]] = {}
    for pages in fleet.pages:
        for name, counts in pages.counts().items():
            mine = tiers.setdefault(name, {"queries": 0, "hits": 0, "stored_bytes": 0, "evictions": 0})
            for field in mine:
                mine[field] += getattr(counts, field)
    return {"roles": roles, "tiers": tiers}
