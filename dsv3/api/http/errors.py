"""Errors as HTTP responses."""

from starlette.responses import Response

from dsv3.api.answers.errors import ApiError


def response_of(error: ApiError) -> Response:
    """Returns the response for an error: OpenAI's JSON, with the headers that belong to its status."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error.envelope(), error.status, headers, media_type="application/json")
