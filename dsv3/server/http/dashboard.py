"""Routes of the dashboard, of step profiles, and of the list of requests.

The page contains no data and needs no key; its data do. The page's script asks the user for the key, keeps it for the
browser's tab, and sends it with each request. The Content-Security-Policy allows only the page's own script and style,
and connections to this server.
"""

import asyncio
import base64
import functools
import gzip
import hashlib
import math
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dsv3.engine.step_log import MAX_PROFILE_S, MAX_PROFILE_STEPS, StepRecord
from dsv3.server.http.auth import require_operator
from dsv3.server.http.bodies import make_routes
from dsv3.server.protocol.errors import ApiError, invalid, unavailable
from dsv3.server.serving.dashboard import list_requests, picture, write_trace
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
