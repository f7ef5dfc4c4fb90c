"""Who sent a request, and what only the operator may do."""

from starlette.requests import Request

from dsv3.server.answers.errors import ApiError
from dsv3.server.answers.service import Service
from dsv3.server.http.exchange import TENANT
from dsv3.server.tenants import OPERATOR, Tenant


def tenant_of(http: Request) -> Tenant | None:
    """Returns the tenant that sent a request, None on a server without keys."""
    return http.scope["extensions"].get(TENANT)


def require_operator(service: Service, http: Request) -> None:
    """Refuses what concerns all tenants to all but the operator; a single tenant is the operator."""
    tenant = tenant_of(http)
    if tenant is not None and tenant.name != OPERATOR and service.tenants.are_several:
        text = f"where there are several API keys, this route is for the one named {OPERATOR}"
        raise ApiError(403, text, kind="permission_error", code="not_the_operator")
