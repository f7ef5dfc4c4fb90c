"""Errors in the shape of OpenAI's API; their texts carry no path, no traceback and no part of the request."""

import msgspec
from starlette.responses import Response


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """An answer other than 200; `retry_after` in seconds becomes a header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message, kind, param, code)
        self.retry_after = retry_after

    def envelope(self) -> bytes:
        """The JSON of the error, alone or as the data of a server-sent event."""
        return msgspec.json.encode(ErrorEnvelope(self.body))

    def response(self) -> Response:
        """The HTTP response."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(self.envelope(), self.status, headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client has to change the request."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: int = 1) -> ApiError:
    """503: the same request may be served later, or elsewhere."""
    return ApiError(503, message, kind="server_error", code=code, retry_after=retry_after)


def internal() -> ApiError:
    """500: our fault; the log has the details."""
    return ApiError(500, "internal error; the server's log says more", kind="server_error", code="internal_error")
