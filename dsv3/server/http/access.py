"""The access log: a line of JSON per request, without query, body or key."""

import logging
import sys

import msgspec

_log = logging.getLogger("dsv3.access")


class Access(msgspec.Struct, frozen=True):
    """One request; `complete` says whether the client was sent all of the response, `bytes` how much of it.

    `tenant` is null without a key that the server knows. The last four are those of an answer, null for what is none;
    its tokens are those told so far where the client has gone. `first_token_s` counts from the request's arrival.
    """

    time: float
    request_id: str
    tenant: str | None
    method: str
    path: str
    status: int
    seconds: float
    bytes: int
    complete: bool
    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_token_s: float | None = None


def log_access(access: Access) -> None:
    """Logs a request."""
    _log.info("%s", msgspec.json.encode(access).decode())


def begin_access_log() -> None:
    """Has the lines written to standard error as they are."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False
