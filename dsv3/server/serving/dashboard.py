"""The dashboard's data as one bounded JSON object, and a profile of steps as a Chrome trace for ui.perfetto.dev.

Times of a trace are whole microseconds, and a span's duration is the difference of its rounded ends. Otherwise a span
could end after its parent by a rounding error, and Perfetto would drop it.
"""

import gzip
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dsv3.engine.step_log import EngineSnapshot, ExpertLoad, StepRecord
from dsv3.scheduler.listing import RequestList
from dsv3.scheduler.request import senders
from dsv3.server.serving.generation import ChoiceStream
from dsv3.server.serving.metrics import TIERS
from dsv3.server.serving.metrics_history import KEPT_S
from dsv3.server.serving.service import Service

_HOST, _DEVICES = 1, 2
_NAMES = {_HOST: "host", _DEVICES: "devices (at most: from launch, or the results before, to the results)"}


def write_trace(steps: Sequence[StepRecord], path: Path) -> int:
    """Writes the trace as gzipped JSON; returns its size in bytes. Raises OSError, FileExistsError among them."""
    content = gzip.compress(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": list(trace_events(steps))}))
    with path.open("xb") as file:
        return file.write(content)


def trace_events(steps: Sequence[StepRecord]) -> Iterator[dict[str, Any]]:
    """Yields the events: spans of the host and of the devices, and counters of requests; times in microseconds."""
    for thread, name in _NAMES.items():
        yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "dsv3 engine"}}
    if not steps:
        return
    start = steps[0].began
    for note in steps:
        yield from _of_host(note, start)
        counts = {"running": note.running, "waiting": note.waiting}
        yield {"ph": "C", "pid": 1, "name": "requests", "ts": _us(note.ended - start), "args": counts}
    yield from _of_devices(steps, start)


def _of_host(note: StepRecord, start: float) -> Iterator[dict[str, Any]]:
    """Yields the step, and its parts inside it."""
    about = {"launched step": note.launched, "took results of step": note.collected}
    about |= {job.kind: job.amount for job in note.jobs}
    yield _span(_HOST, f"step {note.launched or note.collected}", note.began - start, note.ended - start, about)
    began = note.began
    for part in note.parts:
        yield _span(_HOST, part.what, began - start, part.at - start)
        began = part.at


def _of_devices(steps: Sequence[StepRecord], start: float) -> Iterator[dict[str, Any]]:
    """Yields for each step the time in which its jobs alone were on the devices or queued for them."""
    launched = {note.launched: (at, note) for note in steps if (at := _at(note, "launch")) is not None}
    free = start
    for note in steps:
        done, (begun, cause) = _last(note, "wait"), launched.get(note.collected, (None, note))
        if begun is None or done is None:
            continue
        about = {job.kind: job.amount for job in cause.jobs}
        kinds = " + ".join(dict.fromkeys(job.kind for job in cause.jobs))
        yield _span(_DEVICES, kinds, max(begun, free) - start, done - start, {"step": note.collected} | about)
        free = done


def _at(note: StepRecord, what: str) -> float | None:
    return next((part.at for part in note.parts if part.what == what), None)


def _last(note: StepRecord, what: str) -> float | None:
    """Returns when the last such part ended; a step launched in two parts has two waits."""
    return next((part.at for part in reversed(note.parts) if part.what == what), None)


