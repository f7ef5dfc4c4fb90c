"""Measures the rows of tables in child processes with time limits: one bad kernel costs one row.

A process starts in some 5 s, and a case takes 2: so a child measures up to eight rows of one table, one after the
other, and prints each as it is there. A row that raises is a failed row, and the next one is measured. Within the child
each row has a time limit; where one hangs or crashes the child, it fails by name, and another child goes on behind it.
A table is printed once its rows are measured. The parent never touches a device, whose memory is the children's.
"""

import faulthandler
import itertools
import json
import math
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from benchmarks.record import Report, parser_of
from dsv3.processes.child import ChildResult, run_limited
from pallas_kernels import aot
from pallas_kernels.backend import Backend, is_hopper, prepare, resolve_backend
from pallas_kernels.checks import Case, Row
from pallas_kernels.checks.case import ContextLostError
from tools.doctor.rates import Roofs, measure_case, measure_roofs
from tools.doctor.rows import CaseResult, read_rows
from tools.sass.kernels import program_of

AT_ONCE = 8
"""Rows of a child."""
_START_S = 60.0
_LOST = 3  # a child's exit status after a row, which it has printed, that has cost it the device
_OVERDUE = "Timeout ("  # how faulthandler begins
type Key = tuple[str, str]
"""Table and name of a row."""
ROOFS: Key = ("roofs", "roofs")


def main(
    report: Report,
    module: str,
    doc: str | None,
    cases: Mapping[Key, Case],
    compiled: Mapping[Key, Case],
    measure: Callable[[Case, Roofs, Backend], Row] = measure_case,
) -> int:
    """Runs a benchmark, or as its child some rows of it, or compiles its programs; returns the exit status.

    `cases` are the rows, most important first: a run short of time leaves the last ones out. `measure` is called in a
    child alone. `compiled` are those that `--compile` compiles.
    """
    parser = parser_of(doc)
    parser.add_argument("--minutes", type=float, default=8.5, help="time limit; later rows are left out, and said so")
    parser.add_argument("--seconds", type=float, default=60, help="time limit of a row")
    parser.add_argument("--compile", action="store_true", help="compile for an H200 and gate its kernels' resources")
    parser.add_argument("--rows", type=json.loads, help="those that a child measures")
    parser.add_argument("--roofs", type=json.loads, help="as they have been measured, for a child")
    args = parser.parse_args()
    if args.compile:
        return gate_resources(compiled)
    if args.rows:
        return _measure_here(
            map(tuple, args.rows), args.seconds, lambda key: measure(cases[key], args.roofs, Backend.MOSAIC)
        )
    command = [sys.executable, "-m", module, "--seconds", str(args.seconds)]
    return measure_all(report, command, list(cases), args.seconds, time.monotonic() + 60 * args.minutes)


def measure_all(report: Report, command: Sequence[str], keys: Sequence[Key], seconds: float, deadline: float) -> int:
    """Measures the roofs and then the rows in children of `command`, and reports each table."""
    ended, rows = _child(command, [ROOFS], {}, seconds, math.inf)
    roofs = rows.get(ROOFS)
    if roofs is None or not roofs.passed:
        print(ended.log, roofs.says if roofs else f"the roofs: {ended.cause}", file=sys.stderr)
        return 2 if ended.status == 2 else 1
    report.table("Roofs, measured in this run", ["device", *roofs.figures], [[roofs.says, *roofs.figures.values()]])
    passed = True
    for table, group in itertools.groupby(keys, key=operator.itemgetter(0)):
        found = [
            (name, row)
            for some in itertools.batched(group, AT_ONCE)
            for (_, name), row in _rows(command, list(some), roofs.figures, seconds, deadline)
        ]
        columns = list(dict.fromkeys(figure for _, row in found for figure in row.figures))
        lines = ([name, *map(row.figures.get, columns), _verdict(row)] for name, row in found)
        report.table(table, ["case", *columns, "says"], lines)
        passed &= all(row.passed for _, row in found)
    return 0 if passed else 1


def _verdict(row: CaseResult) -> str:
    return row.says if row.passed else f"WRONG: {row.says}".replace("|", "/")


def _rows(
    command: Sequence[str], group: list[Key], roofs: Roofs, seconds: float, deadline: float
) -> Iterator[tuple[Key, CaseResult]]:
    while group:
        left = deadline - time.monotonic()
        if left < _START_S / 2:
            yield from ((key, CaseResult("", True, "left out: --minutes are over")) for key in group)
            return
        ended, rows = _child(command, group, roofs, seconds, left + _START_S)
        while group and group[0] in rows:
            yield group[0], rows[group.pop(0)]
        if group and ended.status != _LOST:
            last = (ended.log.strip().splitlines() or [""])[-1]
            cause = "took too long" if _OVERDUE in ended.log else ended.cause
            yield group.pop(0), CaseResult("", False, f"ended its process: {cause}; {last[:200]}")


def _child(
    command: Sequence[str], keys: Sequence[Key], roofs: Roofs, seconds: float, left: float
) -> tuple[ChildResult, dict[Key, CaseResult]]:
    """Returns how a child has ended, and the rows that it has printed."""
    words = ["--rows", json.dumps(keys), "--roofs", json.dumps(dict(roofs))]
    ended = run_limited([*command, *words], min(_START_S + seconds * len(keys), max(left, _START_S)))
    printed = {row.case: row for row in read_rows(ended.output)[0]}
    return ended, {key: printed[": ".join(key)] for key in keys if ": ".join(key) in printed}


def _measure_here(keys: Iterator[Key], seconds: float, measure: Callable[[Key], Row]) -> int:
    for key in keys:
        faulthandler.dump_traceback_later(seconds, exit=True)  # a thread that no kernel or lock holds up
        status, where = 0, ": ".join(key)
        try:
            row = roofs_here() if key == ROOFS else measure(key)
        except ContextLostError as error:
            status, row = _LOST, Row(where, False, f"the device's context is gone: {error}")
        except Exception as error:  # the next row is measured
            row = Row(where, False, f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        print(json.dumps(row.as_json() | {"case": where}), flush=True)
        if status:
            return status
    faulthandler.cancel_dump_traceback_later()
    return 0


def roofs_here() -> Row:
    """Measures the device's roofs; in a child alone. Raises SystemExit with status 2 where there is no Hopper GPU."""
    device = jax.devices()[0]
    if not is_hopper(device):
        print("Without a Hopper GPU, --compile checks registers and spills.", file=sys.stderr)
        print(f"This needs a Hopper GPU (sm_90), and the device here is {device.device_kind!r}", file=sys.stderr)
        raise SystemExit(2)
    prepare(resolve_backend(device))
    says = f"{device.device_kind}; jax {jax.__version__}; {' '.join(device.client.platform_version.split())}"
    return Row("", True, says, measure_roofs())


def gate_resources(cases: Mapping[Key, Case]) -> int:
    """Compiles cases for an H200, prints registers and spills; returns 1 if a kernel spills."""
    spilled = 0
    for key, case in cases.items():
        call, shapes = program_of(case)
        compiled, kernels = aot.compile_with_resources(call, *shapes)
        megabytes = compiled.memory_analysis().temp_size_in_bytes / 1e6
        print(f"{': '.join(key)}: {megabytes:.0f} MB of temporaries", flush=True)
        for kernel in kernels:
            spilled += kernel.spill_bytes > 0
            print(f"  {kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled")
    print(f"{spilled} kernels spill")
    return 1 if spilled else 0
