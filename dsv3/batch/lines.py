"""OpenAI's batch format: one JSON object per line, requests in, answers out.

A line that is no request (not JSON, no custom_id, an unknown url ...) is answered by a line with an `error`; a request
that the model's side refuses is answered by a `response` with a status of 400 or above.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

URLS = ("/v1/chat/completions", "/v1/completions")
ID_PREFIX = "batch_req_"
MAX_LINE_BYTES = 32 << 20
MAX_CUSTOM_ID_CHARS = 1024
_SKIP_BYTES = 1 << 20
_ID_DIGEST_BYTES = 16


@dataclasses.dataclass(frozen=True)
class RequestLine:
    """One request: `number` is its line in the input, from 1; `body` is JSON."""

    number: int
    custom_id: str
    url: str
    body: bytes


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A line that is no request, and why; `custom_id` where it could be read."""

    number: int
    custom_id: str | None
    code: str
    message: str


def numbered_lines(file: BinaryIO, limit: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes | None]]:
    """Returns number and bytes of each line that is not blank.

    None for one longer than `limit`, which is never held whole.
    """
    number = 0
    while piece := file.readline(limit + 1):
        number += 1
        if len(piece) > limit and not piece.endswith(b"\n"):
            while (skipped := file.readline(_SKIP_BYTES)) and not skipped.endswith(b"\n"):
                pass
            yield number, None
        elif line := piece.strip():
            yield number, line


class LineParser:
    """Parses the lines of one input in order; remembers 16 bytes of hash for each custom_id, to find the second use."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def parse(self, number: int, line: bytes | None) -> RequestLine | BadLine:
        """Parses the request on a line. The first line with a custom_id has it; any later one is bad."""
        if line is None:
            return BadLine(number, None, "line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
        try:
            fields = msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"), type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return BadLine(number, None, "invalid_json", f"the line is not a JSON object: {error}")
        custom_id = _text(fields, "custom_id")
        if not custom_id or len(custom_id) > MAX_CUSTOM_ID_CHARS:
            wanted = f"custom_id must be text of 1 to {MAX_CUSTOM_ID_CHARS} characters"
            return BadLine(number, None, "invalid_custom_id", wanted)
        if self._is_repeated(custom_id):
            return BadLine(number, custom_id, "duplicate_custom_id", "an earlier line has the same custom_id")
        return _request(number, custom_id, fields)

    def _is_repeated(self, custom_id: str) -> bool:
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=_ID_DIGEST_BYTES).digest()
        repeated = digest in self._seen
        self._seen.add(digest)
        return repeated


def _request(number: int, custom_id: str, fields: dict[str, msgspec.Raw]) -> RequestLine | BadLine:
    if (method := _text(fields, "method")) != "POST":
        return BadLine(number, custom_id, "invalid_method", f'method must be "POST", not {method!r}')
    if (url := _text(fields, "url")) not in URLS:
        return BadLine(number, custom_id, "invalid_url", f"url must be one of {', '.join(URLS)}, not {url!r}")
    body = bytes(fields.get("body", b""))
    if not body.startswith(b"{"):
        return BadLine(number, custom_id, "invalid_body", "body must be a JSON object")
    return RequestLine(number, custom_id, url, body)


def _text(fields: dict[str, msgspec.Raw], name: str) -> str | None:
    try:
        return msgspec.json.decode(fields[name], type=str)
    except (KeyError, msgspec.MsgspecError):
        return None


def bad_line(bad: BadLine) -> bytes:
    """Returns the output line for a line that is no request."""
    error = {"code": bad.code, "message": bad.message, "line": bad.number}
    return _output(bad.number, bad.custom_id, None, error)


def answer_line(request: RequestLine, status: int, request_id: str, body: Any) -> bytes:
    """Returns the output line for an answered request."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _output(request.number, request.custom_id, response, None)


def _output(number: int, custom_id: str | None, response: Any, error: Any) -> bytes:
    line = {"id": f"{ID_PREFIX}{number}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


class _OutputHead(msgspec.Struct):
    id: str


class _Error(msgspec.Struct):
    message: Any = ""


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw = msgspec.Raw()


class _OutputResult(msgspec.Struct):
    response: _Response | None = None
    error: _Error | None = None


class _Refusal(msgspec.Struct):
    error: _Error | None = None


_output_decoder = msgspec.json.Decoder(_OutputHead)
_result_decoder = msgspec.json.Decoder(_OutputResult)
_refusal_decoder = msgspec.json.Decoder(_Refusal)


def answered_number(line: bytes) -> int:
    """Returns the input line that an output line answers; raises ValueError for bytes that are no output line."""
    number = _output_decoder.decode(line).id.removeprefix(ID_PREFIX)
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"its id does not end in a line number: {number[:40]!r}")
    return int(number)


def failure_of(line: bytes) -> str | None:
    """Returns why an output line holds no answer, None where it holds one."""
    found = _result_decoder.decode(line)
    if found.response is None:
        return str(found.error.message) if found.error is not None else ""
    if found.response.status_code == 200:
        return None
    try:
        error = _refusal_decoder.decode(found.response.body).error
    except msgspec.MsgspecError:
        error = None
    return f"status {found.response.status_code}: {error.message if error is not None else ''}"
