"""Which toolchains compile the kernels and steps, and what spills with each: a matrix that needs no GPU.

    python -m benchmarks.toolchains DIR [--column NAME ...] [--part NAME ...]

Makes a virtual environment for each column below DIR, which lies outside of the tree. A column is a release of jax, its
CUDA 12 or 13 plugin and a ptxas; the machine's own CUDA toolkit is hidden from it. What DIR has already is not run
again: remove DIR/results/COLUMN-PART.json to run a part anew. Exits with 1 if a case failed, 2 if a part could not be
tried. A column takes 11 minutes of two cores.
"""

import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import Cell, Report, commit, parser_of, run
from benchmarks.toolchains import columns
from benchmarks.toolchains.cases import PARTS
from benchmarks.toolchains.columns import COLUMNS, ROOT, Column, ToolchainsError
from dsv3.processes.child import ChildResult, run_limited

_PART_SECONDS = 1800
_NO = "not run"
_GROUPS = {"kernels": ("mosaic", "triton"), "steps": ("steps",), "executables": ("executables",)}
type Results = Mapping[str, Mapping[str, Any]]
"""What was found, by column and part."""


def main(report: Report) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="for environments and results, outside of the tree")
    parser.add_argument("--column", action="append", choices=[column.name for column in COLUMNS], help="all by default")
    parser.add_argument("--part", action="append", choices=PARTS, help="all but toy by default")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if folder.is_relative_to(ROOT):
        parser.error(f"{folder} is inside of the repository; choose a folder elsewhere")
    (folder / "results").mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {column.name: {} for column in COLUMNS}
    untried = 0
    for part, column in itertools.product(PARTS, COLUMNS):
        file = folder / "results" / f"{column.name}-{part}.json"
        asked = part in (args.part or set(PARTS) - {"toy"}) and column.name in (args.column or results)
        try:
            if asked and not file.exists():
                file.write_text(json.dumps(tried(column, part, folder), indent=1))
        except ToolchainsError as error:
            print(f"{column.name}, {part}: {error}", file=sys.stderr)
            untried += 1
        if file.exists():
            results[column.name][part] = json.loads(file.read_text())
    found = {name: parts for name, parts in results.items() if parts}
    failed = bool(found) and tabulate(report, found)
    return 2 if untried else 1 if failed else 0


def tried(column: Column, part: str, folder: Path) -> dict[str, Any]:
    """Returns what a part of a column found; raises ToolchainsError where nothing could be tried."""
    python = columns.prepare(column, folder)
    ended = run_limited(columns.command(python, part), _PART_SECONDS, columns.environment(folder))
    if ended.status == 2:
        raise ToolchainsError(ended.log.strip()[-600:])
    rows = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    print(f"{column.name}, {part}: {len(rows)} cases in {ended.seconds:.0f} s", flush=True)
    return {"rows": rows, "crashed": crash(ended), "commit": commit(), "versions": columns.versions(python)}


def crash(ended: ChildResult) -> str:
    """Returns how a part ended, if not by itself, and the line with which C++ ended it, or the end of its log."""
    if ended.status in (0, 1) and not ended.timed_out:
        return ""
    fatal = [line for line in ended.log.splitlines() if re.match(r"F\d{4} ", line)]
    return f"{ended.cause}: {(fatal or [' '.join(ended.log.split())])[0][-600:]}"


def tabulate(report: Report, results: Results) -> bool:
    """Reports what was tried, what spills, and what failed; returns whether something did."""
    head = ["column", "jax", "triton", "commit", *_GROUPS]
    report.table("Cases that compile", head, ([name, *_tried_cells(parts)] for name, parts in results.items()))
    spilled = {name: dict(_spilled(parts)) for name, parts in results.items()}
    cases = sorted({case for found in spilled.values() for case, size in found.items() if size})
    rows: list[list[Cell]] = [[case, *(found.get(case, _NO) for found in spilled.values())] for case in cases]
    rows.append(["kernels compiled", *(len(found) or _NO for found in spilled.values())])
    report.table("Bytes that a thread spills, stored and loaded", ["kernel", *results], rows)
    failed = [[name, *each] for name, parts in results.items() for part in parts.values() for each in _failures(part)]
    if failed:
        report.table("Failed", ["column", "case", "why"], failed)
    return bool(failed)


def _tried_cells(parts: Mapping[str, Any]) -> Iterator[str]:
    yield from next(iter(parts.values()))["versions"].values()
    yield ", ".join(sorted({part["commit"] for part in parts.values()}))
    for prefixes in _GROUPS.values():
        yield _passed(parts, prefixes)


def _passed(parts: Mapping[str, Any], prefixes: tuple[str, ...]) -> str:
    found = [part for name, part in parts.items() if name.startswith(prefixes)]
    rows = [row for part in found for row in part["rows"]]
    if not rows:
        return _NO
    text = f"{sum(row['passed'] for row in rows)} of {len(rows)}" + ", not all ended" * any(p["crashed"] for p in found)
    left = ", ".join(name for name in PARTS if name.startswith(prefixes) and name not in parts)
    return text + (f"; {_NO}: {left}" if left else "")


def _spilled(parts: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for part in parts.values():
        yield from ((row["case"], row["figures"]["spilled"]) for row in part["rows"] if "spilled" in row["figures"])


def _failures(part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields each case that failed, and why; and how a part ended that did not end by itself."""
    yield from ((row["case"], row["says"]) for row in part["rows"] if not row["passed"])
    if part["crashed"]:
        yield "", part["crashed"]


if __name__ == "__main__":
    run(main)
