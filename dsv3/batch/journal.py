"""The output file of a batch, consistent across kills: answers are appended as whole lines, and a restart skips them.

A killed process leaves at most one unfinished line at the end of the file, which the next run cuts off. The file
`OUTPUT.state.json` beside it has the digest of the input and the model's name, so that answers of two batches never
mix. It is also the lock: deleting or replacing the output lets no second run in. A power loss may lose answers of the
last seconds; they are computed again.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import pathlib
import stat
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, Self

import msgspec

from dsv3.checkpoint.identity import known_identity
from dsv3.config.hugging_face import config_digest

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
    """An invalid line and its error; `custom_id` if it could be read."""

    number: int
    custom_id: str | None
    code: str
    message: str


def numbered_lines(file: BinaryIO, limit: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes | None]]:
    """Yields number and bytes of each line that is not blank.

    The bytes are None for a line longer than `limit`, which is never in memory as a whole.
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
    """Parses the lines of one input in order; keeps 16 bytes of hash per custom_id to find duplicates."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def parse(self, number: int, line: bytes | None) -> RequestLine | BadLine:
        """Parses a line; all but the first line with a custom_id are bad."""
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
    """Returns the output line of an invalid line."""
    error = {"code": bad.code, "message": bad.message, "line": bad.number}
    return _output(bad.number, bad.custom_id, None, error)


def answer_line(request: RequestLine, status: int, request_id: str, body: Any) -> bytes:
    """Returns the output line of an answered request."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _output(request.number, request.custom_id, response, None)


def _output(number: int, custom_id: str | None, response: Any, error: Any) -> bytes:
    line = {"id": f"{ID_PREFIX}{number}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


class OutputBody(msgspec.Struct):
    """The fields of a response's body that every route has."""

    error: dict[str, Any] | None = None


class _OutputResponse(msgspec.Struct):
    status_code: int
    body: msgspec.Raw = msgspec.Raw()


class _OutputLine(msgspec.Struct):
    id: str
    response: _OutputResponse | None = None
    error: dict[str, Any] | None = None


parse_output = msgspec.json.Decoder(_OutputLine).decode
_body_decoder = msgspec.json.Decoder(OutputBody)


def answered_number(line: bytes) -> int:
    """Returns the input line number that an output line answers; raises ValueError for an invalid output line."""
    number = parse_output(line).id.removeprefix(ID_PREFIX)
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"its id does not end in a line number: {number[:40]!r}")
    return int(number)


def parse_failure(line: bytes) -> str | None:
    """Returns the error of an output line; None where it has an answer."""
    found = parse_output(line)
    if found.response is None:
        return error_text(found.error)
    if found.response.status_code == 200:
        return None
    try:
        error = _body_decoder.decode(found.response.body).error
    except msgspec.MsgspecError:
        error = None
    return f"status {found.response.status_code}: {error_text(error)}"


def error_text(error: dict[str, Any] | None) -> str:
    """Returns the message of an error in OpenAI's format, "" for none."""
    return str((error or {}).get("message", ""))


STATE_VERSION = 1
SYNC_SECONDS = 10.0
_DIGEST_CHARACTERS = 16
_MAX_STATE_BYTES = 2**16
_SHOWN_FAILURES, _SHOWN_CHARS = 3, 300


class BatchError(Exception):
    """The batch cannot run or continue; the message says what to do."""


class InputSummary(msgspec.Struct, frozen=True):
    """An input's digest and size. `last_line` is its highest line number, `lines` counts those that are not blank."""

    sha256: str
    bytes: int
    lines: int
    last_line: int


class _JournalState(msgspec.Struct, frozen=True):
    version: int
    input: InputSummary
    model: str


def summarize_input(path: pathlib.Path) -> InputSummary:
    """Reads the input once, in bounded memory; raises BatchError where it cannot be read."""
    try:
        if not path.exists():
            raise BatchError(f"{path}: no such file")
        if not path.is_file():
            raise BatchError(f"{path}: the input must be a regular file, so that an interrupted batch can be resumed")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.seek(0, os.SEEK_CUR)
            file.seek(0)
            lines = last = 0
            for last, _ in numbered_lines(file):  # noqa: B007
                lines += 1
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror}") from error
    return InputSummary(digest, size, lines, last)


def model_identity(model_dir: pathlib.Path, name: str | None = None) -> str:
    """Identifies a model by a name (default: its directory's) and a digest of its configuration and weights.

    The path is left out, so that a batch can be resumed on another machine. Raises OSError for unreadable files.
    """
    digest = hashlib.sha256(f"{config_digest(model_dir)} {known_identity(model_dir)}".encode()).hexdigest()
    return f"{name or model_dir.name} {digest[:_DIGEST_CHARACTERS]}"


