"""`dsv3.map`: adds a model's answers to a table, in a notebook.

import dsv3
table = dsv3.map(table, "prompt", llm=llm)
"""

from collections.abc import Sequence
from typing import Any

from dsv3.batch.formats import require_module
from dsv3.llm import LLM, RequestOutput, release_on_error
from dsv3.sampling_params import SamplingParams


@release_on_error
def map[T](
    table: T,
    column: str = "prompt",
    *,
    llm: LLM,
    sampling_params: SamplingParams | None = None,
    into: str = "answer",
    raw: bool = False,
) -> T:
    """Returns `table` with the model's answers to its `column` in new columns `into` and `into`_error.

    The table is a pyarrow Table, a pandas or polars DataFrame, or a list of mappings; the result has the same type and
    order. A cell is a user's message, or a conversation as a list of messages; with `raw` it is text to continue. A
    null has no answer. A row that fails, for example because it is too long, has the reason in `into`_error and stops
    no other. Rows with a common prefix run one after the other, to share cached pages. `sampling_params` default to the
    model's.

    Raises KeyError for a missing column, ValueError for an existing output column, TypeError for another type of table,
    BatchError where the extra `batch` is missing (not needed for lists), ValueError for a model without a tokenizer, or
    without a chat template unless `raw`.
    """
    cells = _column(table, column)
    error = f"{into}_error"
    for name in (into, error):
        if name in _names(table):
            raise ValueError(f"into: the table already has a column {name!r}; choose another name")
    texts: list[str | None] = [None] * len(cells)
    errors: list[str | None] = [None] * len(cells)
    asked = sorted((i for i, cell in enumerate(cells) if cell is not None), key=lambda i: repr(cells[i]))
    for i, output in zip(asked, _ask([cells[i] for i in asked], llm, sampling_params, raw), strict=True):
        answer = output.outputs[0]
        texts[i], errors[i] = (None, answer.error) if answer.finish_reason == "error" else (answer.text, None)
    return _with_columns(table, {into: texts, error: errors})


def _ask(cells: Sequence[Any], llm: LLM, params: SamplingParams | None, raw: bool) -> list[RequestOutput]:
    if not cells:
        return []
    if raw:
        return llm.generate([str(cell) for cell in cells], params, errors="return")
    return llm.chat([_conversation(cell) for cell in cells], params, errors="return")


def _conversation(cell: Any) -> Any:
    """Returns a cell as a conversation; other values stay as they are, and are refused later."""
    if isinstance(cell, str):
        return [{"role": "user", "content": cell}]
    if isinstance(cell, dict):
        cell = [cell]
    if not hasattr(cell, "__iter__"):
        return cell
    return [
        {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else message
        for message in cell
    ]


def _is_pandas(table: Any) -> bool:
    return type(table).__module__.partition(".")[0] == "pandas"


def _arrow(table: Any) -> Any:
    if not hasattr(table, "__arrow_c_stream__"):
        raise TypeError(f"table: a {type(table).__name__} is not a pyarrow Table, DataFrame or list of mappings")
    return require_module("pyarrow").table(table)


def _names(table: Any) -> list[str]:
    if isinstance(table, list):
        return list(dict.fromkeys(name for row in table for name in row))
    return list(table.columns) if _is_pandas(table) else _arrow(table).column_names


def _column(table: Any, name: str) -> list[Any]:
    if name not in _names(table):
        raise KeyError(f"column: there is no {name!r} among {', '.join(str(each) for each in _names(table))}")
    if isinstance(table, list):
        return [row.get(name) for row in table]
    if _is_pandas(table):
        return [None if _is_missing(cell) else cell for cell in table[name]]
    return _arrow(table).column(name).to_pylist()


def _is_missing(cell: Any) -> bool:
    return cell is None or (not isinstance(cell, str | list | tuple) and bool(cell != cell))


def _with_columns(table: Any, columns: dict[str, list[str | None]]) -> Any:
    if isinstance(table, list):
        return [row | {name: values[i] for name, values in columns.items()} for i, row in enumerate(table)]
    if _is_pandas(table):
        return table.assign(**columns)
    arrow = require_module("pyarrow")
    found = _arrow(table)
    for name, values in columns.items():
        found = found.append_column(name, arrow.array(values, arrow.string()))
    return found if isinstance(table, arrow.Table) else type(table)(found)
