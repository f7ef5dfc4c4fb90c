"""What a batch is made of: lines to answer and a journal, from lines or from tables (Parquet, CSV, lines of JSON).

A row becomes a request, and its answer columns of the table. `dsv3.map` does this in a notebook; Ray Data and DuckDB do
it with the recipes of examples/; this is one command that goes on after a kill and needs no cluster. Rows are read
twice, once to be asked and once to be written with their answers, and never held all together.
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

from dsv3.batch.formats import exists, format_of, need, reading, writing
from dsv3.batch.journal import MAX_LINE_BYTES, BatchError, answered_number, numbered_lines, summarize_input
from dsv3.batch.options import ANSWER_FIELDS, BatchOptions

MESSAGES = "messages"
_ROWS = 1024
_NO_PROMPT = "the row has no prompt"

Row = dict[str, Any]


def columns_of(name: str) -> list[str]:
    """Returns the names of a table's columns; those of lines are the keys of the first."""
    if format_of(name).kind == "lines":
        return list(next(rows_of(name), {}))
    with _reader(name) as reader:
        return list((reader.schema_arrow if _is_parquet(name) else reader.schema).names)


def rows_of(name: str) -> Iterator[Row]:
    """Yields the rows of a table; raises BatchError for lines that are no rows."""
    if format_of(name).kind == "lines":
        yield from _json_rows(name)
        return
    for batch in _record_batches(name):
        yield from batch.to_pylist()


def requests(name: str, options: BatchOptions) -> Iterator[bytes]:
    """Yields a batch line for each row, an empty one for a row without a prompt. Row i is line i, from 1."""
    fields = options.body or {}
    for number, row in enumerate(rows_of(name), 1):
        asked = _asked(row, options)
        if asked is None:
            yield b"\n"
            continue
        body = asked | fields
        line = {"custom_id": f"row-{number}", "method": "POST", "url": options.endpoint, "body": body}
        yield _encode(line, name, number) + b"\n"


def _asked(row: Row, options: BatchOptions) -> Row | None:
    """Returns what a row asks: a text, or the conversation of `messages` as a list or as JSON; None without any."""
    value = row.get(options.prompt_column or MESSAGES)
    if value is None:
        return None
    if options.prompt_column is None:
        return {"messages": _messages(value)}
    if options.endpoint == "/v1/completions":
        return {"prompt": value}
    return {"messages": [{"role": "user", "content": value}]}


def _messages(value: Any) -> Any:
    """Returns a conversation without the nulls that tables have in the place of absent fields.

    What is no conversation stays as it is: the server says what is wrong with it.
    """
    if isinstance(value, str):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def check_columns(name: str, options: BatchOptions) -> None:
    """Raises BatchError for a table that lacks what is asked, or has a column where an answer would go."""
    columns = columns_of(name)
    wanted = options.prompt_column or MESSAGES
    if columns and wanted not in columns:
        hint = "" if options.prompt_column else "; name the one to ask with --prompt_column"
        raise BatchError(f"{name}: there is no column {wanted!r} among {', '.join(columns)}{hint}")
    if taken := [column for column in options.answer_columns if column in columns]:
        raise BatchError(f"{name}: there is a column {taken[0]!r} already; choose another --answer_column")


class Answers:
    """The answers in a journal, found by the number of their line: 8 bytes of memory for each."""

    def __init__(self, path: Path, last_line: int):
        self._file = path.open("rb")
        self._places = array.array("q", bytes(8 * (last_line + 1)))
        place = 1  # 0 says that there is none
        for line in self._file:
            self._places[answered_number(line)] = place
            place += len(line)

    def columns(self, number: int) -> tuple[Any, ...]:
        """Returns answer, reasoning, finish reason, error, prompt tokens and completion tokens of a line."""
        place = self._places[number] if number < len(self._places) else 0
        if not place:
            return (None, None, None, _NO_PROMPT, None, None)
        self._file.seek(place - 1)
        return _columns(msgspec.json.decode(self._file.readline(), type=_Output))

    def close(self) -> None:
        """Closes the journal."""
        self._file.close()


