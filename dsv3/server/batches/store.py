"""A directory of files and batches. All API servers write to it; each file in it has one writer.

The records are OpenAI's objects, with times in seconds since 1970.

    DIR/lock                        locked by the server that runs the batches
    DIR/open/ID                     a batch that has not ended: its tenant's name
    DIR/cancel/ID                   the time at which a client cancelled the batch
    DIR/tenants/NAME/files/ID       content, complete once ID.json is there
    DIR/tenants/NAME/batches/ID.json, ID.answers

Files are replaced by rename, so a kill leaves the old or the new version. A record that cannot be read, because the
disk or an editor has damaged it, is logged once and skipped; the others stay available. A tenant's ids resolve only
inside its own directory.
"""

import contextlib
import fcntl
import functools
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from dsv3.files import replace_file, sync
from dsv3.server.protocol.errors import ApiError

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
WINDOW_S = 24 * 3600


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file: a client's upload or a batch's output."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    status_details: str | None = None


class LineError(msgspec.Struct, frozen=True):
    """An error in an input file; `line` is the line number, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Errors(msgspec.Struct, frozen=True):
    """A list of errors in OpenAI's format."""

    data: tuple[LineError, ...] = ()
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """Lines of a batch: all, those answered with status 200, and those answered with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as clients see it."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: Errors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as stored. `ends_as` is the status after finalizing, for which the ids of the two files are allocated."""

    batch: Batch
    ends_as: Status | None = None
    output_id: str | None = None
    error_id: str | None = None


MAX_FILE_BYTES = 200 * 2**20
MAX_LINES = 50_000
MAX_FILES = 1000
MAX_BATCHES = 1000
MAX_OPEN_BATCHES = 100
MAX_TENANT_BYTES = 16 * 2**30
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{24}")
_TENANT = re.compile(r"[A-Za-z0-9._-]{0,64}")
# An entry in open/ without a record after this time belongs to a batch that was never made.
_STALE_S = 60.0
# Uploads end after 60 s of silence, so a file that was written longer ago is abandoned.
_ABANDONED_S = 600.0
_write = functools.partial(replace_file, mode=0o600, synced=True)
_log = logging.getLogger("dsv3.batches")


class NotFound(ApiError):
    """404: the tenant has no file or batch of that id."""

    def __init__(self, what: str):
        super().__init__(404, f"there is no such {what}", code="not_found")


def _conflict(code: str, message: str) -> ApiError:
    """409: the state of the file or batch does not allow it."""
    return ApiError(409, message, code=code)


def _too_many(code: str, message: str) -> ApiError:
    """429: a limit of the tenant is reached."""
    return ApiError(429, message, kind="rate_limit_error", code=code)


