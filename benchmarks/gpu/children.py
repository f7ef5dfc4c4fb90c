"""Measures the rows of tables in child processes with time limits: one bad kernel costs one row.

A process starts in some 5 s, and a case takes 2: so a child measures up to eight rows of one table, one after the
other, and prints each as it is there. A row that raises is a failed row, and the next one is measured. Within the child
each row has a time limit; where one hangs or crashes the child, it fails by name, and another child goes on behind it.
The tables are written anew after each child. The parent never touches a device, whose memory is the children's.
"""

import argparse
import datetime
import faulthandler
import itertools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.record import Report, Table, rounded
from dsv3.processes.child import ChildResult, run_limited
from pallas_kernels import aot
from pallas_kernels.backend import is_hopper, prepare, resolve_backend
from pallas_kernels.checks.case import ContextLostError, Row
from tools.doctor.rates import Roofs, measure_roofs

AT_ONCE = 8
"""Rows of a child."""
_START_S = 60.0
ROOFS = "roofs"
type Key = tuple[str, str]
"""Table and name of a row."""


def main(
    report: Report,
    module: str,
    title: str,
    keys: Sequence[Key],
    measure: Callable[[Key, Roofs], Row],
    programs: Callable[[], Iterator[tuple[str, Callable[..., Any], tuple]]],
) -> int:
    """Runs a benchmark, or as its child some rows of it, or compiles its programs; returns the exit status.

    Args:
      report: gets the tables of a run.
      module: `benchmarks.gpu.x`, for the command and the files.
      title: what the help says.
      keys: the rows, most important first; a run short of time leaves the last ones out.
      measure: (key, roofs) -> the row; called in a child alone.
      programs: what `--compile` compiles, (name, function, shapes).
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=title)
    name = module.rpartition(".")[2]
    parser.add_argument("--out", type=Path, default=Path("runs") / name, help="folder for the tables")
    parser.add_argument("--minutes", type=float, default=8.5, help="time limit; later rows are left out, and said so")
    parser.add_argument("--seconds", type=float, default=60, help="time limit of a row")
    parser.add_argument("--compile", action="store_true", help="compile for an H200 and gate its kernels' resources")
    parser.add_argument("--rows", help=argparse.SUPPRESS)  # a child's: JSON of its keys
    parser.add_argument("--roofs", help=argparse.SUPPRESS)  # a child's: JSON of what has been measured
    args = parser.parse_args()
    if args.compile:
        return gate_resources(programs())
    if args.rows:
        return _measure_here(json.loads(args.rows), json.loads(args.roofs), args.seconds, measure)
    command = [sys.executable, "-m", module, "--seconds", str(args.seconds)]
    said = f"python -m {module} {shlex.join(sys.argv[1:])}"
    run = Run(args.out / name, said)
    status = measure_all(run, command, keys, args.seconds, time.monotonic() + 60 * args.minutes)
    for table in run.tables():
        report.table(table.title, table.columns, table.rows)
    return status


def measure_all(run: "Run", command: Sequence[str], keys: Sequence[Key], seconds: float, deadline: float) -> int:
    """Measures the roofs and then the rows in children of `command`; writes the files of `run` after each child."""
    roofs = _child(command, [(ROOFS, ROOFS)], {}, seconds, math.inf)
    rows, ended = _printed(roofs), roofs
    if ROOFS not in rows or not rows[ROOFS].passed:
        print(ended.log, rows.get(ROOFS, Row(ROOFS, False)).says or f"the roofs: {ended.cause}", file=sys.stderr)
        return 2 if ended.status == 2 else 1
    run.begin(rows[ROOFS])
    for group in _groups(keys):
        _measure_group(command, group, run, seconds, deadline)
    return 0 if all(row.passed for _, row in run.rows) else 1


def _measure_group(command: Sequence[str], group: list[Key], run: "Run", seconds: float, deadline: float) -> None:
    while group:
        if deadline - time.monotonic() < _START_S / 2:
            run.left_out += [": ".join(key) for key in group]
            run.write()
            return
        ended = _child(command, group, run.roofs.figures, seconds, deadline - time.monotonic() + _START_S)
        rows = _printed(ended)
        while group and (row := rows.get(": ".join(group[0]))):
            run.rows.append((group.pop(0), row))
        if group and ended.status != _LOST:
            last = (ended.log.strip().splitlines() or [""])[-1]
            says = f"ended its process: {'took too long' if _OVERDUE in ended.log else ended.cause}; {last[:200]}"
            key = group.pop(0)
            run.rows.append((key, Row(": ".join(key), False, says)))
        run.write()


_LOST = 3  # a child's exit status after a row, which it has printed, that has cost it the device
_OVERDUE = "Timeout ("  # how faulthandler begins


def _measure_here(keys: list, roofs: Roofs, seconds: float, measure: Callable[[Key, Roofs], Row]) -> int:
    for table, name in keys:
        faulthandler.dump_traceback_later(seconds, exit=True)  # a thread that no kernel or lock holds up
        where, lost = f"{table}: {name}", False
        try:
            row = roofs_here() if table == ROOFS else measure((table, name), roofs)
        except ContextLostError as error:
            row, lost = Row(where, False, f"the device's context is gone: {error}"), True
        except Exception as error:  # the next row is measured
            row = Row(where, False, f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        print(json.dumps(Row(where, row.passed, row.says, row.figures).as_json()), flush=True)
        if lost:
            return _LOST
    faulthandler.cancel_dump_traceback_later()
    return 0


def _child(command: Sequence[str], keys: Sequence[Key], roofs: Roofs, seconds: float, left: float) -> ChildResult:
    words = ["--rows", json.dumps(keys), "--roofs", json.dumps(dict(roofs))]
    return run_limited([*command, *words], min(_START_S + seconds * len(keys), max(left, _START_S)))


def _printed(ended: ChildResult) -> dict[str, Row]:
    """Returns the rows that a child has printed, by their names; a line that is no whole row is none."""
    rows = {}
    for line in ended.output.splitlines():
        if line.startswith("{"):
            try:
                row = Row(**json.loads(line))
            except (ValueError, TypeError):
                continue
            rows[row.case.removeprefix(f"{ROOFS}: ")] = row
    return rows


def _groups(keys: Sequence[Key]) -> list[list[Key]]:
    """Returns the keys in order, at most AT_ONCE of one table together."""
    tables = (list(found) for _, found in itertools.groupby(keys, key=lambda key: key[0]))
    return [list(some) for table in tables for some in itertools.batched(table, AT_ONCE)]


class Run:
    """The tables of a run, in `file`.md and `file`.json: a column for each figure of a table's rows."""

    def __init__(self, file: Path, command: str):
        self.file, self._command = file, command
        self.roofs, self.rows = Row(ROOFS, False), list[tuple[Key, Row]]()
        self.left_out: list[str] = []

    def begin(self, roofs: Row) -> None:
        """Notes what the device does without kernels of ours, and writes the files."""
        self.roofs, self._began = roofs, datetime.datetime.now(datetime.UTC)
        self.write()

    def tables(self) -> Iterator[Table]:
        """Yields the roofs, and the rows by table."""
        if self.roofs.figures:
            yield Table("Roofs, measured in this run", ["device", *self.roofs.figures], [
                [self.roofs.says, *map(rounded, self.roofs.figures.values())]
            ])  # fmt: skip
        for title in dict.fromkeys(table for (table, _), _ in self.rows):
            rows = [(name, row) for (of, name), row in self.rows if of == title]
            columns = list(dict.fromkeys(figure for _, row in rows for figure in row.figures))
            says = ("" if row.passed else f"WRONG: {row.says}".replace("|", "/") for _, row in rows)
            cells = ([name, *(rounded(row.figures.get(each)) for each in columns)] for name, row in rows)
            found = [[*first, last] for first, last in zip(cells, says, strict=True)]
            yield Table(title, ["case", *columns, "says"], found)

    def write(self) -> None:
        """Writes the tables as they are now."""
        lines = [f"{self._began:%Y-%m-%d %H:%M UTC}; {self.roofs.says}", f"command: {self._command}", ""]
        for table in self.tables():
            lines += [f"## {table.title}", "", *table.lines(), ""]
        lines += ["Left out for lack of time: " + what for what in self.left_out]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.with_suffix(".md").write_text("\n".join(lines) + "\n")
        rows = [{"table": table, "name": name} | row.as_json() for (table, name), row in self.rows]
        record = {"command": self._command, "roofs": dict(self.roofs.figures), "left_out": self.left_out, "rows": rows}
        self.file.with_suffix(".json").write_text(json.dumps(record, indent=1))