class _OutputMessage(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class _OutputChoice(msgspec.Struct):
    message: _OutputMessage | None = None
    text: str | None = None
    finish_reason: str | None = None


class _OutputUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _OutputError(msgspec.Struct):
    message: str = ""


class _Body(msgspec.Struct):
    choices: list[_OutputChoice] = []
    usage: _OutputUsage | None = None
    error: _OutputError | None = None


class _OutputResponse(msgspec.Struct):
    status_code: int
    body: _Body


class _Output(msgspec.Struct):
    response: _OutputResponse | None = None
    error: _OutputError | None = None


def _columns(output: _Output) -> tuple[Any, ...]:
    if output.response is None or output.response.status_code != 200 or not output.response.body.choices:
        error = output.error or (output.response.body.error if output.response is not None else None)
        return (None, None, None, error.message if error is not None else "no answer", None, None)
    choice, usage = output.response.body.choices[0], output.response.body.usage or _OutputUsage()
    message = choice.message or _OutputMessage()
    text = choice.text if choice.message is None else message.content
    if text is None and message.tool_calls is not None:
        text = bytes(message.tool_calls).decode()
    tokens = (usage.prompt_tokens, usage.completion_tokens)
    return (text, message.reasoning_content, choice.finish_reason, None, *tokens)


def write_answers(source: str, target: str, answers: Answers, options: BatchOptions) -> None:
    """Writes the rows of `source` with their answers to `target`, in their order; raises BatchError."""
    with writing(target) as file:
        if format_of(target).kind == "lines":
            for number, row in enumerate(rows_of(source), 1):
                found = dict(zip(options.answer_columns, answers.columns(number), strict=True))
                file.write(_encode(row | found, source, number) + b"\n")
        else:
            _write_batches(source, target, file, answers, options)


def _write_batches(source: str, target: str, file: BinaryIO, answers: Answers, options: BatchOptions) -> None:
    arrow = need("pyarrow")
    kinds = [arrow.string()] * (len(ANSWER_FIELDS) - 1) + [arrow.int64()] * 2
    batches = _text_batches(source) if format_of(source).kind == "lines" else _record_batches(source)
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
        return need("pyarrow.parquet").ParquetWriter(file, schema)
    return need("pyarrow.csv").CSVWriter(file, schema)


def _flat(batch: Any) -> Any:
    """Returns a batch whose nested columns are JSON, as CSV needs them."""
    arrow = need("pyarrow")
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
            if batch.num_rows:
                empty = False
                yield batch
        if empty:
            schema = reader.schema_arrow if _is_parquet(name) else reader.schema
            yield need("pyarrow").RecordBatch.from_pylist([], schema=schema)


@contextlib.contextmanager
def _reader(name: str) -> Iterator[Any]:
    """Opens a table; the columns of CSV are text, whatever they look like."""
    if _is_parquet(name):
        with reading(name) as file:
            yield need("pyarrow.parquet").ParquetFile(file)
        return
    csv, text = need("pyarrow.csv"), need("pyarrow").string()
    parse = csv.ParseOptions(newlines_in_values=True)
    with reading(name) as file:
        names = csv.open_csv(file, parse_options=parse).schema.names
    convert = csv.ConvertOptions(
        column_types=dict.fromkeys(names, text),
        strings_can_be_null=True,
        null_values=[""],
        quoted_strings_can_be_null=False,
    )
    with reading(name) as file:
        yield csv.open_csv(file, parse_options=parse, convert_options=convert)


def _json_rows(name: str) -> Iterator[Row]:
    with reading(name) as file:
        for number, line in numbered_lines(file):
            if line is None:
                raise BatchError(f"{name}: line {number} is longer than {MAX_LINE_BYTES} bytes")
            try:
                yield msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"), type=dict[str, Any])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise BatchError(f"{name}: line {number} is not a JSON object: {error}") from None


def _text_batches(name: str) -> Iterator[Any]:
    """Yields rows of JSON as text columns, what is no text as JSON: their types may differ from row to row."""
    arrow = need("pyarrow")
    columns: dict[str, None] = {}
    for row in rows_of(name):
        columns.update(dict.fromkeys(row))
    schema = arrow.schema([(column, arrow.string()) for column in columns])
    for rows in itertools.batched(rows_of(name), _ROWS):
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
    return format_of(name).kind == "parquet"


def _nothing() -> None:
    """Does nothing: the journal is the output."""


@dataclasses.dataclass(frozen=True)
class Staged:
    """`lines` are to be answered and `answers` is the journal; `finish` makes the output once all are answered."""

    lines: Path
    answers: Path
    finish: Callable[[], None] = _nothing


def stage(source: str, target: str, options: BatchOptions) -> Staged:
    """Prepares a batch; the same input and options give the same lines, so that an interrupted one goes on.

    Raises BatchError where input, output or options do not fit each other.
    """
    is_table = _is_table(source, options)
    if not is_table and format_of(target).kind != "lines":
        raise BatchError(f"{target}: lines in OpenAI's batch format are answered by lines; name a .jsonl file")
    if not is_table and format_of(source).is_plain and format_of(target).is_plain:
        return Staged(Path(source), Path(target))
    if is_table:
        check_columns(source, options)
    work = _work_dir(target, options)
    lines = work / "requests.jsonl"
    answers = work / "answers.jsonl"
    if not is_table and format_of(target).is_plain:
        answers = Path(target)
    elif exists(target) and not answers.exists():
        raise BatchError(f"{target} exists, and {work} holds no answers for it; move it away or name another output")
    before = _state(source)
    _write_lines(source, lines, options if is_table else None)

    def finish() -> None:
        if _state(source) != before:
            raise BatchError(f"{source} changed while it was answered; restore it and run the same command again")
        if is_table:
            _finish_table(source, target, lines, answers, options)
        elif answers != Path(target):
            _copy(answers, target)

    return Staged(lines, answers, finish)


def _state(source: str) -> tuple[int, int] | None:
    """Returns size and time of a local file; a URL has neither that costs nothing."""
    if format_of(source).is_url:
        return None
    try:
        found = os.stat(source)
    except OSError as error:
        raise BatchError(f"{source}: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns


def _is_table(source: str, options: BatchOptions) -> bool:
    """Returns whether the input has rows to ask: lines of JSON do if a column is named or the first has `messages`."""
    if format_of(source).kind != "lines" or options.prompt_column is not None:
        return True
    if format_of(source).is_plain and not Path(source).is_file():
        return False  # the journal says what is wrong
    with reading(source) as file:
        _, first = next(numbered_lines(file), (0, None))
    if first is None:
        return False
    try:
        fields = msgspec.json.decode(first, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return MESSAGES in fields and "custom_id" not in fields


def _work_dir(target: str, options: BatchOptions) -> Path:
    if options.work_dir is None and format_of(target).is_url:
        raise BatchError(f"{target} is no local file; name a local directory for what is on its way with --work_dir")
    work = Path(options.work_dir or f"{target}.work")
    try:
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BatchError(f"{work}: {error.strerror}") from error
    return work


def _write_lines(source: str, lines: Path, options: BatchOptions | None) -> None:
    """Writes the requests of a table, or the lines of a file that cannot be read in its place."""
    part = lines.with_name(f"{lines.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            if options is not None:
                file.writelines(requests(source, options))
            else:
                with reading(source) as given:
                    shutil.copyfileobj(given, file, 2**20)
        os.replace(part, lines)
    except OSError as error:
        raise BatchError(f"{part}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def _finish_table(source: str, target: str, lines: Path, answers: Path, options: BatchOptions) -> None:
    found = Answers(answers, summarize_input(lines).last_line)
    with contextlib.closing(found):
        write_answers(source, target, found, options)


def _copy(answers: Path, target: str) -> None:
    with answers.open("rb") as file, writing(target) as copy:
        shutil.copyfileobj(file, copy, 2**20)