class BatchStore:
    """Files and batches below `directory`; the tenant's name is "" on a server without API keys.

    `now` returns the Unix time in seconds. Raises OSError where the directory cannot be made, and ApiError for clients.
    """

    def __init__(self, directory: Path, now: Callable[[], float] = time.time):
        self.directory, self._now = directory, now
        self._damaged: set[Path] = set()
        for name in ("", "open", "cancel", "tenants"):
            (directory / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def now(self) -> int:
        """Returns the Unix time in whole seconds."""
        return int(self._now())

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the directory for this process; raises ValueError where another server has locked it."""
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(f"batch_dir: {self.directory} is in use by another server") from None
        try:
            yield
        finally:
            os.close(descriptor)

    def new_upload(self, tenant: str) -> Path:
        """Returns a path for an upload; raises ApiError 429 at a limit of the tenant."""
        files = self.files(tenant)
        if len(files) >= MAX_FILES:
            raise _too_many("too_many_files", f"there are {len(files)} files, at most {MAX_FILES}; delete some first")
        if (total := sum(file.bytes for file in files)) >= MAX_TENANT_BYTES:
            text = f"the files have {total} bytes, at most {MAX_TENANT_BYTES}; delete some first"
            raise _too_many("too_many_bytes", text)
        return self._folder(tenant, "files") / f"{secrets.token_hex(12)}.part"

    def file(self, tenant: str, file_id: str) -> FileObject:
        """Returns a file's record; raises NotFound."""
        found = self._read(self._path(tenant, "files", file_id, ".json"), FileObject)
        if found is None:
            raise NotFound("file")
        return found

    def content(self, tenant: str, file_id: str) -> Path:
        """Returns the path of a file's content; raises NotFound."""
        self.file(tenant, file_id)
        return self._path(tenant, "files", file_id)

    def files(self, tenant: str) -> list[FileObject]:
        """Lists a tenant's files, newest first."""
        found = (self._read(path, FileObject) for path in self._records(tenant, "files"))
        return sorted((each for each in found if each is not None), key=lambda f: (-f.created_at, f.id))

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Deletes a file; raises NotFound, and ApiError 409 where a batch that has not ended reads it."""
        self.file(tenant, file_id)
        for batch in self.batches(tenant):
            if batch.status not in ENDED and batch.input_file_id == file_id:
                raise _conflict("file_in_use", f"the batch {batch.id} reads this file; cancel it first")
        for suffix in (".json", ""):
            self._path(tenant, "files", file_id, suffix).unlink(missing_ok=True)

    def create_batch(self, tenant: str, make: Callable[[str, int], Batch]) -> Batch:
        """Stores the batch that `make` returns for an id and the time; raises ApiError 429.

        The entry in open/ is written first, so that a kill leaves no batch that never runs.
        """
        batches = self.batches(tenant)
        if (count := sum(batch.status not in ENDED for batch in batches)) >= MAX_OPEN_BATCHES:
            raise _too_many("too_many_batches", f"{count} batches have not ended, at most {MAX_OPEN_BATCHES}")
        for old in [batch for batch in batches if batch.status in ENDED][MAX_BATCHES - MAX_OPEN_BATCHES :]:
            self.drop_answers(tenant, old.id)
            self._path(tenant, "batches", old.id, ".json").unlink(missing_ok=True)
        batch = make(f"batch_{secrets.token_hex(12)}", self.now())
        _write(self.directory / "open" / batch.id, tenant.encode())
        self.save(tenant, Record(batch=batch))
        return batch

    def record(self, tenant: str, batch_id: str) -> Record:
        """Returns a batch as stored; raises NotFound."""
        found = self._read(self._path(tenant, "batches", batch_id, ".json"), Record)
        if found is None:
            raise NotFound("batch")
        return found

    def batch(self, tenant: str, batch_id: str) -> Batch:
        """Returns a batch as clients see it; raises NotFound."""
        return self._seen(self.record(tenant, batch_id).batch)

    def batches(self, tenant: str) -> list[Batch]:
        """Lists a tenant's batches, newest first."""
        found = (self._read(path, Record) for path in self._records(tenant, "batches"))
        shown = (self._seen(record.batch) for record in found if record is not None)
        return sorted(shown, key=lambda batch: (-batch.created_at, batch.id))

    def save(self, tenant: str, record: Record) -> None:
        """Stores a batch; only its creator and its runner call this."""
        _write(self._path(tenant, "batches", record.batch.id, ".json"), msgspec.json.encode(record))

    def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Cancels a batch; raises NotFound, and ApiError 409 for one that is finalizing or has ended."""
        batch = self.batch(tenant, batch_id)
        if batch.status == "cancelling":
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise _conflict("batch_not_cancellable", f"the batch is {batch.status}")
        _write(self.directory / "cancel" / batch_id, str(self.now()).encode())
        return self.batch(tenant, batch_id)

    def cancelled_at(self, batch_id: str) -> int | None:
        """Returns when a client cancelled the batch; None if none did."""
        path = self.directory / "cancel" / batch_id
        try:
            text = path.read_bytes()
            return int(text) if text.isdigit() else int(path.stat().st_mtime)
        except FileNotFoundError:
            return None

    def mark_open(self) -> None:
        """Adds missing entries of unfinished batches to open/, before any batch is run."""
        for folder in (self.directory / "tenants").glob("tenant-*"):
            tenant = folder.name.removeprefix("tenant-")
            for path in self._records(tenant, "batches") if _TENANT.fullmatch(tenant) else ():
                mark, record = self.directory / "open" / path.stem, self._read(path, Record)
                is_open = record is not None and record.batch.status not in ENDED
                if is_open and not (mark.is_file() and mark.read_bytes() == tenant.encode()):
                    _write(mark, tenant.encode())

    def open_batches(self) -> list[tuple[str, str]]:
        """Lists tenant and id of each unfinished batch, oldest first."""
        found = []
        for path in (self.directory / "open").iterdir():
            if not _ID.fullmatch(path.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                tenant, made = path.read_bytes().decode(errors="replace"), path.stat().st_mtime
                has_record = _TENANT.fullmatch(tenant) and self._path(tenant, "batches", path.name, ".json").exists()
                if has_record:
                    found.append((made, tenant, path.name))
                elif time.time() - made > _STALE_S:
                    path.unlink()
        return [(tenant, name) for _, tenant, name in sorted(found)]

    def close_batch(self, batch_id: str) -> None:
        """Removes an ended batch from open/ and cancel/."""
        for name in ("open", "cancel"):
            (self.directory / name / batch_id).unlink(missing_ok=True)

    def answers(self, tenant: str, batch_id: str) -> Path:
        """Returns the path of a batch's journal."""
        return self._path(tenant, "batches", batch_id, ".answers")

    def scratch(self, tenant: str, file_id: str) -> Path:
        """Returns the path at which an output file is written before it is renamed."""
        return self._path(tenant, "files", file_id, ".part")

    def drop_answers(self, tenant: str, batch_id: str) -> None:
        """Deletes a batch's journal, whose answers are in the output files."""
        for suffix in (".answers", ".answers.state.json"):
            self._path(tenant, "batches", batch_id, suffix).unlink(missing_ok=True)

    def _read[T](self, path: Path, kind: type[T]) -> T | None:
        """Reads a record; None where it is missing or unreadable."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if path not in self._damaged:
                _log.error("%s: this record cannot be read and is left out: %s", path, error)
            self._damaged.add(path)
            return None
        self._damaged.discard(path)
        return found

    def add_file(self, tenant: str, content: Path, filename: str, output_id: str | None = None) -> FileObject:
        """Turns an upload into a file; with `output_id` a batch's output, which replaces that of an earlier attempt."""
        file_id, size = output_id or new_file_id(), content.stat().st_size
        sync(content)
        os.replace(content, self._path(tenant, "files", file_id))
        made = FileObject(
            id=file_id,
            bytes=size,
            created_at=self.now(),
            filename=filename,
            purpose="batch" if output_id is None else "batch_output",
        )
        _write(self._path(tenant, "files", file_id, ".json"), msgspec.json.encode(made))
        return made

    def _seen(self, batch: Batch) -> Batch:
        if batch.status not in ("validating", "in_progress") or (at := self.cancelled_at(batch.id)) is None:
            return batch
        return msgspec.structs.replace(batch, status="cancelling", cancelling_at=at)

    def _folder(self, tenant: str, kind: str) -> Path:
        """Returns a tenant's folder; the prefix keeps a tenant named `.` inside."""
        if not _TENANT.fullmatch(tenant):
            raise ValueError(f"tenant: {tenant!r} is not a valid name")
        folder = self.directory / "tenants" / f"tenant-{tenant}" / kind
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def _records(self, tenant: str, kind: str) -> Iterator[Path]:
        """Yields the paths of a folder's records, and of no other files such as a journal's state."""
        for path in self._folder(tenant, kind).glob("*.json"):
            if _ID.fullmatch(path.stem):
                yield path

    def _path(self, tenant: str, kind: str, name: str, suffix: str = "") -> Path:
        if not _ID.fullmatch(name):
            raise NotFound("file" if kind == "files" else "batch")
        return self._folder(tenant, kind) / (name + suffix)

    def sweep(self) -> None:
        """Deletes unfinished files of killed API servers, some time after their last write."""
        for path in self.directory.glob("tenants/*/*/*"):
            with contextlib.suppress(FileNotFoundError):
                if _is_unfinished(path) and time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()


def _is_unfinished(path: Path) -> bool:
    """Returns whether a path is an upload, a temporary record, or content without a record."""
    has_no_record = _ID.fullmatch(path.name) is not None and not path.with_name(f"{path.name}.json").exists()
    return path.name.startswith(".") or path.suffix == ".part" or has_no_record


def new_file_id() -> str:
    """Returns a new random id."""
    return f"file-{secrets.token_hex(12)}"
