"""Which toolchains compile the kernels and steps, and what spills with each: a matrix that needs no GPU.

    python -m benchmarks.toolchains DIR [--column NAME ...] [--part NAME ...] [--here]

Makes virtual environments below DIR and writes DIR/toolchains.md, once more after each part of a column. A column is a
release of jax, its CUDA 12 or 13 plugin and a ptxas; the machine's own CUDA toolkit is hidden from it. What DIR has
already is not run again: remove DIR/results/NAME.json to run a column anew. Exits with 1 if a case failed, 2 if a
column could not be tried. A column takes 8 minutes of two quiet cores.
"""

import argparse
import functools
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.record import commit
from benchmarks.toolchains import columns, table
from benchmarks.toolchains.columns import COLUMNS, PARTS, ROOT, Toolchain, ToolchainsError
from dsv3.processes.child import run_limited

_PART_SECONDS = 1800


def main(arguments: list[str] | None = None) -> int:
    args = _arguments(arguments)
    (args.folder / "results").mkdir(parents=True, exist_ok=True)
    chosen: dict[str, Callable[[], Toolchain]] = {
        column.name: functools.partial(columns.prepare, column, args.folder)
        for column in COLUMNS
        if not args.column or column.name in args.column
    }
    parts = args.part or PARTS
    if args.here:
        chosen, parts = {"here": lambda: columns.HERE}, ("toy",)
    untried = 0
    for part, (name, prepare) in itertools.product(parts, chosen.items()):
        try:
            run_part(name, part, args.folder, prepare)
        except ToolchainsError as error:
            print(f"{name}, {part}: {error}", file=sys.stderr)
            untried += 1
    found = [part for result in read_results(args.folder).values() for part in result["parts"].values()]
    return 2 if untried else 1 if any(map(table.failures, found)) else 0


def run_part(name: str, part: str, folder: Path, prepare: Callable[[], Toolchain]) -> None:
    """Runs a part of a column, if `folder` has no result of it, and writes the result and the table."""
    file = folder / "results" / f"{name}.json"
    result = json.loads(file.read_text()) if file.exists() else {"parts": {}}
    if part in result["parts"]:
        return
    toolchain = prepare()
    ended = run_limited(columns.command(toolchain, part), _PART_SECONDS, columns.environment(folder))
    rows = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    crashed = "" if ended.status in (0, 1) and not ended.timed_out else f"{ended.cause}: {_reason(ended.log)}"
    found = {"rows": rows, "crashed": crashed, "seconds": round(ended.seconds), "commit": commit()}
    result["parts"][part] = found
    result["versions"] = columns.versions(toolchain)
    file.write_text(json.dumps(result, indent=1))
    (folder / "toolchains.md").write_text(table.page(read_results(folder)))
    print(f"{name}, {part}: {len(rows)} cases in {ended.seconds:.0f} s", flush=True)
    for failure in table.failures(found):
        print(f"  {failure}", flush=True)


def read_results(folder: Path) -> dict[str, dict]:
    """Returns what `folder` has of each column, in their order."""
    names = [*(column.name for column in COLUMNS), "here"]
    files = {name: folder / "results" / f"{name}.json" for name in names}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def _reason(log: str) -> str:
    """Returns the line with which C++ ended the process, or the end of the log."""
    fatal = [line for line in log.splitlines() if re.match(r"F\d{4} ", line)]
    return (fatal or [" ".join(log.split())])[0][-600:]


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="for environments and results, outside of the tree")
    parser.add_argument("--column", action="append", choices=[column.name for column in COLUMNS], help="all by default")
    parser.add_argument("--here", action="store_true", help="try one kernel in the environment that is there")
    parser.add_argument("--part", action="append", choices=PARTS, help="all by default")
    args = parser.parse_args(arguments)
    args.folder = args.folder.resolve()
    if args.folder.is_relative_to(ROOT):
        parser.error(f"{args.folder} is inside of the repository; choose a folder elsewhere")
    return args


if __name__ == "__main__":
    sys.exit(main())
