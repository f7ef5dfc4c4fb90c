"""The router's process and its routes: the instances' stateless ones, and its own /health and /metrics.

It uses the server's HTTP server with its bounds, its errors and its parser of bodies, so that a request is refused here
as an instance would refuse it. It imports no jax.
"""

import asyncio
import contextlib
import functools
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterable

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dsv3.config.server_options import ServerOptions
from dsv3.http_client import RequestFailed
from dsv3.server.config import Deadlines
from dsv3.server.http.auth import is_loopback, require_admission, require_key, require_local_name, tenant_of
from dsv3.server.http.bodies import ClientGone, Handler, make_routes, read_json_body, unless_disconnected
from dsv3.server.http.exchange import ENDED, REQUEST_ID, TIMING_HEADER, error_path, error_response, json_response
from dsv3.server.http.http_server import (
    ConnectionLimit,
    HttpServer,
    certificate_of,
    max_admitted,
    raise_open_files_limit,
)
from dsv3.server.http.serving import wait_for_any
from dsv3.server.limits import BodyReader, Budget, Reservation, WorkersBusy
from dsv3.server.otlp import Attributes, Span
from dsv3.server.protocol.anthropic import MESSAGES
from dsv3.server.protocol.errors import QUEUE_FULL, ApiError, invalid, unavailable
from dsv3.server.serving.handlers import KINDS
from dsv3.server.serving.request_parsing import read_fields
from dsv3.server.tenants import OPERATOR, Tenant, Tenants
from dsv3.server.tracing import RequestTrace, Tracer, make_tracer, trace_context
from router.canary import Canary, parse_share
from router.instance import Instance
from router.members import Members, Pool, read_registration
from router.options import RouterOptions
from router.relay import Fleet, Relay, RouterMetrics
from router.request import parse_request

Make = Callable[[str], Instance]
_FINISH_S = 0.05
_TLS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
PASSED = (*KINDS, "/tokenize", "/detokenize", f"{MESSAGES}/count_tokens")
"""Routes that any instance may answer. Files, batches and profiles belong to one instance."""

REGISTER = "/instances"
"""The route on which instances register, with their own key and not the clients'."""
CANARY = "/canary"
"""The route on which the operator changes the canary's share."""


class RouterSite:
    """State that the routes share; while `is_draining` new requests are refused. `active` counts those in flight.

    `members` registers instances; None where the router takes no registrations. `tracer` is None without traces.
    """

    def __init__(self, fleet: Fleet, tenants: Tenants, members: Members | None, tracer: Tracer | None):
        self.fleet, self.tenants, self.members, self.tracer = fleet, tenants, members, tracer
        self.budget, self._bodies = Budget(), BodyReader()
        self.is_draining, self.active = False, 0

    @property
    def status(self) -> str:
        """What /health says."""
        if self.is_draining:
            return "draining"
        return "ok" if self.fleet.answering.is_up else "no instance"

    def reserve(self, reservation: Reservation, nbytes: int) -> None:
        """Reserves more bytes for a request; raises ApiError 503 where all requests together have too many."""
        try:
            reservation.grow(nbytes)
        except WorkersBusy as error:
            raise unavailable(str(error), QUEUE_FULL) from None

    async def read[T](self, http: Request, reservation: Reservation, parse: Callable[[bytearray], T]) -> T:
        """Returns what `parse` makes of a request's body, for which it reserves memory; raises ApiError."""
        body = await read_json_body(http, functools.partial(self.reserve, reservation))
        try:
            return await self._bodies.run(len(body), lambda: parse(body))
        except WorkersBusy as error:
            raise unavailable(str(error), QUEUE_FULL) from None

    async def close(self) -> None:
        """Ends the thread that decodes bodies, and that which sends traces."""
        await self._bodies.close()
        if self.tracer is not None:
            await self.tracer.close()


