"""OpenAI's routes for files and batches: `/v1/files` and `/v1/batches`."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from msgspec import Meta
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dsv3.batch.formats import open_private
from dsv3.server.batches.store import (
    MAX_FILE_BYTES,
    WINDOW_S,
    Batch,
    BatchStore,
    Endpoint,
    FileObject,
)
from dsv3.server.http.auth import tenant_of
from dsv3.server.http.bodies import ClientGone, Handler, make_routes, read_json_body, unless_disconnected
from dsv3.server.http.exchange import json_response
from dsv3.server.protocol.errors import ApiError, invalid, unavailable
from dsv3.server.protocol.responses import MAX_METADATA
from dsv3.server.serving.request_parsing import read_fields
from dsv3.server.serving.service import Service

MAX_UPLOADS = 8  # at a time, per API server
_PIECE_BYTES = 2**18
MAX_LISTED = {"files": 10_000, "batches": 100}
_DEFAULT_LISTED = {"files": 10_000, "batches": 20}
_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 16
_MAX_HEADER_BYTES = 4096
_SLACK_BYTES = 2**20  # of the form besides the file
_MAX_NAME_CHARS = 256
# Timeouts of an upload: for each part of the body, and in total.
_SILENCE_S, _DEADLINE_S = 60.0, 3600.0


class CreateBatch(msgspec.Struct, kw_only=True):
    """`POST /v1/batches`."""

    input_file_id: Annotated[str, Meta(max_length=64)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    output_expires_after: msgspec.Raw | None = None


def batch_routes(service: Service, directory: str | None) -> list[Route]:
    """Returns the routes; without a directory they respond with 404 and name the missing option.

    Raises ValueError if the directory cannot be created.
    """
    try:
        routes = _Routes(service, None if directory is None else BatchStore(Path(directory)))
    except OSError as error:
        raise ValueError(f"batch_dir: {directory}: {error.strerror}") from None
    return make_routes(
        {
            ("POST", "/v1/files"): routes.upload,
            ("GET", "/v1/files"): routes.list_files,
            ("GET", "/v1/files/{id}"): routes.of_id(BatchStore.file),
            ("DELETE", "/v1/files/{id}"): routes.delete_file,
            ("GET", "/v1/files/{id}/content"): routes.content,
            ("POST", "/v1/batches"): routes.create,
            ("GET", "/v1/batches"): routes.list_batches,
            ("GET", "/v1/batches/{id}"): routes.of_id(BatchStore.batch),
            ("POST", "/v1/batches/{id}/cancel"): routes.of_id(BatchStore.cancel),
        }
    )


class _Routes:
    """The handlers of one API server; disk accesses run in threads."""

    def __init__(self, service: Service, store: BatchStore | None):
        self._service, self._maybe_store = service, store
        self._num_uploads = 0

    @property
    def _store(self) -> BatchStore:
        if self._maybe_store is None:
            text = "this server stores no files and batches; start it with --batch_dir DIRECTORY"
            raise ApiError(404, text, code="batches_disabled")
        return self._maybe_store

    async def upload(self, http: Request) -> Response:
        store, tenant = self._store, _tenant(http)
        if self._num_uploads >= MAX_UPLOADS:
            raise unavailable(f"{MAX_UPLOADS} uploads are in progress; try again", "too_many_uploads")
        self._num_uploads += 1
        try:
            path = await asyncio.to_thread(store.new_upload, tenant)
            try:
                form = await receive_form(http, path)
                purpose = form.fields.get("purpose", b"").decode("utf-8", "replace")
                if purpose != "batch":
                    raise invalid(
                        "purpose: this server stores files for batches only", "purpose", "unsupported_parameter"
                    )
                if any(name.startswith("expires_after") for name in form.fields):
                    text = "expires_after: files are kept until they are deleted; leave it out"
                    raise invalid(text, "expires_after", "unsupported_parameter")
                file = await asyncio.to_thread(store.add_file, tenant, path, form.filename or "file")
            finally:
                await asyncio.to_thread(path.unlink, True)
        finally:
            self._num_uploads -= 1
        return json_response(file)

    async def list_files(self, http: Request) -> Response:
        files = await asyncio.to_thread(self._store.files, _tenant(http))
        if (purpose := http.query_params.get("purpose")) is not None:
            files = [file for file in files if file.purpose == purpose]
        order = http.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order: expected asc or desc", "order")
        if order == "asc":
            files.reverse()
        return _page(files, http, "files")

    def of_id(self, call: Callable[[BatchStore, str, str], FileObject | Batch]) -> Handler:
        """Returns a handler that responds with what a method of the store returns for tenant and id."""

        async def run(http: Request) -> Response:
            return json_response(await asyncio.to_thread(call, self._store, _tenant(http), http.path_params["id"]))

        return run

    async def delete_file(self, http: Request) -> Response:
        await asyncio.to_thread(self._store.delete_file, _tenant(http), http.path_params["id"])
        return json_response({"id": http.path_params["id"], "object": "file", "deleted": True})

    async def content(self, http: Request) -> Response:
        path = await asyncio.to_thread(self._store.content, _tenant(http), http.path_params["id"])
        return _Content(path)

    async def create(self, http: Request) -> Response:
        store, tenant = self._store, _tenant(http)
        with self._service.reserve_memory() as grow:
            body = await read_json_body(http, grow)
            request = await self._service.read_body(len(body), lambda: _parse(body))
        file = await asyncio.to_thread(store.file, tenant, request.input_file_id)
        if file.purpose != "batch":
            text = f"input_file_id: the purpose of this file is {file.purpose}, expected batch"
            raise invalid(text, "input_file_id")

        def make(batch_id: str, now: int) -> Batch:
            return Batch(
                id=batch_id,
                endpoint=request.endpoint,
                input_file_id=file.id,
                created_at=now,
                expires_at=now + WINDOW_S,
                metadata=request.metadata,
            )

        return json_response(await asyncio.to_thread(store.create_batch, tenant, make))

    async def list_batches(self, http: Request) -> Response:
        return _page(await asyncio.to_thread(self._store.batches, _tenant(http)), http, "batches")


class _Content(Response):
    """A file's content, sent in pieces until the client disconnects or does not read."""

    def __init__(self, path: Path):
        self._path = path
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "application/octet-stream"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await unless_disconnected(receive, self._send(scope, send))

    async def _send(self, scope: Scope, send: Send) -> None:
        with await asyncio.to_thread(self._path.open, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            headers = [*self.raw_headers, (b"content-length", str(size).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            left = size if scope["method"] != "HEAD" else 0
            while left:
                piece = await asyncio.to_thread(file.read, min(left, _PIECE_BYTES))
                left -= len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _tenant(http: Request) -> str:
    tenant = tenant_of(http)
    return "" if tenant is None else tenant.name


def _parse(body: bytearray) -> CreateBatch:
    request = read_fields(CreateBatch, body)
    if request.output_expires_after is not None and bytes(request.output_expires_after) != b"null":
        text = "output_expires_after: files are kept until they are deleted; leave it out"
        raise invalid(text, "output_expires_after", "unsupported_parameter")
    return request


def _page(items: list[Any], http: Request, kind: str) -> Response:
    """Returns the page of a list that the query parameters `after` and `limit` select."""
    text = http.query_params.get("limit", str(_DEFAULT_LISTED[kind]))
    if not (text.isascii() and text.isdigit() and len(text) < 7 and 1 <= int(text) <= MAX_LISTED[kind]):
        raise invalid(f"limit: expected a number from 1 to {MAX_LISTED[kind]}", "limit")
    if (after := http.query_params.get("after")) is not None:
        found = [i for i, item in enumerate(items) if item.id == after]
        if not found:
            raise ApiError(
                404, f"after: the list has no item with this id; list {kind} again", param="after", code="not_found"
            )
        items = items[found[0] + 1 :]
    shown = items[: int(text)]
    ids = [item.id for item in shown]
    return json_response(
        {
            "object": "list",
            "data": shown,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": len(items) > len(shown),
        }
    )


class Form:
    """Parses a multipart form into `fields` and `filename`, and passes the file's content to `write` as it arrives."""

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
                "on_part_data": self._on_data,
                "on_header_field": lambda data, start, end: self._grow(self._header, data[start:end]),
                "on_header_value": lambda data, start, end: self._grow(self._value, data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Parses the next part of the body; raises ApiError for a malformed form or one above the limits."""
        try:
            self._parser.write(data)
        except FormParserError:
            raise invalid("the body is not multipart/form-data") from None

    def _begin_part(self) -> None:
        self._headers = {}

    def _grow(self, buffer: bytearray, data: bytes) -> None:
        buffer += data
        if len(buffer) > _MAX_HEADER_BYTES:
            raise invalid(f"a header in the form has more than {_MAX_HEADER_BYTES} bytes")

    def _end_header(self) -> None:
        self._headers[self._header.decode("latin-1").lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()
        if len(self._headers) > _MAX_FIELDS:
            raise invalid(f"a part of the form has more than {_MAX_FIELDS} headers")

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.filename is not None:
                raise invalid("file: expected one per request", "file")
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = name.rpartition("/")[2].rpartition("\\")[2][:_MAX_NAME_CHARS] or "file"
        elif len(self.fields) == _MAX_FIELDS:
            raise invalid(f"the form has more than {_MAX_FIELDS} fields")
        else:
            self.fields.setdefault(self._name[:_MAX_NAME_CHARS], b"")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            value = self.fields[self._name[:_MAX_NAME_CHARS]] + data[start:end]
            if len(value) > _MAX_FIELD_BYTES:
                raise invalid(f"a field has more than {_MAX_FIELD_BYTES} bytes")
            self.fields[self._name[:_MAX_NAME_CHARS]] = value
            return
        self.num_bytes += end - start
        if self.num_bytes > MAX_FILE_BYTES:
            raise _too_large()
        self._write(data[start:end])

    def _end(self) -> None:
        self.is_complete = True


async def receive_form(request: Request, path: Path) -> Form:
    """Reads a form and writes its file to `path`, with one part of the body in memory at a time.

    Raises ApiError and ClientGone; the caller must remove the file.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > 256:
        raise ApiError(415, "the content type must be multipart/form-data with a boundary")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:18]) > MAX_FILE_BYTES + _SLACK_BYTES:
        raise _too_large()
    with await asyncio.to_thread(lambda: open(path, "xb", opener=open_private)) as file:
        pieces: list[bytes] = []
        form = Form(boundary, pieces.append)
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await _read_form(request, form, pieces, file)
        except TimeoutError:
            text = f"the body paused for {_SILENCE_S:g} s, or took more than {_DEADLINE_S:g} s"
            raise ApiError(408, text) from None
    if not form.is_complete or form.filename is None:
        raise invalid("file: the form has no file, or it is incomplete", "file")
    return form


async def _read_form(request: Request, form: Form, pieces: list[bytes], file: BinaryIO) -> None:
    total, more = 0, True
    while more:
        async with asyncio.timeout(_SILENCE_S):
            message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body, more = message.get("body", b""), message.get("more_body", False)
        total += len(body)
        if total > MAX_FILE_BYTES + _SLACK_BYTES:
            raise _too_large()
        form.feed(body)
        if pieces:
            content = b"".join(pieces)
            pieces.clear()
            await asyncio.to_thread(file.write, content)


def _too_large() -> ApiError:
    return ApiError(413, f"the file is larger than {MAX_FILE_BYTES} bytes", param="file", code="file_too_large")
