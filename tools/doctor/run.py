"""Runs checks one after the other; whatever one of them does, the others run and the report is written."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence

from dsv3.processes.child import ChildResult, run_limited
from tools.doctor.checks import Check
from tools.doctor.report import Report, Result, exit_status
from tools.doctor.rows import Row, read_rows

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")
_MOST_NAMES = 200
_QUOTED = 200
# Where a signal ends a check, its log has the Python stack.
_ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}


def examine(checks: Sequence[Check], report: Report, say: Callable[[str], None], show: Callable[[str], None]) -> int:
    """Runs the checks into the report, says each row and where the report is; returns the doctor's exit status.

    `show` gets what runs now. An interrupt ends the check that runs, and the report has those before it.
    """
    state = "finished"
    try:
        for result in _results(
            checks, lambda check: show(f"{check.section} {check.name}, at most {check.seconds:.0f} s")
        ):
            for line in report.add(result):
                say(line)
    except KeyboardInterrupt:
        state = "interrupted"
    try:
        path = report.close(state)
    except OSError as error:
        say(f"{state}: {report.verdict}; the report cannot be written: {error}")
        return 1
    say(f"{state}: {report.verdict}; read {path.with_name('report.md')}")
    say(f"Where something failed, the page says what to try. {path} holds all of it: attach it to an issue.")
    return exit_status(report.results) if state == "finished" else 1


def _results(checks: Sequence[Check], start: Callable[[Check], None]) -> Iterator[Result]:
    """Yields the result of each check; `start` is called before each begins."""
    for check in checks:
        for one in _each(check, start) if check.each else [check]:
            if isinstance(one, Result):
                yield one
                continue
            start(one)
            yield _result(one, _run(one))


def _each(check: Check, start: Callable[[Check], None]) -> Iterator[Check | Result]:
    """Yields the checks that one stands for; the result of listing them where that fails."""
    listing = dataclasses.replace(check, command=(*check.command, "--list"), each=False)
    start(listing)
    ended = _run(listing)
    names = ended.output.split()
    if ended.timed_out or ended.status != 0:
        yield _result(listing, dataclasses.replace(ended, output=""))
    elif not names or len(names) > _MOST_NAMES or not all(map(_NAME.fullmatch, names)):
        says = f"--list prints no names of checks, but {ended.output[:_QUOTED]!r}"
        yield Result(listing, (Row(check.name, False, says),), "", ended.seconds, ended.log)
    else:
        yield from (dataclasses.replace(check, name=name, command=(*check.command, name), each=False) for name in names)


def _run(check: Check) -> ChildResult:
    try:
        return run_limited(check.command, check.seconds, {**os.environ, **_ENVIRONMENT})
    except OSError as error:
        return ChildResult(127, False, 0.0, "", f"the check cannot be started: {error}")


def _result(check: Check, ended: ChildResult) -> Result:
    rows, garbage = read_rows(ended.output)
    wrong = _wrong(ended, rows, garbage)
    if wrong:
        rows.append(Row(check.name, False, wrong))
    not_tried = "" if rows else _last_line(ended.log) or "the check does not say why"
    return Result(check, tuple(rows), not_tried, ended.seconds, ended.log)


def _wrong(ended: ChildResult, rows: Sequence[Row], garbage: str) -> str:
    """Says how a check's process failed, or contradicts its rows; "" where it did neither."""
    failed, last = any(not row.passed for row in rows), _last_line(ended.log)
    if ended.timed_out or ended.status not in (0, 1, 2):
        where = _stack_top(ended.log) or (f"its last words: {last}" if last else "")
        return "; ".join(filter(None, (f"{ended.cause}, after {len(rows)} rows", where)))
    if garbage:
        return f"prints what is no row: {garbage[:_QUOTED]!r}"
    if ended.status == 1 and not failed:
        return f"exit status 1 without a row that failed; its last words: {last}"
    if ended.status == 0 and not rows:
        return "exit status 0 without a row"
    if ended.status == 0 and failed:
        return "exit status 0, though a row failed"
    if ended.status == 2 and rows:
        return "exit status 2 (nothing could be tried), though it prints rows"
    return ""


def _stack_top(log: str) -> str:
    """Returns where a check was that crashed or hangs, by the stacks that it wrote; "" where it wrote none.

    A crash marks its thread; where a check hangs its main thread is the last of all.
    """
    tops = re.findall(r"^(Current thread|Thread) .*most recent call first\):\n\s*(.+)", log, re.MULTILINE)
    chosen = [top for kind, top in tops if kind == "Current thread"] or [top for _, top in tops]
    return f"in {chosen[-1]}" if chosen else ""


def _last_line(log: str) -> str:
    lines = log.split("\n")
    return next((line.strip()[:_QUOTED] for line in reversed(lines) if line.strip()), "")
