"""The dashboard's page and its data, and profiles of steps.

The page holds no data and is open; its data need the key, as everything else does. A script of the page asks for the
key, keeps it for the browser's tab, and sends it with each request. The page brings all that it shows: its policy lets
nothing else in, neither scripts nor pictures nor connections to other servers.
"""

import asyncio
import base64
import functools
import gzip
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dsv3.engine.step_log import MAX_PROFILE_S, MAX_PROFILE_STEPS, StepNote
from dsv3.server.http.auth import require_operator
from dsv3.server.http.bodies import endpoint
from dsv3.server.protocol.errors import ApiError, invalid, unavailable
from dsv3.server.serving.dashboard import picture, write_trace
from dsv3.server.serving.service import Service

_MAX_DIGITS = 32


def dashboard_routes(service: Service, profile_dir: str | None) -> list[Route]:
    """Returns the routes of the dashboard and of profiles."""

    async def data(http: Request) -> Response:
        require_operator(service, http)
        since, known = _number(http, "since"), int(_number(http, "experts", -1))
        return _json(picture(service, since, known))

    async def start(http: Request) -> Response:
        _directory(service, http, profile_dir)
        await service.onlooker.start_profile()
        return _json({"status": "ok", "max_steps": MAX_PROFILE_STEPS, "max_seconds": MAX_PROFILE_S})

    async def stop(http: Request) -> Response:
        directory = _directory(service, http, profile_dir)
        steps = await service.onlooker.stop_profile()
        return _json(await asyncio.to_thread(_write, steps, directory))

    routes: list[tuple[str, Callable[[Request], Awaitable[Response]], str]] = [
        ("/dashboard", _page, "GET"),
        ("/dashboard/data", data, "GET"),
        ("/start_profile", start, "POST"),
        ("/stop_profile", stop, "POST"),
    ]
    return [Route(path, endpoint(handler), methods=[method]) for path, handler, method in routes]


def _number(http: Request, name: str, default: float = 0.0) -> float:
    """Returns a number of the query; ApiError 400 for what is none."""
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
    """Returns where profiles go; raises ApiError where there are none, or not for this client."""
    require_operator(service, http)
    if profile_dir is None:
        raise ApiError(404, "profiles are off; start the server with --profile_dir", code="profiles_off")
    return Path(profile_dir)


def _write(steps: Sequence[StepNote], directory: Path) -> dict[str, object]:
    """Writes a profile, and returns what it is called there; ApiError 409 for none, 503 where it cannot be written."""
    if not steps:
        raise ApiError(409, "no steps were noted: begin a profile, and stop it after some work", code="no_profile")
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
    """Answers with the page, whoever asks."""
    page, packed, headers = page_and_headers()
    if "gzip" in http.headers.get("accept-encoding", ""):
        return Response(packed, media_type="text/html", headers=headers | {"content-encoding": "gzip"})
    return Response(page, media_type="text/html", headers=headers)


@functools.cache
def page_and_headers() -> tuple[bytes, bytes, dict[str, str]]:
    """Returns the page, plain and packed, and its headers; their policy knows script and style by their digests."""
    html, style, script = (_read(f"dashboard.{kind}") for kind in ("html", "css", "js"))
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


def _read(name: str) -> str:
    return resources.files("dsv3.server.http").joinpath("page", name).read_text()


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
