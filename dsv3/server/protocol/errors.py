"""Errors in the shape of OpenAI's API; their texts carry no path, no traceback and no part of the request."""

import re
from collections.abc import Mapping

import msgspec

# Says that the same request will be taken once others have ended: `launch.batch` asks until it is.
QUEUE_FULL = "queue_full"
# Says that engines have died with this request: nobody should send it again.
ENGINE_DIED = "engine_died"


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """A refusal or a failure, with the status that OpenAI gives it; after `retry_after` seconds one may ask again."""

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
        """Returns the error with its field under the name that `names` gives it; as it is where they have none."""
        field = self.body.param or ""
        if (name := names.get(field)) is None:
            return self
        text = self.body.message
        text = name + text.removeprefix(field) if text.startswith(field) else text
        param = re.split(r"[.\[]", name)[0]
        kind, code = self.body.type, self.body.code
        return ApiError(self.status, text, kind=kind, param=param, code=code, retry_after=self.retry_after)

    def envelope(self) -> bytes:
        """Returns the JSON of the error, alone or as the data of an event."""
        return msgspec.json.encode(ErrorEnvelope(self.body))


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client has to change the request."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: int = 1) -> ApiError:
    """503: the same request may be served later, or elsewhere."""
    return ApiError(503, message, kind="server_error", code=code, retry_after=retry_after)


def internal() -> ApiError:
    """500: our fault; the log has the details."""
    return ApiError(500, "internal error; the server's log says more", kind="server_error", code="internal_error")


def too_long(limit: int, requested: str) -> ApiError:
    """400: the words OpenAI's users search for."""
    text = f"This model's maximum context length is {limit} tokens. However, you requested {requested}."
    return invalid(text, code="context_length_exceeded")