def _span(thread: int, name: str, start: float, end: float, about: dict[str, int] | None = None) -> dict[str, Any]:
    begins, ends = _us(start), _us(end)
    span = {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": begins, "dur": ends - begins}
    return span if about is None else span | {"args": about}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


_MAX_LAYERS, _MAX_COLUMNS = 256, 1024  # of a heat map; the rest of a larger model is cut off
MAX_STEPS_SHOWN = 120


def picture(service: Service, since: float, experts: int) -> bytes:
    """Returns the dashboard's JSON: time series after `since`, and the expert load unless `experts` is its version.

    Numbers that do not exist (yet) are null or absent.
    """
    stats, info, snapshot = service.metrics.stats, service.engine.info, service.snapshot_poller.snapshot()
    return msgspec.json.encode(
        {
            "now": time.time(),
            "kept_s": KEPT_S,
            "model": service.config.model_names[0],
            "status": service.status,
            "reason": service.reason,
            "started": service.created,
            "max_num_seqs": info and info.max_num_seqs,
            "num_pages": info and info.num_pages,
            "max_model_len": info and info.rules.max_model_len,
            "pages_in_use": stats.get("pages_in_use"),
            "kernel_fallbacks": info and info.kernel_fallbacks,
            "recompilations": stats.get("recompilations"),
            "accepted_by_place": _accepted(stats),
            "tiers": [{"name": tier, **_tier(stats, tier)} for tier in TIERS if f"pages_tiers_{tier}_hits" in stats],
            "experts": expert_load_json(snapshot, experts, stats),
            "steps": [] if snapshot is None else [_step(note) for note in snapshot.steps[-MAX_STEPS_SHOWN:]],
            "series": service.history.series(since),
            "slow_requests": [_linked(service, each) for each in service.slow_requests.since(time.time() - KEPT_S)],
        }
    )


def _linked(service: Service, request: dict[str, Any]) -> dict[str, Any]:
    """Returns a slow request with the address of its trace, None where the operator names no viewer."""
    url = service.config.options.trace_url
    return request | {"trace_url": url and url.replace("{trace_id}", request["trace_id"])}


def list_requests(service: Service, found: RequestList) -> bytes:
    """Returns the JSON of the engine's requests; those of this API server with their X-Request-Id and tenant."""
    requests = []
    for each in found.requests:
        stream = service.engine.stream_of(each.request_id)
        generation = stream.generation if isinstance(stream, ChoiceStream) else None
        tenant = None if generation is None else generation.tenant
        about = {
            "id": None if generation is None else generation.timeline.request_id,
            "tenant": None if tenant is None else tenant.name,
            "api_server": senders(each.request_id),
        }
        requests.append(about | msgspec.structs.asdict(each))
    return msgspec.json.encode({"total": found.total, "requests": requests})


def _accepted(stats: dict[str, Any]) -> list[float]:
    """Returns the share of rows with drafts in which all drafts up to a position were accepted, by position."""
    rows = stats.get("draft_num_drafts", 0)
    return [count / rows for count in stats.get("draft_num_accepted_tokens_per_pos", [])] if rows else []


def _tier(stats: dict[str, Any], tier: str) -> dict[str, Any]:
    names = ("bytes_held", "queries", "hits", "loaded_bytes", "stored_bytes", "damaged", "failures")
    return {name: stats.get(f"pages_tiers_{tier}_{name}") for name in names}


def _step(note: StepRecord) -> dict[str, Any]:
    """Returns a step; its parts' times are microseconds since its beginning, which is in seconds."""
    return {
        "began": note.began,
        "launched": note.launched,
        "collected": note.collected,
        "parts": [[part.what, round((part.at - note.began) * 1e6)] for part in note.parts],
        "jobs": note.jobs,
        "running": note.running,
    }


def expert_load_json(snapshot: EngineSnapshot | None, known: int, stats: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the expert load in percent of each layer's mean; only its version where the page has it already.

    None where the engine has reported none.
    """
    if snapshot is None or snapshot.experts is None:
        return None
    load, names = snapshot.experts, ("experts_rebalances", "experts_moved", "experts_balancedness")
    found = {"version": load.version} | {name: stats.get(name) for name in names}
    if load.version == known:
        return found
    found |= {"layers": load.layers, "experts": load.experts, "devices": load.devices}
    return found | {
        "load": _percent(load, load.load, load.experts),
        "device_load": _percent(load, load.device_load, load.devices),
        "before": _percent(load, load.before, load.devices),
        "after": _percent(load, load.after, load.devices),
    }


def _percent(load: ExpertLoad, values: bytes, columns: int) -> list[list[int]]:
    """Returns `[layers, columns]` as percent of the layer's mean, 0 in a layer without load; empty for no values."""
    if not values:
        return []
    array = np.frombuffer(values, "<f4").reshape(load.layers, columns)[:_MAX_LAYERS]
    mean = array.mean(axis=1, keepdims=True)
    percent = np.divide(100 * array, mean, out=np.zeros_like(array), where=mean > 0)
    return percent[:, :_MAX_COLUMNS].round().astype(int).tolist()
