"""Turns tables (Parquet, CSV, lines of JSON) into request lines, and their answers into columns.

`dsv3.map` does this in a notebook; Ray Data and DuckDB with the recipes of examples/. This is one command that resumes
after a kill and needs no cluster. Rows are read twice, to make the requests and to write the answers, and never all
held in memory.
"""

import array
import contextlib
import dataclasses
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dsv3.batch.formats import detect_format, exists, open_input, open_output, require_module
from dsv3.batch.journal import (
    MAX_LINE_BYTES,
    BatchError,
    OutputBody,
    answered_number,
    error_text,
    numbered_lines,
    parse_output,
    summarize_input,
)
from dsv3.batch.options import ANSWER_FIELDS, BatchOptions

MESSAGES = "messages"
_ROWS = 1024
_NO_PROMPT = "the row has no prompt"

Row = dict[str, Any]


def read_columns(name: str) -> list[str]:
    """Returns the names of a table's columns; for lines, the keys of the first."""
    if detect_format(name).kind == "lines":
        return list(next(iter_rows(name), {}))
    with _reader(name) as reader:
        return list((reader.schema_arrow if _is_parquet(name) else reader.schema).names)


def iter_rows(name: str) -> Iterator[Row]:
    """Yields the rows of a table; raises BatchError for an invalid line."""
    if detect_format(name).kind == "lines":
        yield from _json_rows(name)
        return
    for batch in _record_batches(name):
        yield from batch.to_pylist()


def requests(name: str, options: BatchOptions) -> Iterator[bytes]:
    """Yields the request line of each row, an empty line for a row without a prompt. Row i is line i, from 1."""
    fields = options.body or {}
    for number, row in enumerate(iter_rows(name), 1):
        request = _request_body(row, options)
        if request is None:
            yield b"\n"
            continue
        body = request | fields
        line = {"custom_id": f"row-{number}", "method": "POST", "url": options.endpoint, "body": body}
        yield _encode(line, name, number) + b"\n"


def _request_body(row: Row, options: BatchOptions) -> Row | None:
    """Returns the prompt or messages of a row, whose `messages` may be a list or JSON; None without any."""
    value = row.get(options.prompt_column or MESSAGES)
    if value is None:
        return None
    if options.prompt_column is None:
        return {"messages": _messages(value)}
    if options.endpoint == "/v1/completions":
        return {"prompt": value}
    return {"messages": [{"role": "user", "content": value}]}


def _messages(value: Any) -> Any:
    """Returns a conversation without the nulls that tables have for absent fields.

    Other values stay as they are: the server refuses them.
    """
    if isinstance(value, str):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def check_columns(name: str, options: BatchOptions) -> None:
    """Raises BatchError for a table without the prompt column, or with a column of an answer's name."""
    columns = read_columns(name)
    wanted = options.prompt_column or MESSAGES
    if columns and wanted not in columns:
        hint = "" if options.prompt_column else "; name the one to ask with --prompt_column"
        raise BatchError(f"{name}: there is no column {wanted!r} among {', '.join(columns)}{hint}")
    if taken := [column for column in options.answer_columns if column in columns]:
        raise BatchError(f"{name}: there is a column {taken[0]!r} already; choose another --answer_column")


class Answers:
    """Random access to the answers of a journal by line number, with 8 bytes of memory for each."""

    def __init__(self, file: BinaryIO, last_line: int):
        self._file = file
        self._offsets = array.array("q", bytes(8 * (last_line + 1)))
        offset = 1  # 0: no answer
        for line in self._file:
            self._offsets[answered_number(line)] = offset
            offset += len(line)

    def columns(self, number: int) -> tuple[Any, ...]:
        """Returns answer, reasoning, finish reason, error, prompt tokens and completion tokens of a line."""
        offset = self._offsets[number] if number < len(self._offsets) else 0
        if not offset:
            return (None, None, None, _NO_PROMPT, None, None)
        self._file.seek(offset - 1)
        return _columns(self._file.readline())


