"""The routes of files and batches: OpenAI's, below `/v1/files` and `/v1/batches`."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
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

from dsv3.server.batches.store import (
    MAX_FILE_BYTES,
    MAX_METADATA,
    WINDOW_S,
    Batch,
    BatchStore,
    Conflict,
    Endpoint,
    NotFound,
    StoreError,
    TooMany,
    private,
)
from dsv3.server.http.bodies import ClientGone, endpoint, read_json_body
from dsv3.server.http.exchange import TENANT, json_response
from dsv3.server.protocol.errors import ApiError, invalid, unavailable
from dsv3.server.serving.request_parsing import invalid_field
from dsv3.server.serving.service import Service

MAX_UPLOADS = 8  # at a time, per front
_PIECE_BYTES = 2**18
MAX_LISTED = {"files": 10_000, "batches": 100}
_DEFAULT_LISTED = {"files": 10_000, "batches": 20}
_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 16
_MAX_HEADER_BYTES = 4096
_SLACK_BYTES = 2**20  # of the form around the file
_MAX_NAME_CHARS = 256
# For each part of the body, and for all of it.
_SILENCE_S, _DEADLINE_S = 60.0, 3600.0


_Handler = Callable[["_Routes", Request], Awaitable[Response]]


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
    """Returns the routes; without a directory they answer 404 and say which option is missing.

    Raises ValueError for a directory that cannot be made.
    """
    try:
        routes = _Routes(service, None if directory is None else BatchStore(Path(directory)))
    except OSError as error:
        raise ValueError(f"batch_dir: {directory}: {error.strerror}") from None
    table: dict[tuple[str, str], _Handler] = {
        ("POST", "/v1/files"): _Routes.upload,
        ("GET", "/v1/files"): _Routes.list_files,
        ("GET", "/v1/files/{id}"): _Routes.show_file,
        ("DELETE", "/v1/files/{id}"): _Routes.delete_file,
        ("GET", "/v1/files/{id}/content"): _Routes.content,
        ("POST", "/v1/batches"): _Routes.create,
        ("GET", "/v1/batches"): _Routes.list_batches,
        ("GET", "/v1/batches/{id}"): _Routes.show_batch,
        ("POST", "/v1/batches/{id}/cancel"): _Routes.cancel,
    }
    by_path: dict[str, dict[str, _Handler]] = {}
    for (method, path), handler in table.items():
        by_path.setdefault(path, {})[method] = handler
    return [
        Route(path, endpoint(functools.partial(routes.answer, handlers)), methods=list(handlers))
        for path, handlers in by_path.items()
    ]


class _Routes:
    """Answers for one front. What touches the disk is done in a thread."""

    def __init__(self, service: Service, store: BatchStore | None):
        self._service, self._maybe_store = service, store
        self._num_uploads = 0

    async def answer(self, handlers: dict[str, _Handler], http: Request) -> Response:
        """Answers by the request's method; what the store refuses becomes OpenAI's errors."""
        handler = handlers["GET" if http.method == "HEAD" else http.method]
        try:
            return await handler(self, http)
        except StoreError as error:
            raise _api_error(error) from None

    @property
    def _store(self) -> BatchStore:
        if self._maybe_store is None:
            text = "this server keeps no files and batches; it needs the option --batch_dir DIRECTORY"
            raise ApiError(404, text, code="batches_disabled")
        return self._maybe_store

    async def upload(self, http: Request) -> Response:
        """Answers `POST /v1/files`."""
        store, tenant = self._store, _tenant(http)
        if self._num_uploads >= MAX_UPLOADS:
            raise unavailable(f"{MAX_UPLOADS} files are being uploaded already", "too_many_uploads")
        self._num_uploads += 1
        try:
            path = await asyncio.to_thread(store.new_upload, tenant)
            try:
                form = await receive_form(http, path)
                purpose = form.fields.get("purpose", b"").decode("utf-8", "replace")
                if purpose != "batch":
                    raise invalid(
                        "purpose: this server keeps files for batches only", "purpose", "unsupported_parameter"
                    )
                if any(name.startswith("expires_after") for name in form.fields):
                    text = "expires_after: files stay here until they are deleted; leave it out"
                    raise invalid(text, "expires_after", "unsupported_parameter")
                made = await asyncio.to_thread(store.add_file, tenant, path, form.filename or "file")
            finally:
                await asyncio.to_thread(path.unlink, True)
        finally:
            self._num_uploads -= 1
        return json_response(made)

    async def list_files(self, http: Request) -> Response:
        """Answers `GET /v1/files`."""
        files = await asyncio.to_thread(self._store.files, _tenant(http))
        if (purpose := http.query_params.get("purpose")) is not None:
            files = [file for file in files if file.purpose == purpose]
        order = http.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order: asc or desc", "order")
        if order == "asc":
            files.reverse()
        return _page(files, http, "files")

    async def show_file(self, http: Request) -> Response:
        """Answers `GET /v1/files/ID`."""
        return json_response(await asyncio.to_thread(self._store.file, _tenant(http), http.path_params["id"]))

    async def delete_file(self, http: Request) -> Response:
        """Answers `DELETE /v1/files/ID`."""
        await asyncio.to_thread(self._store.delete_file, _tenant(http), http.path_params["id"])
        return json_response({"id": http.path_params["id"], "object": "file", "deleted": True})

    async def content(self, http: Request) -> Response:
        """Answers `GET /v1/files/ID/content`."""
        path = await asyncio.to_thread(self._store.content, _tenant(http), http.path_params["id"])
        return _Content(path)

    async def create(self, http: Request) -> Response:
        """Answers `POST /v1/batches`."""
        store, tenant = self._store, _tenant(http)
        with self._service.budget.hold() as reservation:
            body = await read_json_body(http, functools.partial(self._service.grow, reservation))
            asked = _read(body)
        file = await asyncio.to_thread(store.file, tenant, asked.input_file_id)
        if file.purpose != "batch":
            raise invalid("input_file_id: this file is no input of a batch", "input_file_id")

        def make(batch_id: str, now: int) -> Batch:
            return Batch(
                id=batch_id,
                endpoint=asked.endpoint,
                input_file_id=file.id,
                created_at=now,
                expires_at=now + WINDOW_S,
                metadata=asked.metadata,
            )

        return json_response(await asyncio.to_thread(store.create_batch, tenant, make))

    async def list_batches(self, http: Request) -> Response:
        """Answers `GET /v1/batches`."""
        return _page(await asyncio.to_thread(self._store.batches, _tenant(http)), http, "batches")

    async def show_batch(self, http: Request) -> Response:
        """Answers `GET /v1/batches/ID`."""
        return json_response(await asyncio.to_thread(self._store.batch, _tenant(http), http.path_params["id"]))

    async def cancel(self, http: Request) -> Response:
        """Answers `POST /v1/batches/ID/cancel`."""
        return json_response(await asyncio.to_thread(self._store.cancel, _tenant(http), http.path_params["id"]))


class _Content(Response):
    """A file's content, in pieces; a client that has gone or does not read ends it."""

    def __init__(self, path: Path):
        self._path = path
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "application/octet-stream"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with await asyncio.to_thread(self._path.open, "rb") as file:
            size = self._path.stat().st_size
            headers = [*self.raw_headers, (b"content-length", str(size).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            left = size if scope["method"] != "HEAD" else 0
            while left:
                piece = await asyncio.to_thread(file.read, min(left, _PIECE_BYTES))
                left -= len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _tenant(http: Request) -> str:
    tenant = http.scope["extensions"].get(TENANT)
    return "" if tenant is None else tenant.name


def _read(body: bytearray) -> CreateBatch:
    try:
        asked = msgspec.json.decode(body, type=CreateBatch)
    except msgspec.ValidationError as error:
        raise invalid_field(error, "", CreateBatch) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise invalid("the body is not valid JSON") from None
    if asked.output_expires_after is not None and bytes(asked.output_expires_after) != b"null":
        text = "output_expires_after: files stay here until they are deleted; leave it out"
        raise invalid(text, "output_expires_after", "unsupported_parameter")
    return asked


def _page(items: list[Any], http: Request, kind: str) -> Response:
    """Returns the part of a list that `after` and `limit` name."""
    text = http.query_params.get("limit", str(_DEFAULT_LISTED[kind]))
    if not (text.isascii() and text.isdigit() and len(text) < 7 and 1 <= int(text) <= MAX_LISTED[kind]):
        raise invalid(f"limit: from 1 to {MAX_LISTED[kind]}", "limit")
    if (after := http.query_params.get("after")) is not None:
        places = [i for i, item in enumerate(items) if item.id == after]
        if not places:
            raise ApiError(404, "after: there is nothing of that id", param="after", code="not_found")
        items = items[places[0] + 1 :]
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


def _api_error(error: StoreError) -> ApiError:
    status = {NotFound: 404, Conflict: 409, TooMany: 429}.get(type(error), 500)
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    return ApiError(status, str(error), kind=kind, code=error.code)


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
                await _read_form(request, form, pieces, file)
        except TimeoutError:
            raise ApiError(408, "the body took too long to arrive") from None
    if not form.is_complete or form.filename is None:
        raise invalid("file: missing, or cut off", "file")
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
            raise too_large()
        form.feed(body)
        if pieces:
            content = b"".join(pieces)
            pieces.clear()
            await asyncio.to_thread(file.write, content)


def too_large() -> ApiError:
    """413: a file beyond OpenAI's bound."""
    return ApiError(413, f"the file is larger than {MAX_FILE_BYTES} bytes", param="file", code="file_too_large")
