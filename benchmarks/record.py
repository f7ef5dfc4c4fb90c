"""The tables of a benchmark: printed by all benchmarks in one way, and kept as its result with `--record`.

    python -m benchmarks.NAME [ARGUMENTS] --record            writes benchmarks/results/NAME.json
    python -m benchmarks.NAME [ARGUMENTS] --record=CASE       writes benchmarks/results/NAME-CASE.json

A result has the command with the environment that it was started with, the commit, the machine, versions, the date, and
whether the machine was otherwise idle. `python -m benchmarks.pages` writes the pages of docs/performance from results.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import inspect
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
VERSIONS = ("jax", "jaxlib")
_SHOWN_ENVIRONMENT = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "UCX_TLS", "GLIBC_TUNABLES")
_QUIET_PERCENT = 15.0  # of all cores, in use by others while the benchmark has not begun

Cell = str | int | float | None


@dataclasses.dataclass
class Table:
    """Rows of values under named columns; a column's name ends with its unit. None is an empty cell."""

    title: str
    columns: list[str]
    rows: list[list[Cell]] = dataclasses.field(default_factory=list)

    def head(self) -> str:
        """Returns the first two lines in Markdown."""
        return f"| {' | '.join(self.columns)} |\n{'|---' * len(self.columns)}|"

    def lines(self) -> list[str]:
        """Returns the table in Markdown."""
        return [*self.head().splitlines(), *map(line_of, self.rows)]


class Report:
    """What a benchmark has measured so far. It prints each row of a table as soon as it is there."""

    def __init__(self) -> None:
        self.tables: list[Table] = []

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
        """Adds a table and prints it; raises ValueError for a row that does not have a cell per column."""
        self.tables.append(self.detail(title, columns, rows))
        return self.tables[-1]

    def detail(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
        """Prints a table that is not kept, because it only explains others. Raises as `table` does."""
        table = Table(title, list(columns))
        print(f"\n{title}\n\n{table.head()}", flush=True)
        for row in rows:
            if len(row) != len(table.columns):
                raise ValueError(f"{title}: {list(row)} is no row of the columns {table.columns}")
            table.rows.append([rounded(cell) for cell in row])
            print(line_of(table.rows[-1]), flush=True)
        return table


def rounded(cell: Any) -> Cell:
    """Returns a cell as it is kept: five significant digits of a number that is not whole."""
    if isinstance(cell, float | np.floating):
        return float(f"{cell:.5g}")
    return int(cell) if isinstance(cell, np.integer) else cell


def shown(cell: Cell) -> str:
    """Returns a cell as it is printed: three significant digits, and all digits of whole numbers."""
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return "" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell


def line_of(row: Sequence[Cell]) -> str:
    """Returns a row of a table in Markdown."""
    return f"| {' | '.join(shown(cell) for cell in row)} |"


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Returns the median of some values, and the least and the largest of them."""
    each = [float(value) for value in values]
    return f"{statistics.median(each):.{digits}f} ({min(each):.{digits}f} to {max(each):.{digits}f})"


def elapsed(work: Callable[[], object]) -> float:
    """Returns how long `work()` takes, in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose `--help` is a benchmark's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def arguments(doc: str | None, /, **defaults: Any) -> argparse.Namespace:
    """Reads the command line, with a flag for each keyword; `doc`, its `--help`, says what each means.

    A flag has the type of its default; False is a switch, a tuple or list takes several values (of `[]`: texts), None
    a text, and a type a value of that type or None. Words are joined by "_" or "-".
    """
    parser = parser_of(doc)
    for name, default in defaults.items():
        flags = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        if default is False:
            parser.add_argument(*flags, action="store_true")
        elif isinstance(default, tuple | list):
            parser.add_argument(*flags, nargs="+", type=type(next(iter(default), "")), default=list(default))
        elif isinstance(default, type) or default is None:
            parser.add_argument(*flags, type=default or str)
        else:
            parser.add_argument(*flags, type=type(default), default=default)
    return parser.parse_args()


def run(main: Callable[[Report], int | None]) -> NoReturn:
    """Runs a benchmark and exits with its status; with `--record` it writes the result, if there is one."""
    case = _take_record_flag()
    quiet = case is not None and is_quiet()
    report, started = Report(), time.monotonic()
    status = main(report)
    if case is not None and status in (None, 0, 1) and report.tables:
        write(report, inspect.getmodule(main), case, quiet, time.monotonic() - started)
    sys.exit(status)


def _take_record_flag() -> str | None:
    """Removes `--record` from the arguments; returns its case, "" for none, and None where it is not given."""
    found = [each for each in sys.argv[1:] if each == "--record" or each.startswith("--record=")]
    sys.argv[1:] = [each for each in sys.argv[1:] if each not in found]
    return found[-1].removeprefix("--record").removeprefix("=") if found else None


def is_quiet() -> bool:
    """Returns whether the machine has nothing else to do; takes a second."""
    return psutil.cpu_percent(interval=1.0) < _QUIET_PERCENT


def write(report: Report, module: Any, case: str, quiet: bool, seconds: float) -> Path:
    """Writes the result of the benchmark in `module`."""
    name = module.__spec__.name.removeprefix("benchmarks.").removesuffix(".__main__")
    environment = [f"{key}={shlex.quote(os.environ[key])}" for key in _SHOWN_ENVIRONMENT if key in os.environ]
    command = " ".join([*environment, "python", "-m", f"benchmarks.{name}", *map(shlex.quote, sys.argv[1:])])
    versions = {"python": platform.python_version()} | {each: importlib.metadata.version(each) for each in VERSIONS}
    result = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions,
        "quiet": quiet,
        "seconds": round(seconds),
        "tables": [dataclasses.asdict(table) for table in report.tables],
    }
    path = RESULTS / f"{name}{f'-{case}' if case else ''}.json"
    path.write_text(encode(result))
    print(f"\nwritten: {path.relative_to(ROOT)}")
    return path


def encode(result: dict[str, Any]) -> str:
    """Returns a result as JSON with a line per row, so that a change is seen in a diff."""
    tables = result["tables"]
    text = json.dumps(result | {"tables": []}, indent=1, ensure_ascii=False).removesuffix("[]\n}")
    parts = []
    for table in tables:
        rows = ",\n   ".join(json.dumps(row, ensure_ascii=False) for row in table["rows"])
        title, columns = (json.dumps(table[key], ensure_ascii=False) for key in ("title", "columns"))
        parts.append(f'  {{"title": {title},\n   "columns": {columns},\n   "rows": [\n   {rows}]}}')
    return f"{text}[\n" + ",\n".join(parts) + "\n ]\n}\n"


def commit() -> str:
    """Returns the commit that was measured, with a + behind it where files differ that are no results."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True).stdout
    others = [":!benchmarks/results", ":!docs"]
    differs = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", *others]).returncode
    return head.strip() + ("+" if differs else "")


def machine() -> str:
    """Returns processor, cores, memory and GPUs of this machine."""
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    gpus = "no GPU"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpus = "; ".join(subprocess.run(query, capture_output=True, text=True).stdout.split("\n")).strip("; ") or gpus
    return f"{cpu}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB, {gpus}"