class Journal:
    """The open output file, locked for one process.

    `answered` counts the answered lines of the input `source`, including those of earlier runs, `failed` those of them
    with an error; `failures` has the first few errors.
    """

    def __init__(self, path: pathlib.Path, descriptor: int, state: int, source: InputSummary, sync_s: float):
        self.source, self._path = source, path
        self._descriptor, self._state = descriptor, state
        self._is_answered = bytearray(source.last_line + 1)
        self._sync_s, self._synced_s = sync_s, time.monotonic()
        self.answered = self.failed = 0
        self.failures: list[str] = []

    @classmethod
    def open(cls, path: pathlib.Path, source: InputSummary, model: str, sync_s: float = SYNC_SECONDS) -> Self:
        """Opens the output of a batch of this input and model, new or to be resumed.

        The file is synced when `sync_s` seconds have passed since the last time. Raises BatchError where the file
        belongs to another batch, is damaged, or another process writes it.
        """
        descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, descriptor)
            state = _open_state(path, is_new=os.fstat(descriptor).st_size == 0)
            opened.callback(os.close, state)
            journal = cls(path, descriptor, state, source, sync_s)
            journal._lock()
            journal._require_same_file()
            journal._claim(_JournalState(STATE_VERSION, source, model))
            journal._recover()
            opened.pop_all()
        return journal

    def is_answered(self, number: int) -> bool:
        """Returns whether input line `number` is answered in the file."""
        return bool(self._is_answered[number])

    def append(self, number: int, line: bytes) -> None:
        """Appends one output line, whole or not at all; a kill right after keeps it.

        Raises BatchError where the line would be lost.
        """
        self._require_same_file()
        start = os.lseek(self._descriptor, 0, os.SEEK_END)
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            os.ftruncate(self._descriptor, start)
            raise BatchError(f"{self._path}: {error.strerror}; all answers before are kept") from error
        self._mark(number, line)
        if time.monotonic() - self._synced_s > self._sync_s:
            self.sync()

    def sync(self) -> None:
        """Syncs the file to the disk."""
        os.fsync(self._descriptor)
        self._synced_s = time.monotonic()

    def close(self) -> None:
        """Syncs and closes the file."""
        self.sync()
        os.close(self._descriptor)
        os.close(self._state)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._state, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BatchError(f"{self._path}: another process is writing this file") from error

    def _require_same_file(self) -> None:
        """Raises BatchError where the file has been deleted, moved or replaced: the output would be lost."""
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except OSError:
            found = None
        if found is None or not os.path.samestat(found, os.fstat(self._descriptor)):
            raise BatchError(
                f"{self._path}: the file was deleted, moved or replaced while the batch was writing it; restore it to "
                "continue, or run the command again to start over"
            )

    def _claim(self, wanted: _JournalState) -> None:
        """Writes the state of a new file, or checks that an old one belongs to this batch."""
        if os.fstat(self._descriptor).st_size == 0:
            os.ftruncate(self._state, 0)
            state = msgspec.json.encode(wanted)
            if os.pwrite(self._state, state, 0) < len(state):
                raise BatchError(f"{_state_path(self._path)}: {os.strerror(errno.ENOSPC)}")
            os.fsync(self._state)  # before the first answer
            return
        try:
            found = msgspec.json.decode(os.pread(self._state, _MAX_STATE_BYTES, 0), type=_JournalState)
            if found.version != STATE_VERSION:
                raise ValueError(f"version {found.version}, not {STATE_VERSION}")
        except (msgspec.MsgspecError, ValueError) as error:
            raise _unknown(self._path, error) from error
        if found.input.sha256 != wanted.input.sha256:
            raise BatchError(
                f"{self._path} holds answers to another input (sha256 {found.input.sha256[:12]}..., not "
                f"{wanted.input.sha256[:12]}...); restore that input to resume, or name another output"
            )
        if found.model != wanted.model:
            raise BatchError(
                f"{self._path} holds answers of the model {found.model!r}, not {wanted.model!r}; resume with that "
                "model, or name another output"
            )

    def _recover(self) -> None:
        """Reads the answered lines and cuts off an unfinished last one."""
        end = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._recover_line(line, end)
                end += len(line)
        os.ftruncate(self._descriptor, end)

    def _recover_line(self, line: bytes, offset: int) -> None:
        try:
            self._mark(answered_number(line), line)
        except ValueError as error:
            raise BatchError(
                f"{self._path}: the line at byte {offset} is damaged ({error}); delete that line to have its request "
                "answered again"
            ) from error

    def _mark(self, number: int, line: bytes) -> None:
        if not 0 < number <= self.source.last_line:
            raise ValueError(f"there is no input line {number}")
        if self._is_answered[number]:
            raise ValueError(f"input line {number} is answered twice")
        why = parse_failure(line)
        self._is_answered[number] = True
        self.answered += 1
        if why is not None:
            self.failed += 1
            if len(self.failures) < _SHOWN_FAILURES:
                self.failures.append(f"line {number}: {' '.join(why.split())[:_SHOWN_CHARS]}")


def _state_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".state.json")


def _open_state(path: pathlib.Path, is_new: bool) -> int:
    """Opens the state file; creates it only for a new output."""
    try:
        return _open(_state_path(path), os.O_RDWR | (os.O_CREAT if is_new else 0))
    except FileNotFoundError as error:
        raise _unknown(path, error) from error


def _open(path: pathlib.Path, flags: int) -> int:
    """Opens a regular file, with mode 0600 if new; does not follow links or wait for pipes."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BatchError(f"{path} is a symbolic link; name the file itself") from error
        if error.errno == errno.ENOENT and not flags & os.O_CREAT:
            raise
        raise BatchError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BatchError(f"{path} is not a regular file")
    return descriptor


def _unknown(path: pathlib.Path, error: Exception) -> BatchError:
    return BatchError(
        f"{path} is not empty, and {_state_path(path).name}, which says what batch it belongs to, cannot be read "
        f"({error}); move the file away or name another output"
    )
