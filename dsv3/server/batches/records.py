"""What clients see of files and batches: OpenAI's objects, with the time in seconds since 1970."""

from typing import Literal

import msgspec

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
WINDOW = "24h"
WINDOW_S = 24 * 3600
MAX_METADATA = 16


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file: what a client has uploaded, or what a batch has made."""

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
    """Why a file is no batch: a `code`, words, and the number of the line, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Errors(msgspec.Struct, frozen=True):
    """A list of errors in OpenAI's shape."""

    data: tuple[LineError, ...] = ()
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """Lines of a batch: all, those answered with 200, and the others that have their answer."""

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
    """A batch as it is kept. `ends_as` is the state after finalizing, for which the two files' ids are chosen."""

    batch: Batch
    ends_as: Status | None = None
    output_id: str | None = None
    error_id: str | None = None