class _OutputMessage(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class _OutputChoice(msgspec.Struct):
    message: _OutputMessage | None = None
    text: str | None = None
    finish_reason: str | None = None


class _AnswerBody(OutputBody):
    choices: tuple[_OutputChoice, ...] = ()
    usage: dict[str, Any] | None = None


def _columns(line: bytes) -> tuple[Any, ...]:
    output = parse_output(line)
    body = _AnswerBody() if output.response is None else _answer_body(output.response.body)
    if output.response is None or output.response.status_code != 200 or not body.choices:
        error = output.error or body.error
        return (None, None, None, error_text(error) if error is not None else "no answer", None, None)
    choice, usage = body.choices[0], body.usage or {}
    message = choice.message or _OutputMessage()
    text = choice.text if choice.message is None else message.content
    if text is None and message.tool_calls is not None:
        text = bytes(message.tool_calls).decode()
    tokens = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    return (text, message.reasoning_content, choice.finish_reason, None, *tokens)


def _answer_body(body: msgspec.Raw) -> _AnswerBody:
    """Parses a response's body; one that is not in OpenAI's format, as of other servers' errors, has no answer."""
    try:
        return msgspec.json.decode(body, type=_AnswerBody)
    except msgspec.MsgspecError:
        return _AnswerBody()


def write_answers(source: str, target: str, answers: Answers, options: BatchOptions) -> None:
    """Writes the rows of `source` with their answers to `target`, in their order; raises BatchError."""
    with open_output(target) as file:
        if detect_format(target).kind == "lines":
            for number, row in enumerate(iter_rows(source), 1):
                found = dict(zip(options.answer_columns, answers.columns(number), strict=True))
                file.write(_encode(row | found, source, number) + b"\n")
        else:
            _write_batches(source, target, file, answers, options)


def _write_batches(source: str, target: str, file: BinaryIO, answers: Answers, options: BatchOptions) -> None:
    arrow = require_module("pyarrow")
    kinds = [arrow.string()] * (len(ANSWER_FIELDS) - 1) + [arrow.int64()] * 2
    batches = _text_batches(source) if detect_format(source).kind == "lines" else _record_batches(source)
    writer, number = None, 0
    try:
        for batch in batches:
            rows = [answers.columns(number + i) for i in range(1, batch.num_rows + 1)]
            columns = list(zip(*rows, strict=True)) or [()] * len(kinds)
            number += batch.num_rows
            for name, kind, values in zip(options.answer_columns, kinds, columns, strict=True):
                batch = batch.append_column(name, arrow.array(values, kind))
            if not _is_parquet(target):
                batch = _flat(batch)
            writer = writer or _writer(target, file, batch.schema)
            writer.write_batch(batch)
    finally:
        if writer is not None:
            writer.close()


def _writer(name: str, file: BinaryIO, schema: Any) -> Any:
    if _is_parquet(name):
        return require_module("pyarrow.parquet").ParquetWriter(file, schema)
    return require_module("pyarrow.csv").CSVWriter(file, schema)


def _flat(batch: Any) -> Any:
    """Returns a batch whose nested columns are JSON, as CSV needs them."""
    arrow = require_module("pyarrow")
    for i, field in enumerate(batch.schema):
        if arrow.types.is_nested(field.type):
            texts = [None if v is None else msgspec.json.encode(v).decode() for v in batch.column(i).to_pylist()]
            batch = batch.set_column(i, field.name, arrow.array(texts, arrow.string()))
    return batch


def _record_batches(name: str) -> Iterator[Any]:
    with _reader(name) as reader:
        batches = reader.iter_batches(_ROWS) if _is_parquet(name) else reader
        empty = True
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS):  # one of CSV has all rows of a block
                empty = False
                yield batch.slice(start, _ROWS)
        if empty:
            schema = reader.schema_arrow if _is_parquet(name) else reader.schema
            yield require_module("pyarrow").RecordBatch.from_pylist([], schema=schema)


@contextlib.contextmanager
def _reader(name: str) -> Iterator[Any]:
    """Opens a table; all columns of CSV are text, and its rows have at most `MAX_LINE_BYTES`."""
    if _is_parquet(name):
        with open_input(name) as file:
            yield require_module("pyarrow.parquet").ParquetFile(file)
        return
    csv, text = require_module("pyarrow.csv"), require_module("pyarrow").string()
    options = {
        "parse_options": csv.ParseOptions(newlines_in_values=True),
        "read_options": csv.ReadOptions(block_size=MAX_LINE_BYTES),  # of which a row takes at most one
    }
    with open_input(name) as file:
        names = csv.open_csv(file, **options).schema.names
    convert = csv.ConvertOptions(
        column_types=dict.fromkeys(names, text),
        strings_can_be_null=True,
        null_values=[""],
        quoted_strings_can_be_null=False,
    )
    with open_input(name) as file:
        yield csv.open_csv(file, convert_options=convert, **options)


