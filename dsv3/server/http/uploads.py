"""A file on its way in: multipart/form-data, written to the disk as it comes."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from dsv3.server.answers.errors import ApiError, invalid
from dsv3.server.batches.store import MAX_FILE_BYTES, private
from dsv3.server.http.bodies import ClientGone

_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 16
_MAX_HEADER_BYTES = 4096
_SLACK_BYTES = 2**20  # of the form around the file
_MAX_NAME_CHARS = 256
# For each part of the body, and for all of it.
_SILENCE_S, _DEADLINE_S = 60.0, 3600.0


class Form:
    """What a form holds: `fields` as bytes, and the file's name, whose content goes to `write` as it comes."""

    def __init__(self, boundary: bytes, write: Callable[[bytes], object]):
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None
        self.num_bytes = 0
        self.is_complete = False
        self._write = write
        self._headers: dict[str, bytes] = {}
        self._header, self._value = bytearray(), bytearray()
        self._name = ""
        self._is_file = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_part_data": self._take,
                "on_header_field": lambda data, start, end: self._grow(self._header, data[start:end]),
                "on_header_value": lambda data, start, end: self._grow(self._value, data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Takes the next part of the body; raises ApiError for what is no form, or larger than it may be."""
        try:
            self._parser.write(data)
        except FormParserError:
            raise invalid("the body is not multipart/form-data") from None

    def _begin_part(self) -> None:
        self._headers = {}

    def _grow(self, buffer: bytearray, data: bytes) -> None:
        buffer += data
        if len(buffer) > _MAX_HEADER_BYTES:
            raise invalid("a header in the form is too long")

    def _end_header(self) -> None:
        self._headers[self._header.decode("latin-1").lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()
        if len(self._headers) > _MAX_FIELDS:
            raise invalid("the form has too many headers")

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.filename is not None:
                raise invalid("file: one per request", "file")
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = name.rpartition("/")[2].rpartition("\\")[2][:_MAX_NAME_CHARS] or "file"
        elif len(self.fields) == _MAX_FIELDS:
            raise invalid("the form has too many fields")
        else:
            self.fields.setdefault(self._name[:_MAX_NAME_CHARS], b"")

    def _take(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            value = self.fields[self._name[:_MAX_NAME_CHARS]] + data[start:end]
            if len(value) > _MAX_FIELD_BYTES:
                raise invalid(f"a field has more than {_MAX_FIELD_BYTES} bytes")
            self.fields[self._name[:_MAX_NAME_CHARS]] = value
            return
        self.num_bytes += end - start
        if self.num_bytes > MAX_FILE_BYTES:
            raise too_large()
        self._write(data[start:end])

    def _end(self) -> None:
        self.is_complete = True


async def receive_form(request: Request, path: Path) -> Form:
    """Reads a form and writes its file to `path`, never holding more of it than one part of the body.

    Raises ApiError, and ClientGone; what was written stays for the caller to remove.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > 256:
        raise ApiError(415, "the content type must be multipart/form-data with a boundary")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:18]) > MAX_FILE_BYTES + _SLACK_BYTES:
        raise too_large()
    with await asyncio.to_thread(lambda: open(path, "xb", opener=private)) as file:
        pieces: list[bytes] = []
        form = Form(boundary, pieces.append)
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await _read(request, form, pieces, file)
        except TimeoutError:
            raise ApiError(408, "the body took too long to arrive") from None
    if not form.is_complete or form.filename is None:
        raise invalid("file: missing, or cut off", "file")
    return form


async def _read(request: Request, form: Form, pieces: list[bytes], file: BinaryIO) -> None:
    total, more = 0, True
    while more:
        async with asyncio.timeout(_SILENCE_S):
            message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body, more = message.get("body", b""), message.get("more_body", False)
        total += len(body)
        if total > MAX_FILE_BYTES + _SLACK_BYTES:
            raise too_large()
        form.feed(body)
        if pieces:
            content = b"".join(pieces)
            pieces.clear()
            await asyncio.to_thread(file.write, content)


def too_large() -> ApiError:
    """413: a file beyond OpenAI's bound."""
    return ApiError(413, f"the file is larger than {MAX_FILE_BYTES} bytes", param="file", code="file_too_large")
