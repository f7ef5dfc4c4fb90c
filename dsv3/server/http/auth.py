"""Authentication and admission as ASGI middleware: API keys, host names without keys, the limit on connections."""

import ipaddress
import re
from collections.abc import Callable, Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from dsv3.server.http.exchange import ADMIT, TENANT, error_path, error_response
from dsv3.server.protocol.errors import ApiError, unavailable
from dsv3.server.serving.service import Service
from dsv3.server.tenants import OPERATOR, Tenant, Tenants

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS = frozenset({"/health", "/dashboard"})
"""Routes without a key: `/dashboard` is a page without data, and a browser has no key when it loads it."""


def _guarded(app: ASGIApp, check: Callable[[Scope], ApiError | None]) -> ASGIApp:
    """Returns ASGI middleware around `app`, which responds with the error that `check` returns for a request."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        handler = app if (error := check(scope)) is None else error_response(error, error_path(scope))
        await handler(scope, receive, send)

    return run


def require_key(app: ASGIApp, tenants: Tenants) -> ASGIApp:
    """Returns middleware around the whole application that requires an API key.

    It uses `scope["path"]`, which the router matches exactly, so no other encoding of a path can bypass it. It stores
    the key's tenant in the scope's extensions.
    """

    def check(scope: Scope) -> ApiError | None:
        if scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return None
        if (key := _key(scope)) is not None and (tenant := tenants.find(key)) is not None:
            scope["extensions"][TENANT] = tenant
            return None
        return ApiError(401, "missing or wrong API key", kind="authentication_error", code="invalid_api_key")

    return _guarded(app, check)


def _key(scope: Scope) -> bytes | None:
    """Returns the key of a request: a bearer token from OpenAI's clients, `x-api-key` from Anthropic's."""
    given = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
    if len(given) != 1:
        return None
    [(name, value)] = given
    if name == b"x-api-key":
        return value.strip()
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


def require_local_name(app: ASGIApp, host: str, allowed_origins: Collection[str] = ()) -> ASGIApp:
    """Returns middleware that protects a server without keys on loopback against web pages.

    Any page that a user opens can send requests to loopback from the browser. The Host header must be a local name,
    since a page's own name may resolve to 127.0.0.1 (DNS rebinding). Requests of another origin may not change state:
    browsers send forms without a CORS preflight, but with Origin or Sec-Fetch-Site. Other clients send neither header.
    """
    names = b"|".join(re.escape(name.encode()) for name in ("localhost", "127.0.0.1", "[::1]", host))
    local_name = re.compile(rb"(%b)(:[0-9]{1,5})?" % names, re.IGNORECASE)
    origins = frozenset(origin.encode() for origin in allowed_origins)

    def check(scope: Scope) -> ApiError | None:
        if not all(local_name.fullmatch(value) for name, value in scope["headers"] if name == b"host"):
            text = "without an API key this server answers only to the names localhost, 127.0.0.1, [::1] and its --host"
            return ApiError(421, text, code="unknown_host")
        if scope["method"] not in _SAFE_METHODS and _is_foreign(dict(scope["headers"]), origins):
            text = "without an API key this server rejects requests of other web pages; allow them by --allowed_origins"
            return ApiError(403, text, kind="permission_error", code="cross_origin")
        return None

    return _guarded(app, check)


def _is_foreign(headers: dict[bytes, bytes], allowed_origins: Collection[bytes]) -> bool:
    """Returns whether a web page of another origin sent this request that is not allowed."""
    origin = headers.get(b"origin")
    if origin is not None and (b"*" in allowed_origins or origin in allowed_origins):
        return False
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        return True
    own = headers.get(b"host", b"").lower()
    return origin is not None and origin.lower() not in (b"http://" + own, b"https://" + own)


def is_loopback(host: str) -> bool:
    """Returns whether a listening address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_admission(app: ASGIApp, on_refusal: Callable[[str], None]) -> ASGIApp:
    """Returns middleware inside `require_key`: a request for anything but an open path needs an admitted connection."""

    def check(scope: Scope) -> ApiError | None:
        if scope["path"] in OPEN_PATHS or scope["extensions"][ADMIT]():
            return None
        on_refusal("connections")
        return unavailable("too many connections have requests in flight; try again", "too_many_connections")

    return _guarded(app, check)


def tenant_of(http: Request) -> Tenant | None:
    """Returns the tenant of a request, None on a server without keys."""
    return http.scope["extensions"].get(TENANT)


def require_operator(service: Service, http: Request) -> None:
    """Raises ApiError 403 if there are several tenants and the request is not from the operator."""
    tenant = tenant_of(http)
    if tenant is not None and tenant.name != OPERATOR and service.tenants.has_several:
        text = f"this route needs the API key named {OPERATOR}, since there are several keys"
        raise ApiError(403, text, kind="permission_error", code="not_the_operator")
