"""Moves the lines of a batch through a completer: a thread reads and prepares them, the caller's thread computes.

Memory does not grow with the input: at most `PREPARED_LINES` lines wait prepared, and an answered line is forgotten.
"""

import contextlib
import dataclasses
import os
import pathlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from dsv3.batch.journal import BatchError, Journal
from dsv3.batch.lines import BadLine, LineParser, RequestLine, answer_line, bad_line, numbered_lines

PREPARED_LINES = 64
# How long an idle loop waits before it looks at the stop flag again.
_IDLE_SECONDS = 0.1


class Refused(Exception):
    """A request that cannot be answered: the HTTP status and the body the server would send."""

    def __init__(self, status: int, body: Any):
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of one request: `body` is JSON-encodable; `output_tokens` is for the progress bar."""

    number: int
    status: int
    request_id: str
    body: Any
    output_tokens: int = 0


class Completer(Protocol):
    """Answers many requests at a time. All calls but `prepare` come from one thread."""

    def prepare(self, url: str, body: bytes) -> Any:
        """Validates a request and does what needs no engine; raises Refused. Called from a thread of its own."""

    def has_room(self) -> bool:
        """Whether another request may start now; always true while none is running."""

    def start(self, number: int, prepared: Any) -> None:
        """Begins a prepared request; raises Refused."""

    def step(self) -> list[Answer]:
        """Computes a little for every running request and returns the requests that ended."""

    def abort(self) -> None:
        """Gives up every running request."""


@dataclasses.dataclass
class Progress:
    """Counts of a run: `resumed` lines were answered by earlier runs, the others by this one."""

    total: int
    resumed: int = 0
    succeeded: int = 0
    failed: int = 0
    output_tokens: int = 0
    interrupted: bool = False

    @property
    def answered(self) -> int:
        """Lines with an answer in the output file."""
        return self.resumed + self.succeeded + self.failed


@dataclasses.dataclass(frozen=True)
class _Prepared:
    line: RequestLine | BadLine
    request: Any = None
    refused: Refused | None = None


def run(
    source: pathlib.Path,
    journal: Journal,
    completer: Completer,
    *,
    total: int,
    stop: threading.Event,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Answers every line of `source` that the journal does not hold, in any order, until done or `stop` is set.

    A set `stop` gives up the running requests at once; they stay unanswered, for the next run. Raises BatchError when
    the input cannot be read, changes meanwhile, or the output cannot be written; what is written stays.
    """
    progress = Progress(total=total, resumed=journal.answered)
    running: dict[int, RequestLine] = {}
    with _prepared_lines(source, journal, completer) as lines:
        on_progress(progress)
        while not stop.is_set():
            more = _admit(lines, running, completer, journal, progress)
            if running:
                for answer in completer.step():
                    _write_answer(journal, progress, running.pop(answer.number), answer)
            on_progress(progress)
            if not more and not running:
                return progress
        completer.abort()
    progress.interrupted = True
    return progress


class _Feed:
    """The reader's end of a bounded queue; `take` gives the next prepared line, None where there is none."""

    def __init__(self) -> None:
        self.queue: queue.Queue[_Prepared | Exception | None] = queue.Queue(PREPARED_LINES)
        self.closed = threading.Event()
        self.exhausted = False

    def put(self, item: _Prepared | Exception | None) -> bool:
        while not self.closed.is_set():
            with contextlib.suppress(queue.Full):
                self.queue.put(item, timeout=_IDLE_SECONDS)
                return True
        return False

    def take(self, wait: bool) -> _Prepared | None:
        try:
            item = self.queue.get(wait, _IDLE_SECONDS)
        except queue.Empty:
            return None
        if isinstance(item, Exception):
            raise item
        self.exhausted = item is None
        return item


def _admit(
    feed: _Feed, running: dict[int, RequestLine], completer: Completer, journal: Journal, progress: Progress
) -> bool:
    """Starts what there is room for; returns whether more lines may come."""
    while not feed.exhausted and completer.has_room():
        prepared = feed.take(wait=not running)
        if prepared is None:
            break
        line = prepared.line
        if isinstance(line, BadLine):
            journal.append(line.number, bad_line(line))
            progress.failed += 1
            continue
        try:
            if prepared.refused is not None:
                raise prepared.refused
            completer.start(line.number, prepared.request)
            running[line.number] = line
        except Refused as refused:
            _write_answer(journal, progress, line, Answer(line.number, refused.status, "", refused.body))
    return not feed.exhausted


def _write_answer(journal: Journal, progress: Progress, line: RequestLine, answer: Answer) -> None:
    journal.append(line.number, answer_line(line, answer.status, answer.request_id, answer.body))
    progress.output_tokens += answer.output_tokens
    if answer.status == 200:
        progress.succeeded += 1
    else:
        progress.failed += 1


@contextlib.contextmanager
def _prepared_lines(source: pathlib.Path, journal: Journal, completer: Completer) -> Iterator[_Feed]:
    """Runs the reader's thread for the time of the `with`."""
    feed = _Feed()

    def read() -> None:
        try:
            for prepared in _prepare(source, journal, completer):
                if not feed.put(prepared):
                    return
            feed.put(None)
        except Exception as error:
            feed.put(error)

    reader = threading.Thread(target=read, name="batch-reader", daemon=True)
    reader.start()
    try:
        yield feed
    finally:
        feed.closed.set()
        reader.join()


def _prepare(source: pathlib.Path, journal: Journal, completer: Completer) -> Iterator[_Prepared]:
    """The unanswered lines; answered ones are parsed too, because their custom_ids are taken."""
    parser, number = LineParser(), 0
    with source.open("rb") as file:
        before = os.fstat(file.fileno())
        for number, raw in numbered_lines(file):
            if number > journal.last_line:
                break
            line = parser.parse(number, raw)
            if not journal.is_answered(number):
                yield _prepare_line(line, completer)
        after = os.fstat(file.fileno())
    if number > journal.last_line or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise BatchError(f"{source} changed while it was read; restore it to resume, or name another output")


def _prepare_line(line: RequestLine | BadLine, completer: Completer) -> _Prepared:
    if isinstance(line, BadLine):
        return _Prepared(line)
    try:
        return _Prepared(line, completer.prepare(line.url, line.body))
    except Refused as refused:
        return _Prepared(line, refused=refused)
