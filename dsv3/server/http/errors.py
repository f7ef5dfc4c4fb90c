"""Errors as HTTP responses."""

from starlette.responses import Response
from starlette.types import Scope

from dsv3.server.answers.errors import ApiError
from dsv3.server.answers.faces.messages_schema import MESSAGES, messages_envelope


def response_of(error: ApiError, path: str = "") -> Response:
    """Returns the response for an error at a path, with the headers that belong to its status.

    The JSON is OpenAI's, and Anthropic's where the path is one of theirs.
    """
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    content = messages_envelope(error) if path.startswith(MESSAGES) else error.envelope()
    return Response(content, error.status, headers, media_type="application/json")


def path_of(scope: Scope) -> str:
    """Returns the path by which `response_of` chooses the shape: Anthropic's clients name their API on every route."""
    return MESSAGES if any(name == b"anthropic-version" for name, _ in scope["headers"]) else scope["path"]
