"""The files that a batch starts from and ends with: checks its input, and sorts its answers into output and errors."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from dsv3.batch.journal import BadLine, LineParser, RequestLine, answered_number, bad_line, failure_of, numbered_lines
from dsv3.server.batches.records import LineError
from dsv3.server.batches.store import MAX_LINES, private

_MAX_ERRORS = 100
EXPIRED = "batch_expired"
_EXPIRED_TEXT = "the batch's completion window ended before this line was answered"


def problems(path: Path, endpoint: str) -> list[LineError]:
    """Lists what keeps a file from being a batch for `endpoint`, up to 100 entries; OpenAI refuses it as a whole."""
    found: list[LineError] = []
    number = count = 0
    for number, line in _lines(path):
        count += 1
        if isinstance(line, BadLine):
            found.append(LineError(line.code, line.message, line=number))
        elif line.url != endpoint:
            text = f"the batch is for {endpoint}, this line for {line.url}"
            found.append(LineError("mismatched_url", text, "url", number))
        if len(found) == _MAX_ERRORS:
            break
        if count > MAX_LINES:
            return [LineError("too_many_lines", f"more than {MAX_LINES} lines", line=number)]
    return found if count else [LineError("empty_file", "the file has no lines")]


def _lines(path: Path) -> Iterator[tuple[int, RequestLine | BadLine]]:
    parser = LineParser()
    with path.open("rb") as file:
        for number, raw in numbered_lines(file):
            yield number, parser.parse(number, raw)


@dataclasses.dataclass(frozen=True)
class Sorted:
    """How many lines went where."""

    output: int
    errors: int


def sort_answers(answers: Path, output: Path, errors: Path) -> Sorted:
    """Writes the answers with status 200 to one file and the others to another."""
    written = [0, 0]
    with open(output, "wb", opener=private) as good, open(errors, "wb", opener=private) as bad:
        if answers.exists():
            with answers.open("rb") as file:
                for line in file:
                    is_bad = failure_of(line) is not None
                    written[is_bad] += 1
                    (bad if is_bad else good).write(line)
    return Sorted(*written)


def append_expired(source: Path, answers: Path, errors: Path) -> int:
    """Writes an error for each line without an answer; returns how many there are."""
    done = set()
    if answers.exists():
        with answers.open("rb") as file:
            done = {answered_number(line) for line in file}
    count = 0
    with errors.open("ab") as bad:
        for number, line in _lines(source):
            if number not in done:
                bad.write(bad_line(BadLine(number, line.custom_id, EXPIRED, _EXPIRED_TEXT)))
                count += 1
    return count
