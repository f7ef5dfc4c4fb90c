"""The output file of a batch, kept exact: every answer is appended whole, and a restart knows what is answered.

A killed process leaves at most one unfinished line at the end of the file, which the next run cuts off. The file
`OUTPUT.state.json` beside it holds the digest of the input and the model's name, so that answers of two different
batches never mix. It is also what a run locks: an output that is deleted or replaced meanwhile lets no second run in.
Losing power may lose answers of the last seconds; they are made again.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import stat
import time
from typing import Self

import msgspec

from dsv3.batch.lines import answered_number, failure_of, numbered_lines
from dsv3.checkpoint.identity import known_identity
from dsv3.config.hugging_face import config_digest

STATE_VERSION = 1
SYNC_SECONDS = 10.0
_DIGEST_CHARACTERS = 16
_MAX_STATE_BYTES = 2**16
_SHOWN_FAILURES, _SHOWN_CHARS = 3, 300


class BatchError(Exception):
    """The batch cannot be run or go on; the message says what to do."""


class InputSummary(msgspec.Struct, frozen=True):
    """What identifies an input: its digest. `last_line` is its highest line number, `lines` counts those not blank."""

    sha256: str
    bytes: int
    lines: int
    last_line: int


class _State(msgspec.Struct, frozen=True):
    version: int
    input: InputSummary
    model: str


def summarize_input(path: pathlib.Path) -> InputSummary:
    """Reads the input once, in bounded memory; raises BatchError if it cannot be read."""
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
    """Names a model by a name, its directory's if not given, and a digest of its configuration and of its weights.

    Not by its path, so that a batch can be resumed on another machine. Raises OSError for unreadable files.
    """
    digest = hashlib.sha256(f"{config_digest(model_dir)} {known_identity(model_dir)}".encode()).hexdigest()
    return f"{name or model_dir.name} {digest[:_DIGEST_CHARACTERS]}"


class Journal:
    """The open output file; one process at a time holds it.

    `answered` counts the lines that are answered, those of earlier runs included, and `failed` those of them that have
    an error; `failures` says of the first few why. `last_line` is the input's.
    """

    def __init__(self, path: pathlib.Path, descriptor: int, state: int, last_line: int, sync_s: float):
        self._path = path
        self._descriptor, self._state = descriptor, state
        self._is_answered = bytearray(last_line + 1)
        self.last_line, self._sync_s = last_line, sync_s
        self._synced_s = time.monotonic()
        self.answered = self.failed = 0
        self.failures: list[str] = []

    @classmethod
    def open(cls, path: pathlib.Path, source: InputSummary, model: str, sync_s: float = SYNC_SECONDS) -> Self:
        """Opens the output for the batch of this input and model, new or to be resumed.

        What is written is synced when `sync_s` seconds have passed since the last time.

        Raises BatchError when the file belongs to something else, is damaged, or another process is writing it.
        """
        descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, descriptor)
            state = _open_state(path, is_new=os.fstat(descriptor).st_size == 0)
            opened.callback(os.close, state)
            journal = cls(path, descriptor, state, source.last_line, sync_s)
            journal._lock()
            journal._require_place()
            journal._claim(_State(STATE_VERSION, source, model))
            journal._recover()
            opened.pop_all()
        return journal

    def is_answered(self, number: int) -> bool:
        """Returns whether input line `number` has its answer in the file."""
        return bool(self._is_answered[number])

    def append(self, number: int, line: bytes) -> None:
        """Writes one output line, whole or not at all, so that a kill right after keeps it.

        Raises BatchError where the line would be lost.
        """
        self._require_place()
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
        """Asks the system to keep what was written through a loss of power."""
        os.fsync(self._descriptor)
        self._synced_s = time.monotonic()

    def close(self) -> None:
        """Syncs and lets the file go."""
        self.sync()
        os.close(self._descriptor)
        os.close(self._state)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._state, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BatchError(f"{self._path}: another process is writing this file") from error

    def _require_place(self) -> None:
        """Raises BatchError where the path names another file by now, or none: nobody would find what is written."""
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except OSError:
            found = None
        if found is None or not os.path.samestat(found, os.fstat(self._descriptor)):
            raise BatchError(
                f"{self._path}: the file was deleted, moved or replaced while the batch was writing it; put it back to "
                "go on from there, or start anew without it"
            )

    def _claim(self, wanted: _State) -> None:
        """Notes which batch the file belongs to, or checks that it is this one."""
        if os.fstat(self._descriptor).st_size == 0:
            os.ftruncate(self._state, 0)
            state = msgspec.json.encode(wanted)
            if os.pwrite(self._state, state, 0) < len(state):
                raise BatchError(f"{_state_path(self._path)}: {os.strerror(errno.ENOSPC)}")
            os.fsync(self._state)  # an answer is written after it
            return
        try:
            found = msgspec.json.decode(os.pread(self._state, _MAX_STATE_BYTES, 0), type=_State)
        except msgspec.MsgspecError as error:
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
        """Marks the answered lines and cuts off an unfinished last one."""
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
        if not 0 < number <= self.last_line:
            raise ValueError(f"there is no input line {number}")
        if self._is_answered[number]:
            raise ValueError(f"input line {number} is answered twice")
        why = failure_of(line)
        self._is_answered[number] = True
        self.answered += 1
        if why is not None:
            self.failed += 1
            if len(self.failures) < _SHOWN_FAILURES:
                self.failures.append(f"line {number}: {' '.join(why.split())[:_SHOWN_CHARS]}")


def _state_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".state.json")


def _open_state(path: pathlib.Path, is_new: bool) -> int:
    """Opens the state of an output; makes it only for a new output."""
    try:
        return _open(_state_path(path), os.O_RDWR | (os.O_CREAT if is_new else 0))
    except FileNotFoundError as error:
        raise _unknown(path, error) from error


def _open(path: pathlib.Path, flags: int) -> int:
    """Opens a regular file that only its owner may read if it is new; a link is not followed, a pipe not waited for."""
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
