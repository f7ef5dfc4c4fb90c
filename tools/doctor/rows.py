"""What a check reads and prints: its command line, and one JSON object per line for each case."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping

import msgspec

from dsv3.files import parse_json


class CaseResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of one case: `says` is empty or one sentence."""

    case: str
    passed: bool
    says: str = ""
    figures: dict[str, float] = {}


def parse_name(
    argv: list[str] | None, module: str, names: Iterable[str], *, quick: str | None = None
) -> argparse.Namespace:
    """Returns `name`, one of `names`, or `list`, and `quick`, an option where its help is given.

    It is the command line of a check that stands for several (`tools.doctor.checks.Check.each`). Ends the process for
    another one.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tools.doctor.{module}")
    parser.add_argument("name", nargs="?", choices=[*names], metavar="NAME", help="a name of --list")
    parser.add_argument("--list", action="store_true", help="print the names")
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help=quick)
    args = parser.parse_args(argv)
    if args.list == bool(args.name):
        parser.error("say either a NAME or --list")
    return args


def run_cases(cases: Mapping[str, Callable[[], CaseResult | str]]) -> int:
    """Prints a row for each case as soon as it is known, and returns the exit status of a check.

    A case returns its row, or what to say where it passed. One that raises has failed, and costs no other.
    """
    failed = False
    for name, case in cases.items():
        try:
            found = case()
            row = CaseResult(name, True, found) if isinstance(found, str) else found
        except Exception as error:  # whatever a case finds broken is what the report is for
            row = CaseResult(name, False, f"{type(error).__name__}: {error}")
            print(f"{name}: {row.says}", file=sys.stderr)
        print(json.dumps(msgspec.to_builtins(row)), flush=True)  # msgspec writes null for NaN
        failed |= not row.passed
    return int(failed)


def read_rows(output: str) -> tuple[list[CaseResult], str]:
    """Returns the rows of a check's standard output, and the first line that is none, "" where all are."""
    rows, garbage = [], ""
    for line in output.splitlines():
        try:
            rows.append(msgspec.convert(parse_json(line.encode()), CaseResult))
        except ValueError:  # msgspec's error is one
            garbage = garbage or line or "an empty line"
    return rows, garbage


def show_figures(figures: Mapping[str, float]) -> str:
    """Returns figures in a few words: whole numbers as they are, others with four digits."""
    return ", ".join(
        f"{name} {value:,.0f}" if math.isfinite(value) and value == int(value) else f"{name} {value:.4g}"
        for name, value in figures.items()
    )