def _json_rows(name: str) -> Iterator[Row]:
    with open_input(name) as file:
        for number, line in numbered_lines(file):
            if line is None:
                raise BatchError(f"{name}: line {number} is longer than {MAX_LINE_BYTES} bytes")
            try:
                yield msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"), type=dict[str, Any])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise BatchError(f"{name}: line {number} is not a JSON object: {error}") from None


def _text_batches(name: str) -> Iterator[Any]:
    """Yields rows of JSON as text columns, other values encoded as JSON: types may differ from row to row."""
    arrow = require_module("pyarrow")
    columns: dict[str, None] = {}
    for row in iter_rows(name):
        columns.update(dict.fromkeys(row))
    schema = arrow.schema([(column, arrow.string()) for column in columns])
    for rows in itertools.batched(iter_rows(name), _ROWS):
        texts = {column: [_as_text(row.get(column)) for row in rows] for column in columns}
        yield arrow.RecordBatch.from_pydict(texts, schema=schema)


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def _encode(value: Any, name: str, number: int) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BatchError(f"{name}: row {number} cannot be written as JSON: {error}") from None


def _is_parquet(name: str) -> bool:
    return detect_format(name).kind == "parquet"


@dataclasses.dataclass(frozen=True)
class StagedBatch:
    """A prepared batch: input `lines`, the journal `answers`, and `finish`, which makes the output at the end."""

    lines: Path
    answers: Path
    finish: Callable[[], None] = lambda: None  # the journal is the output already


def stage(source: str, target: str, options: BatchOptions) -> StagedBatch:
    """Prepares a batch; the same input and options give the same lines, so that a killed batch can be resumed.

    Raises BatchError where input, output or options do not fit each other.
    """
    is_table, wanted = _is_table(source, options), detect_format(target)
    if not is_table and wanted.kind != "lines":
        raise BatchError(f"{target}: lines in OpenAI's batch format need an output of lines; name a .jsonl file")
    if not is_table and detect_format(source).is_plain and wanted.is_plain:
        return StagedBatch(Path(source), Path(target))
    if is_table:
        check_columns(source, options)
    work = _work_dir(target, options)
    lines = work / "requests.jsonl"
    answers = work / "answers.jsonl"
    if not is_table and wanted.is_plain:
        answers = Path(target)
    elif exists(target) and not answers.exists():
        raise BatchError(f"{target} exists, and {work} holds no answers for it; move it away or name another output")
    before = _state(source)
    _write_lines(source, lines, options if is_table else None)

    def finish() -> None:
        if _state(source) != before:
            raise BatchError(f"{source} changed while it was answered; restore it and run the same command again")
        if is_table:
            with answers.open("rb") as file:
                write_answers(source, target, Answers(file, summarize_input(lines).last_line), options)
        elif answers != Path(target):
            with answers.open("rb") as file, open_output(target) as copy:
                shutil.copyfileobj(file, copy, 2**20)

    return StagedBatch(lines, answers, finish)


def _state(source: str) -> tuple[int, int] | None:
    """Returns size and modification time of a local file; None for a URL."""
    if detect_format(source).is_url:
        return None
    try:
        found = os.stat(source)
    except OSError as error:
        raise BatchError(f"{source}: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns


def _is_table(source: str, options: BatchOptions) -> bool:
    """Returns whether the input is a table; lines are one if a prompt column is named or the first has `messages`."""
    if detect_format(source).kind != "lines" or options.prompt_column is not None:
        return True
    if detect_format(source).is_plain and not Path(source).is_file():
        return False  # opening the journal raises the error
    with open_input(source) as file:
        _, first = next(numbered_lines(file), (0, None))
    if first is None:
        return False
    try:
        fields = msgspec.json.decode(first, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return MESSAGES in fields and "custom_id" not in fields


def _work_dir(target: str, options: BatchOptions) -> Path:
    if options.work_dir is None and detect_format(target).is_url:
        raise BatchError(f"{target} is not a local file; name a local directory for work in progress with --work_dir")
    work = Path(options.work_dir or f"{target}.work")
    try:
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BatchError(f"{work}: {error.strerror}") from error
    return work


def _write_lines(source: str, lines: Path, options: BatchOptions | None) -> None:
    """Writes the request lines of a table, or copies those of a compressed or remote file."""
    part = lines.with_name(f"{lines.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            if options is not None:
                file.writelines(requests(source, options))
            else:
                with open_input(source) as given:
                    shutil.copyfileobj(given, file, 2**20)
        os.replace(part, lines)
    except OSError as error:
        raise BatchError(f"{part}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
