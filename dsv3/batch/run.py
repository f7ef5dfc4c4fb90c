"""Sends the lines of a batch to a completer, several at a time, and appends each answer as it comes.

Memory does not grow with the input, but for 16 bytes per custom_id.
"""

import asyncio
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from dsv3.batch.journal import (
    BadLine,
    BatchError,
    Journal,
    LineParser,
    RequestLine,
    answer_line,
    bad_line,
    numbered_lines,
)

WINDOW_LINES, WINDOW_BYTES = 4096, 64 * 2**20
_COMPARED_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class Reply:
    """The response to a line: `body` is JSON-encodable, or a `msgspec.Raw` that is JSON already."""

    status: int
    request_id: str
    body: Any
    output_tokens: int = 0


class Completer(Protocol):
    """Answers requests; called concurrently, up to `concurrency` at a time."""

    @property
    def concurrency(self) -> int: ...

    async def complete(self, url: str, body: bytes) -> Reply:
        """Answers the JSON `body` as a server would at `url`; errors are replies too.

        Raises only errors that must end the batch and leave the request unanswered, such as the engine's death.
        Cancelling a call aborts its request.
        """


@dataclasses.dataclass
class BatchProgress:
    """Counts of a run: `resumed` lines were answered by earlier runs, the others by this one in `seconds`."""

    total: int
    resumed: int = 0
    succeeded: int = 0
    failed: int = 0
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def answered(self) -> int:
        """Lines that are answered in the output file."""
        return self.resumed + self.succeeded + self.failed

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, the mean over this run."""
        return self.output_tokens / self.seconds if self.seconds else 0.0


async def run(
    source: pathlib.Path,
    journal: Journal,
    completer: Completer,
    *,
    sorts: bool = False,
    on_progress: Callable[[BatchProgress], None] = lambda progress: None,
) -> BatchProgress:
    """Answers every line of `source` that the journal lacks, as many at a time as the completer takes.

    With `sorts`, lines with a common prefix follow each other, within windows of lines.

    When cancelled, aborts the requests in flight, leaves them to the next run, and returns. Raises what the completer
    raises, and BatchError where the input changes meanwhile or the output cannot be written; written answers stay.
    """
    progress, began_s = BatchProgress(total=journal.source.lines, resumed=journal.answered), time.monotonic()
    lines = _unanswered(source, journal)
    if sorts:
        lines = sorted_in_windows(lines)

    async def worker() -> None:
        for line in lines:
            await _answer(line, journal, completer, progress)
            progress.seconds = time.monotonic() - began_s
            on_progress(progress)
            await asyncio.sleep(0)  # invalid lines do not wait for anything; other tasks must run

    on_progress(progress)
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(completer.concurrency):
                tasks.create_task(worker())
    except asyncio.CancelledError:
        pass
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return progress


def sorted_in_windows(lines: Iterator[RequestLine | BadLine]) -> Iterator[RequestLine | BadLine]:
    """Sorts lines by the beginning of their bodies, in windows of up to `WINDOW_LINES` and `WINDOW_BYTES`."""
    window: list[RequestLine | BadLine] = []
    size = 0
    for line in lines:
        window.append(line)
        size += len(line.body) if isinstance(line, RequestLine) else 0
        if len(window) == WINDOW_LINES or size > WINDOW_BYTES:
            yield from sorted(window, key=_beginning)
            window, size = [], 0
    yield from sorted(window, key=_beginning)


def _beginning(line: RequestLine | BadLine) -> bytes:
    return line.body[:_COMPARED_BYTES] if isinstance(line, RequestLine) else b""


async def _answer(line: RequestLine | BadLine, journal: Journal, completer: Completer, progress: BatchProgress) -> None:
    if isinstance(line, BadLine):
        journal.append(line.number, bad_line(line))
        progress.failed += 1
        return
    answer = await completer.complete(line.url, line.body)
    journal.append(line.number, answer_line(line, answer.status, answer.request_id, answer.body))
    progress.output_tokens += answer.output_tokens
    if answer.status == 200:
        progress.succeeded += 1
    else:
        progress.failed += 1


def _unanswered(source: pathlib.Path, journal: Journal) -> Iterator[RequestLine | BadLine]:
    """Yields the unanswered lines; parses the answered ones too, to find duplicates of their custom_ids."""
    parser, number, last = LineParser(), 0, journal.source.last_line
    with source.open("rb") as file:
        before = os.fstat(file.fileno())
        for number, raw in numbered_lines(file):
            if number > last:
                break
            line = parser.parse(number, raw)
            if not journal.is_answered(number):
                yield line
        after = os.fstat(file.fileno())
    if number > last or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise BatchError(f"{source} changed while it was read; restore it to resume, or name another output")