def make_app(site: RouterSite, host: str) -> ASGIApp:
    """Returns the application, behind keys where there are any.

    Registrations have their own key, and none where only this machine's clients can connect. They need no admission: if
    they were refused while clients have all connections, the leases of all instances would end.
    """
    handlers: dict[tuple[str, str], Handler] = {
        ("GET", "/health"): functools.partial(_health, site),
        ("GET", "/metrics"): functools.partial(_metrics, site),
        ("GET", "/v1/models"): functools.partial(_models, site),
    }
    handlers |= {("POST", path): functools.partial(_relay, site) for path in PASSED}
    if site.fleet.canary is not None:
        handlers["POST", CANARY] = functools.partial(_share, site)
    if site.members is not None:
        handlers["POST", REGISTER] = functools.partial(_register, site.members, site)
    app = Starlette(routes=make_routes(handlers), exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    admitted = require_admission(app, lambda _: site.fleet.metrics.requests.labels("503").inc())
    if site.tenants.all:
        guarded = require_key(admitted, site.tenants)
    else:
        guarded = require_local_name(admitted, host) if is_loopback(host) else admitted
    if site.members is None:
        return guarded
    registering = app if site.members.has_key else require_local_name(app, host)

    async def except_registration(scope: Scope, receive: Receive, send: Send) -> None:
        await (registering if scope["path"] == REGISTER else guarded)(scope, receive, send)

    return except_registration


def _http_error(http: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = {404: "the router has no such route", 405: "this route does not have this method"}.get(
        status, "the router cannot serve this request"
    )
    refused = ApiError(status, text, code="not_found" if status == 404 else None)
    response = error_response(refused, error_path(http.scope))
    response.headers.update(getattr(error, "headers", None) or {})  # `Allow`, which RFC 9110 requires with 405
    return response


async def _health(site: RouterSite, _: Request) -> Response:
    states = [each.status for each in site.fleet.answering.instances]
    return json_response({"status": site.status, "instances": states}, 200 if site.status == "ok" else 503)


async def _metrics(site: RouterSite, http: Request) -> Response:
    _require_operator(site, http, "this route")
    return Response(site.fleet.metrics.text(), media_type="text/plain; version=0.0.4")


def _require_operator(site: RouterSite, http: Request, what: str) -> None:
    """Raises ApiError 403 for a tenant other than the operator, where there are several."""
    tenant = tenant_of(http)
    if tenant is not None and tenant.name != OPERATOR and site.tenants.has_several:
        text = f"with several API keys, {what} needs the one named {OPERATOR}"
        raise ApiError(403, text, kind="permission_error", code="not_the_operator")


async def _register(members: Members, site: RouterSite, http: Request) -> Response:
    """Registers an instance, or renews or ends its registration."""
    members.authorize(http.headers.get("authorization"))
    with site.budget.reserve() as reservation:
        return json_response(members.register(await site.read(http, reservation, read_registration)))


class _Share(msgspec.Struct, forbid_unknown_fields=True):
    share: str


def _read_share(body: bytearray) -> float:
    text = read_fields(_Share, body).share
    try:
        return parse_share(text)
    except ValueError as error:
        raise invalid(f"share: {error}"[:200], "share") from None


async def _share(site: RouterSite, http: Request) -> Response:
    """Changes the share of the canary for requests that follow."""
    _require_operator(site, http, "this route")
    assert site.fleet.canary is not None
    with site.budget.reserve() as reservation:
        share = await site.read(http, reservation, _read_share)
    site.fleet.canary = Canary(site.fleet.canary.version, share)
    return json_response({"version": site.fleet.canary.version, "share": share})


async def _models(site: RouterSite, _: Request) -> Response:
    for instance in site.fleet.answering.instances:
        if instance.status == "ok":
            with contextlib.suppress(RequestFailed, TimeoutError):
                status, content = await instance.fetch("GET", "/v1/models")
                if status == 200:
                    return Response(content, media_type="application/json")
    raise unavailable("no instance answers", "no_instance")


async def _relay(site: RouterSite, http: Request) -> Response:
    """Relays a request to an instance."""
    if site.is_draining:
        raise unavailable("the router is shutting down", "draining", 5)
    path, tenant, began = http.scope["path"], tenant_of(http), time.monotonic()
    salt = tenant.salt if tenant is not None and site.tenants.has_several else ""
    with contextlib.ExitStack() as stack:
        reservation = stack.enter_context(site.budget.reserve())
        request = await site.read(http, reservation, lambda body: parse_request(path, body, salt))
        site.reserve(reservation, request.num_bytes)
        if request.is_urgent:
            _require_operator(site, http, "a priority below 0")
        headers = {"X-Request-Id": http.scope["extensions"][REQUEST_ID]} | trace_context(http.headers)
        if http.headers.get(TIMING_HEADER) == "1":
            headers[TIMING_HEADER] = "1"
        trace = None if site.tracer is None else site.tracer.start("relay", http.headers)
        relay = Relay(site.fleet, request, headers if trace is None else headers | trace.headers)
        if trace is not None and trace.is_sampled:
            request_id = headers["X-Request-Id"]
            http.scope["extensions"][ENDED] = functools.partial(_end_trace, trace, relay, began, request_id)
        return RelayResponse(site, relay, stack.pop_all().close)


def _end_trace(trace: RequestTrace, relay: Relay, began: float, request_id: str, status: int) -> None:
    names = [name for name, _ in relay.sent_to]
    about: Attributes = {"dsv3.request_id": request_id, "http.response.status_code": status, "dsv3.instances": names}
    whole = Span("relay", began, time.monotonic(), about, events=tuple(relay.sent_to))
    trace.end(whole, f"status {status}" if status >= 500 else None)


class RelayResponse(Response):
    """Sends the client what a relay yields; `on_close` is called in the end."""

    def __init__(self, site: RouterSite, relay: Relay, on_close: Callable[[], None]):
        self.background = None
        self.status_code = 499
        self._site, self._relay, self._on_close = site, relay, on_close
        self._began = time.monotonic()
        self._first_s: float | None = None
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._site.active += 1
        try:
            await unless_disconnected(receive, self._answer(scope, receive))
        except ClientGone:
            self.status_code = 499
        finally:
            self._site.active -= 1
            self._on_close()
            seconds = time.monotonic() - self._began
            self._site.fleet.metrics.on_end(self.status_code, self._relay.version, self._first_s, seconds)

    async def _answer(self, scope: Scope, receive: Receive) -> None:
        try:
            reply = await self._relay.run(self._send_events)
        except ApiError as error:
            if self.status_code != 200:
                await self._respond(error_response(error, scope["path"]), scope, receive)
                return
            lines = b"data: %b\n\n" % bytes(error_response(error, scope["path"]).body)
            event = lines if scope["path"] in _PLAIN else b"event: error\n" + lines
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
            self.status_code = error.status  # for the metrics; the client has got a 200
            return
        if reply is not None:
            await self._respond(reply, scope, receive)
        else:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _respond(self, response: Response, scope: Scope, receive: Receive) -> None:
        self.status_code = response.status_code
        await response(scope, receive, self._send)

    async def _send_events(self, data: bytes) -> None:
        if self.status_code != 200:
            self.status_code, self._first_s = 200, time.monotonic() - self._began
            await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})


