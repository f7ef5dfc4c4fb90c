"""The dashboard with its data, step profiles as Chrome traces for ui.perfetto.dev, and the list of requests.

The page contains no data and needs no key; its data do. The page's script asks the user for the key, keeps it for the
browser's tab, and sends it with each request. The Content-Security-Policy allows only the page's own script and style,
and connections to this server.

Times of a trace are whole microseconds, and a span's duration is the difference of its rounded ends. Otherwise a span
could end after its parent by a rounding error, and Perfetto would drop it.
"""

import asyncio
import base64
import functools
import gzip
import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dsv3.engine.step_log import MAX_PROFILE_S, MAX_PROFILE_STEPS, EngineSnapshot, ExpertLoad, StepRecord
from dsv3.scheduler.listing import RequestList
from dsv3.scheduler.request import senders
from dsv3.server.http.auth import require_operator
from dsv3.server.http.bodies import make_routes
from dsv3.server.protocol.errors import ApiError, invalid, unavailable
from dsv3.server.serving.generation import ChoiceStream
from dsv3.server.serving.metrics import TIERS
from dsv3.server.serving.metrics_history import KEPT_S
from dsv3.server.serving.service import Service

_MAX_DIGITS = 32


def dashboard_routes(service: Service, profile_dir: str | None) -> list[Route]:

    async def data(http: Request) -> Response:
        require_operator(service, http)
        since, known = _number(http, "since"), int(_number(http, "experts", -1))
        return _json(picture(service, since, known))

    async def start(http: Request) -> Response:
        _directory(service, http, profile_dir)
        await service.snapshot_poller.profile("start_profile")
        return _json({"status": "ok", "max_steps": MAX_PROFILE_STEPS, "max_seconds": MAX_PROFILE_S})

    async def stop(http: Request) -> Response:
        directory = _directory(service, http, profile_dir)
        steps = await service.snapshot_poller.profile("stop_profile")
        return _json(await asyncio.to_thread(_write, steps, directory))

    async def requests(http: Request) -> Response:
        require_operator(service, http)
        return _json(list_requests(service, await service.snapshot_poller.requests()))

    return make_routes(
        {
            ("GET", "/dashboard"): _page,
            ("GET", "/dashboard/data"): data,
            ("POST", "/start_profile"): start,
            ("POST", "/stop_profile"): stop,
            ("GET", "/debug/requests"): requests,
        }
    )


def _number(http: Request, name: str, default: float = 0.0) -> float:
    """Returns a number of the query string; raises ApiError 400 if it is not finite."""
    text = http.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text) if len(text) <= _MAX_DIGITS else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise invalid(f"{name}: expected a number", name)
    return value


def _directory(service: Service, http: Request, profile_dir: str | None) -> Path:
    """Returns the directory of profiles; raises ApiError if there is none, or if the client is not the operator."""
    require_operator(service, http)
    if profile_dir is None:
        raise ApiError(404, "profiles are off; start the server with --profile_dir", code="profiles_off")
    return Path(profile_dir)


def _write(steps: Sequence[StepRecord], directory: Path) -> dict[str, object]:
    """Writes a profile and returns its name; raises ApiError 409 if it is empty, 503 if it cannot be written."""
    if not steps:
        text = "no steps were recorded: call /start_profile, and /stop_profile after some requests"
        raise ApiError(409, text, code="no_profile")
    name = f"steps-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{time.time_ns() % 10**9:09d}.json.gz"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        size = write_trace(steps, directory / name)
    except OSError as error:
        raise unavailable(f"the profile cannot be written ({error.strerror})", "profile_not_written") from None
    return {"status": "ok", "file": name, "bytes": size, "steps": len(steps)}


def _json(value: object) -> Response:
    content = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return Response(content, media_type="application/json", headers={"cache-control": "no-store"})


async def _page(http: Request) -> Response:
    """Returns the page, without authentication."""
    page, compressed, headers = dashboard_page()
    if "gzip" in http.headers.get("accept-encoding", ""):
        return Response(compressed, media_type="text/html", headers=headers | {"content-encoding": "gzip"})
    return Response(page, media_type="text/html", headers=headers)


@functools.cache
def dashboard_page() -> tuple[bytes, bytes, dict[str, str]]:
    """Returns the page, plain and compressed, and its headers, whose policy has the digests of script and style."""
    files = resources.files("dsv3.server.http").joinpath("page")
    html, style, script = (files.joinpath(f"dashboard.{kind}").read_text() for kind in ("html", "css", "js"))
    page = html.replace("/*style*/", style).replace("/*script*/", script).encode()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "vary": "accept-encoding",
    }
    return page, gzip.compress(page, 9, mtime=0), headers


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


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
            "slow_requests": [_linked(service, each) for each in service.history.slow_requests(time.time())],
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
