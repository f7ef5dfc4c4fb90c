"""Runs a simulation from its options: builds the fleet, replays the traffic, samples snapshots, returns figures."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.plan.published_day import CHART, LOADS
from tools.simulate.fleet import FleetConfig, SimulatedFleet, closed_loop, replay
from tools.simulate.options import SimulateOptions
from tools.simulate.pool import InstanceGroup
from tools.simulate.record import RequestLog
from tools.simulate.times import InstanceTimes, VirtualClock
from tools.simulate.traffic import Session, TracedRequest, TrafficError, draw_requests, open_loop, read_trace

_NUM_SNAPSHOTS = 240
_TRACE_PERIOD_S = 15.0
_LEAST_S = 1e-9


@dataclasses.dataclass(frozen=True)
class FleetSnapshot:
    """The fleet at one time: nodes and mean use of cache or batch slots by role, and totals so far."""

    at: float
    nodes: dict[str, int]
    use: dict[str, float]
    arrived: int
    output_tokens: int


def watch(fleet: SimulatedFleet, period: float) -> list[FleetSnapshot]:
    """Takes a snapshot every `period` seconds of virtual time; returns the list that they are appended to."""
    snapshots: list[FleetSnapshot] = []

    def take_snapshot() -> None:
        nodes: dict[str, int] = {}
        use: dict[str, float] = {}
        for pool in fleet.pools:
            role, up = pool.group.times.role, [member.instance for member in pool.members if member.is_up]
            nodes[role] = pool.nodes
            use[role] = sum(max(each.use) for each in up) / len(up)
        record, now = fleet.record, fleet.clock.now
        snapshots.append(FleetSnapshot(now, nodes, use, record.count, record.output_tokens))
        fleet.clock.call_at(now + period, take_snapshot)

    fleet.clock.call_at(0.0, take_snapshot)
    return snapshots


def simulate(
    options: SimulateOptions, by_name: dict[str, InstanceTimes]
) -> tuple[dict[str, Any], list[FleetSnapshot], RequestLog]:
    """Runs a simulation with step times by deployment name; returns figures, and snapshots and log for a picture.

    Raises FleetConfigError for a contradictory fleet, TrafficError for a trace that cannot be read.
    """
    config = fleet_config(options, by_name)
    clock, record = VirtualClock(), RequestLog(options.warm_up)
    fleet = SimulatedFleet(config, clock, record)
    snapshots = watch(fleet, options.seconds / _NUM_SNAPSHOTS if options.seconds else _TRACE_PERIOD_S)
    began = time.perf_counter(), time.process_time()
    _schedule_traffic(options, fleet)
    clock.run(options.seconds, lambda: fleet.is_over)
    figures = record.figures(clock.now, options.limits) | _fleet_figures(fleet)
    wall, processor = time.perf_counter() - began[0], time.process_time() - began[1]
    figures["simulator"] = {"wall_s": wall, "processor_s": processor, "virtual_s": clock.now}
    return figures, snapshots, record


def fleet_config(options: SimulateOptions, by_name: dict[str, InstanceTimes]) -> FleetConfig:
    """Returns the fleet of the options; raises FleetConfigError for contradictions."""

    def group(name: str, count: int) -> InstanceGroup:
        return InstanceGroup(by_name[name], count, options.policy)

    prefilling = None
    if options.instances is not None:
        answering = group(options.instances, options.num_instances)
    else:
        assert options.prefill is not None and options.decode is not None
        prefilling, answering = group(options.prefill, options.num_prefill), group(options.decode, options.num_decode)
    return FleetConfig(
        answering,
        prefilling,
        options.max_model_len,
        options.routing,
        options.kv_offloading_size,
        options.kv_store_size,
        options.seed,
    )


def _schedule_traffic(options: SimulateOptions, fleet: SimulatedFleet) -> None:
    """Schedules the requests of the options."""
    if options.trace is not None:
        replay(fleet, _read_sessions(options), options.seconds)
        return
    requests = draw_requests(options)
    assert options.seconds is not None
    if options.concurrency is not None:
        closed_loop(fleet, requests, options.concurrency, options.ramp_up, options.seconds)
        return
    assert options.request_rate is not None
    rate, most = (day_rate(options.seconds), 2.0) if options.day else (lambda _: 1.0, 1.0)
    mean = options.request_rate
    replay(fleet, open_loop(requests, lambda at: mean * rate(at), mean * most, options.seed), options.seconds)


def _read_sessions(options: SimulateOptions) -> list[Session]:
    """Returns the sessions of a trace, with times."""
    assert options.trace is not None
    sessions, has_times = read_trace(Path(options.trace))
    if has_times and options.request_rate is not None:
        raise TrafficError(f"{options.trace}: has times of requests; leave out --request_rate")
    if not has_times and options.request_rate is None:
        raise TrafficError(f"{options.trace}: has no times of conversations; give --request_rate")
    if has_times or options.request_rate is None:
        return sessions
    rate = options.request_rate
    marks = open_loop((TracedRequest((), 0) for _ in sessions), lambda _: rate, rate, options.seed)
    return [Session(mark.at, session.requests) for mark, session in zip(marks, sessions, strict=True)]


def day_rate(seconds: float) -> Callable[[float], float]:
    """Returns the relative load of DeepSeek's day, compressed to `seconds`, as a function of time."""
    ends = [*itertools.accumulate(hours / 24 * seconds for hours, _, _ in CHART)]

    def rate(now: float) -> float:
        return next((load for end, load in zip(ends, LOADS, strict=True) if now < end), LOADS[-1])

    return rate


def _fleet_figures(fleet: SimulatedFleet) -> dict[str, Any]:
    """Returns nodes, steps and hits by role and tier."""
    roles = {}
    for pool in fleet.pools:
        times, (seconds, totals) = pool.group.times, pool.totals
        roles[times.role] = {
            "times": times.name,
            "nodes": seconds / max(fleet.clock.now, _LEAST_S) * times.nodes,
            "gpus_per_node": times.gpus_per_node,
            "steps": totals.steps,
            "busy": totals.busy_s / max(seconds, _LEAST_S),
            "decode_step_ms": totals.decode_s / max(1, totals.decode_steps) * 1e3,
            "preemptions": totals.preemptions,
            "found_on_device": totals.prefix_hits / max(1, totals.prefix_queries),
        }
    tiers: dict[str, dict[str, float]] = {}
    for pages in fleet.pages:
        for name, counts in pages.stats().tiers.items():
            mine = tiers.setdefault(name, {"queries": 0, "hits": 0, "stored_bytes": 0, "evictions": 0})
            for field in mine:
                mine[field] += getattr(counts, field)
    return {"roles": roles, "tiers": tiers}
