"""Errors in OpenAI's format; their texts have no path, no traceback and no part of the request."""

import re
from collections.abc import Mapping

import msgspec

# Code of an error that passes once other requests have ended: `launch.batch` retries.
QUEUE_FULL = "queue_full"
# Code of a request that engines have died with: it must not be sent again.
ENGINE_DIED = "engine_died"


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """A refused or failed request, with OpenAI's status; clients may retry after `retry_after` seconds."""

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

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """Returns the error with its field renamed by `names`; unchanged where they lack it."""
        field = self.body.param or ""
        if (name := names.get(field)) is None:
            return self
        text = self.body.message
        text = name + text.removeprefix(field) if text.startswith(field) else text
        param = re.split(r"[.\[]", name)[0]
        kind, code = self.body.type, self.body.code
        return ApiError(self.status, text, kind=kind, param=param, code=code, retry_after=self.retry_after)

    def envelope(self) -> bytes:
        """Returns the JSON of the error, for a response or an event."""
        return msgspec.json.encode(ErrorEnvelope(self.body))


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is invalid."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: int = 1) -> ApiError:
    """503: the same request may succeed later, or on another server."""
    return ApiError(503, message, kind="server_error", code=code, retry_after=retry_after)


def internal() -> ApiError:
    """500: a bug or a failure of this server; the log has the details."""
    return ApiError(500, "internal error; the server's log says more", kind="server_error", code="internal_error")


def too_long(limit: int, requested: str) -> ApiError:
    """400: the context is exceeded, in OpenAI's words."""
    text = f"This model's maximum context length is {limit} tokens. However, you requested {requested}."
    return invalid(text, code="context_length_exceeded")
