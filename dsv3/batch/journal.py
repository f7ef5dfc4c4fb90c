"""The output file of a batch, kept exact: every answer is appended whole, and a restart knows what is answered.

A killed process leaves at most one unfinished line at the end of the file, which the next run cuts off. The file
`OUTPUT.state.json` beside it holds the digest of the input and the model's name, so that answers of two different
batches never mix. Losing power may lose answers of the last seconds; they are made again.
"""

import fcntl
import hashlib
import os
import pathlib
import time
from typing import Self

import msgspec

from dsv3.batch.lines import answered_number, numbered_lines

STATE_VERSION = 1
SYNC_SECONDS = 10.0


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


class Journal:
    """The open output file; one process at a time holds it.

    `answered` counts the lines that are answered, those of earlier runs included; `last_line` is the input's.
    """

    def __init__(self, path: pathlib.Path, descriptor: int, last_line: int):
        self._path = path
        self._descriptor = descriptor
        self._is_answered = bytearray(last_line + 1)
        self.last_line = last_line
        self._synced_s = time.monotonic()
        self.answered = 0

    @classmethod
    def open(cls, path: pathlib.Path, source: InputSummary, model: str) -> Self:
        """Opens the output for the batch of this input and model, new or to be resumed.

        Raises BatchError when the file belongs to something else, is damaged, or another process is writing it.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise BatchError(f"{path}: {error.strerror}") from error
        journal = cls(path, descriptor, source.last_line)
        try:
            journal._lock()
            journal._claim(_State(STATE_VERSION, source, model))
            journal._recover()
        except BaseException:
            os.close(descriptor)
            raise
        return journal

    def is_answered(self, number: int) -> bool:
        """Returns whether input line `number` has its answer in the file."""
        return bool(self._is_answered[number])

    def append(self, number: int, line: bytes) -> None:
        """Writes one output line, whole or not at all, so that a kill right after keeps it."""
        start = os.lseek(self._descriptor, 0, os.SEEK_END)
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            os.ftruncate(self._descriptor, start)
            raise BatchError(f"{self._path}: {error.strerror}; all answers before are kept") from error
        self._mark(number)
        if time.monotonic() - self._synced_s > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Asks the system to keep what was written through a loss of power."""
        os.fsync(self._descriptor)
        self._synced_s = time.monotonic()

    def close(self) -> None:
        """Syncs and lets the file go."""
        self.sync()
        os.close(self._descriptor)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BatchError(f"{self._path}: another process is writing this file") from error

    def _claim(self, wanted: _State) -> None:
        """Notes which batch the file belongs to, or checks that it is this one."""
        state_path = self._path.with_name(self._path.name + ".state.json")
        if os.fstat(self._descriptor).st_size == 0:
            _write_whole(state_path, msgspec.json.encode(wanted))
            return
        try:
            found = msgspec.json.decode(state_path.read_bytes(), type=_State)
        except (OSError, msgspec.MsgspecError) as error:
            raise BatchError(
                f"{self._path} is not empty, and {state_path.name}, which says what batch it belongs to, cannot be "
                f"read ({error}); move the file away or name another output"
            ) from error
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
            self._mark(answered_number(line))
        except ValueError as error:
            raise BatchError(
                f"{self._path}: the line at byte {offset} is damaged ({error}); delete that line to have its request "
                "answered again"
            ) from error

    def _mark(self, number: int) -> None:
        if not 0 < number <= self.last_line:
            raise ValueError(f"there is no input line {number}")
        if self._is_answered[number]:
            raise ValueError(f"input line {number} is answered twice")
        self._is_answered[number] = True
        self.answered += 1


def _write_whole(path: pathlib.Path, data: bytes) -> None:
    """Writes a small file so that a kill leaves the old one or the new one."""
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
