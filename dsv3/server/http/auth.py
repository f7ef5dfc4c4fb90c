"""Who is let in: by the API key, by the name that a server without one is called by, by the number of connections."""

import ipaddress
import re
from collections.abc import Callable, Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from dsv3.server.http.exchange import ADMIT, TENANT, path_of, response_of
from dsv3.server.protocol.errors import ApiError, unavailable
from dsv3.server.serving.service import Service
from dsv3.server.tenants import OPERATOR, Tenant, Tenants

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS = frozenset({"/health", "/dashboard"})
"""Need no key: the dashboard's page holds no data, and a browser has no key yet when it loads it."""


class RequireKey:
    """ASGI middleware around the whole application, so that no route can be forgotten.

    It decides by `scope["path"]`, the string the router matches exactly, so no spelling of a path reaches a route
    without passing here. The tenant whose key it is stands in the scope's extensions from then on.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants):
        self._app, self._tenants = app, tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._allows(scope):
            await self._app(scope, receive, send)
        else:
            error = ApiError(401, "missing or wrong API key", kind="authentication_error", code="invalid_api_key")
            await response_of(error, path_of(scope))(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        if scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return True
        key = _key(scope)
        if key is None or (tenant := self._tenants.find(key)) is None:
            return False
        scope["extensions"][TENANT] = tenant
        return True


def _key(scope: Scope) -> bytes | None:
    """Returns the key that a request carries: OpenAI's clients send a bearer token, Anthropic's `x-api-key`."""
    given = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
    if len(given) != 1:
        return None
    [(name, value)] = given
    if name == b"x-api-key":
        return value.strip()
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


class RequireLocalName:
    """ASGI middleware for a server without a key on the loopback interface: keeps web pages of others out.

    A browser reaches this server for any page that its reader opens. So requests must call it by a local name, since a
    page's own name may resolve to 127.0.0.1 (DNS rebinding). And a page of another origin may change nothing: browsers
    send a form of it without asking (CORS), but say where it comes from. Clients that say neither are no browsers.
    """

    def __init__(self, app: ASGIApp, host: str, allowed_origins: Collection[str] = ()):
        self._app = app
        names = b"|".join(re.escape(name.encode()) for name in ("localhost", "127.0.0.1", "[::1]", host))
        self._names = re.compile(rb"(%b)(:[0-9]{1,5})?" % names, re.IGNORECASE)
        self._origins = frozenset(origin.encode() for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if not all(self._names.fullmatch(value) for name, value in scope["headers"] if name == b"host"):
            text = "without an API key this server answers on loopback to the names localhost, 127.0.0.1 and [::1] only"
            error = ApiError(421, text, code="unknown_host")
        elif scope["method"] not in _SAFE_METHODS and self._is_foreign(headers):
            text = "without an API key this server takes nothing from web pages of other origins; see --allowed_origins"
            error = ApiError(403, text, kind="permission_error", code="cross_origin")
        else:
            await self._app(scope, receive, send)
            return
        await response_of(error, path_of(scope))(scope, receive, send)

    def _is_foreign(self, headers: dict[bytes, bytes]) -> bool:
        """Returns whether a page sent this request that is neither this server's own nor allowed."""
        origin = headers.get(b"origin")
        if origin is not None and (b"*" in self._origins or origin in self._origins):
            return False
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            return True
        own = headers.get(b"host", b"").lower()
        return origin is not None and origin.lower() not in (b"http://" + own, b"https://" + own)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches a listener on that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Admit:
    """ASGI middleware inside of `RequireKey`: a connection that asks for more than an open path has to be admitted."""

    def __init__(self, app: ASGIApp, on_refusal: Callable[[str], None]):
        self._app, self._on_refusal = app, on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS or scope["extensions"][ADMIT]():
            await self._app(scope, receive, send)
        else:
            self._on_refusal("connections")
            error = unavailable("too many connections have requests in flight", "too_many_connections")
            await response_of(error, path_of(scope))(scope, receive, send)


def tenant_of(http: Request) -> Tenant | None:
    """Returns the tenant that sent a request, None on a server without keys."""
    return http.scope["extensions"].get(TENANT)


def require_operator(service: Service, http: Request) -> None:
    """Refuses what concerns all tenants to all but the operator; a single tenant is the operator."""
    tenant = tenant_of(http)
    if tenant is not None and tenant.name != OPERATOR and service.tenants.are_several:
        text = f"where there are several API keys, this route is for the one named {OPERATOR}"
        raise ApiError(403, text, kind="permission_error", code="not_the_operator")