def roofs_here() -> Row:
    """Measures the device's roofs; in a child alone. Raises SystemExit with status 2 where there is no Hopper GPU."""
    device = jax.devices()[0]
    if not is_hopper(device):
        print("Without a Hopper GPU, --compile checks registers and spills.", file=sys.stderr)
        print(f"This needs a Hopper GPU (sm_90), and the device here is {device.device_kind!r}", file=sys.stderr)
        raise SystemExit(2)
    prepare(resolve_backend(device))
    says = f"{device.device_kind}; jax {jax.__version__}; {' '.join(device.client.platform_version.split())}"
    return Row(ROOFS, True, says, measure_roofs())


def gate_resources(programs: Iterator[tuple[str, Callable[..., Any], tuple]]) -> int:
    """Compiles (name, function, shapes) for an H200, prints registers and spills; returns 1 if a kernel spills."""
    spilled = 0
    for name, call, shapes in programs:
        compiled, kernels = aot.compile_with_resources(call, *shapes)
        for kernel in kernels:
            spilled += kernel.spill_bytes > 0
            print(f"{name}: {kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled")
        print(f"{name}: {compiled.memory_analysis().temp_size_in_bytes / 1e6:.0f} MB of temporaries", flush=True)
    print(f"{spilled} kernels spill")
    return 1 if spilled else 0