_PLAIN = frozenset({"/v1/completions", "/v1/chat/completions", "/inference/v1/generate"})
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def maker(options: RouterOptions, api_key: str | None) -> Make:
    """Returns a function that makes an `Instance` of a URL; raises ValueError for a bad CA file."""
    tls = None
    if options.instance_ca_file is not None:
        try:
            tls = ssl.create_default_context(cafile=options.instance_ca_file)
        except OSError as error:
            raise ValueError(f"instance_ca_file: {options.instance_ca_file} cannot be used ({error})") from None
    return lambda url: Instance(url, api_key, options.concurrency, options.health_timeout, tls)


def fleet_of(options: RouterOptions, make: Make) -> Fleet:
    """Returns the fleet of the instances that the options name."""

    def pool(urls: Iterable[str], decodes: bool) -> Pool:
        found = [make(url) for url in urls]
        return Pool(found, decodes=decodes, max_queued=options.max_num_queued_reqs, queue_s=options.queue_timeout)

    answering = pool(options.instances or options.decode, True)
    is_split = bool(options.prefill) or options.registration
    prefilling = pool(options.prefill, False) if is_split else None
    pools = (answering,) if prefilling is None else (answering, prefilling)
    canary = None if options.canary is None else Canary.parse(options.canary)
    return Fleet(answering, prefilling, RouterMetrics(pools), options, canary)


def members_of(fleet: Fleet, make: Make, api_key: str | None, notify: Callable[[str], None]) -> Members:
    """Returns the fleet's membership: it probes instances and takes registrations."""
    pools = {"both": fleet.answering, "decode": fleet.answering}
    if fleet.prefilling is not None:
        pools["prefill"] = fleet.prefilling
    return Members(pools, make, fleet.options.health_interval, notify, api_key, fleet.metrics.forget)


async def serve(
    options: RouterOptions,
    tenants: tuple[Tenant, ...],
    api_key: str | None,
    listener: socket.socket,
    notify: Callable[[str], None],
) -> int:
    """Serves until a signal; returns 0.

    The first SIGTERM or SIGINT refuses new requests and lets those in flight finish; the second ends them. SIGHUP
    reads the certificate again. Raises ValueError for files that cannot be used.
    """
    raise_open_files_limit()
    first, second = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (second if first.is_set() else first).set())
    make = maker(options, api_key)
    fleet = fleet_of(options, make)
    members = members_of(fleet, make, api_key, notify)
    about = {"service.instance.id": f"{options.host}:{listener.getsockname()[1]}"}
    tracer = make_tracer(options.otlp_traces_endpoint, "dsv3-router", about)
    site = RouterSite(fleet, Tenants(tenants), members if options.registration else None, tracer)
    limit = ConnectionLimit(max_admitted(None, 1, files_per_request=2))
    certificate = certificate_of(ServerOptions(**{name: getattr(options, name) for name in _TLS}))
    server = HttpServer(make_app(site, options.host), listener, limit, Deadlines(), certificate)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
    members.start()
    try:
        server.start()
        await first.wait()
        site.is_draining = True
        await _drained(site, second, options.shutdown_timeout)
        await server.close()
        await site.close()
    finally:
        await members.close()
    return 0


async def _drained(site: RouterSite, second: asyncio.Event, seconds: float) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while site.active and asyncio.get_running_loop().time() < deadline and not second.is_set():
        await wait_for_any(second, timeout_s=_FINISH_S)
