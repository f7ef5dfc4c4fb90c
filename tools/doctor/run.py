"""Runs checks one after the other; whatever one of them does, the others run and the report is written.

The report is a page to read, the same as JSON, the logs of all checks, and in the end one file to send.
"""

import dataclasses
import datetime
import functools
import getpass
import json
import math
import os
import re
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import dsv3
from dsv3.files import replace_file
from dsv3.processes.child import ChildResult, run_limited
from tools.doctor.checks import Check
from tools.doctor.rows import CaseResult, read_rows, show_figures

_HEAD = ("devices", "versions")  # rows that stand at the page's top
_SAID = 400  # characters of a sentence on the page
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")
_MOST_NAMES = 200
_QUOTED = 200
# Where a signal ends a check, its log has the Python stack.
_ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a check. How its process failed is a row that failed, after those that it printed."""

    check: Check
    rows: tuple[CaseResult, ...]
    not_tried: str
    """Why nothing could be tried here, "" where something was."""
    seconds: float
    log: str

    @property
    def outcome(self) -> str:
        """One word: passed, failed or not tried."""
        if self.not_tried:
            return "not tried"
        return "passed" if all(row.passed for row in self.rows) else "failed"


def exit_status(results: Sequence[Result]) -> int:
    """Returns 0 where everything that could be tried passed, 1 where something failed, 2 where nothing was tried."""
    outcomes = {result.outcome for result in results}
    return 1 if "failed" in outcomes else 0 if "passed" in outcomes else 2


class Report:
    """The report of one run in `directory`, written anew after each check, so that a killed run leaves what it has.

    It names no path of this machine: `directory` may be attached to a public issue. Raises OSError where `directory`
    cannot be written.
    """

    def __init__(self, directory: Path, model: Path, *, quick: bool) -> None:
        self.results: list[Result] = []
        self._directory, self._model, self._quick = directory, model.name, quick
        self._redact = redactor(model)
        self._began, self._clock = datetime.datetime.now(datetime.UTC), time.monotonic()
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        (directory / "report.zip").unlink(missing_ok=True)
        self._write("not finished")

    def add(self, result: Result) -> list[str]:
        """Takes a result, writes the report with it, and returns its rows in a line each."""
        rows = tuple(
            CaseResult(self._redact(row.case), row.passed, self._redact(row.says), row.figures) for row in result.rows
        )
        log, not_tried = self._redact(result.log), self._redact(result.not_tried)
        result = dataclasses.replace(result, rows=rows, log=log, not_tried=not_tried)
        self.results.append(result)
        lines = [_line(result, row) for row in rows]
        if not_tried:
            lines = [f"not tried {result.check.section} {result.check.name}: {_cut(not_tried)}"]
        try:
            replace_file(self._directory / _log_name(result), log.encode())
            self._write("not finished")
        except OSError as error:  # the disk may have room again at the next one
            lines.append(f"the report cannot be written now: {error}")
        return lines

    def close(self, state: str) -> Path:
        """Writes the report as it is in the end, `state` (finished or interrupted), and returns the file to send."""
        self._write(state)
        path = self._directory / "report.zip"
        part = path.with_name(".report.zip")
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as file:
            for name in ("report.md", "report.json", *map(_log_name, self.results)):
                file.write(self._directory / name, f"report/{name}")
        os.replace(part, path)
        return path

    @property
    def verdict(self) -> str:
        """Returns in a line how many checks passed."""
        if not self.results:
            return "no check has run"
        count = {word: sum(r.outcome == word for r in self.results) for word in ("passed", "failed", "not tried")}
        others = [f"{count[word]} {word}" for word in ("failed", "not tried") if count[word]]
        return ", ".join([f"{count['passed']} of {len(self.results)} checks passed", *others])

    def _write(self, state: str) -> None:
        about = {
            "state": state,
            "status": exit_status(self.results),
            "began": self._began.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self._clock, 1),
            "dsv3": dsv3.__version__,
            "model": self._redact(self._model),
            "quick": self._quick,
        }
        written = {"version": 1, **about, "checks": [_as_json(result, self._redact) for result in self.results]}
        text = json.dumps(written, indent=1, allow_nan=False)
        replace_file(self._directory / "report.json", f"{text}\n".encode())
        page = "\n".join(_page(self.verdict, about, self.results))
        replace_file(self._directory / "report.md", f"{page}\n".encode())


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
    say(f"The page says what to try for each failure. To report a problem, attach {path} to an issue.")
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
        says = f"--list must print names of checks, but printed {ended.output[:_QUOTED]!r}"
        yield Result(listing, (CaseResult(check.name, False, says),), "", ended.seconds, ended.log)
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
        rows.append(CaseResult(check.name, False, wrong))
    not_tried = "" if rows else _last_line(ended.log) or "the check gives no reason"
    return Result(check, tuple(rows), not_tried, ended.seconds, ended.log)


def _wrong(ended: ChildResult, rows: Sequence[CaseResult], garbage: str) -> str:
    """Says how a check's process failed, or contradicts its rows; "" where it did neither."""
    failed, last = any(not row.passed for row in rows), _last_line(ended.log)
    if ended.timed_out or ended.status not in (0, 1, 2):
        where = _stack_top(ended.log) or (f"the last line of its log: {last}" if last else "")
        return "; ".join(filter(None, (f"{ended.cause}, after {len(rows)} rows", where)))
    if garbage:
        return f"prints a line that is not a row: {garbage[:_QUOTED]!r}"
    if ended.status == 1 and not failed:
        return f"exit status 1, but no row failed; the last line of its log: {last}"
    if ended.status == 0 and not rows:
        return "exit status 0, but it printed no row"
    if ended.status == 0 and failed:
        return "exit status 0, but a row failed"
    if ended.status == 2 and rows:
        return "exit status 2 (nothing could be tried), but it printed rows"
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


def redactor(model: Path) -> Callable[[str], str]:
    """Returns what takes this machine's names out of a text: home, folders, user and host; and control characters."""
    named = {str(model.parent): "<models>", str(Path(dsv3.__file__).parents[1]): "<dsv3>", os.path.expanduser("~"): "~"}
    if sys.prefix != sys.base_prefix:  # the system's own is the same everywhere
        named[sys.prefix] = "<python>"
    folders = {str(each): word for path, word in named.items() for each in (Path(path), Path(path).resolve())}
    hosts = {name for full in (socket.gethostname(), os.uname().nodename) for name in (full, full.partition(".")[0])}
    longest_first = functools.partial(sorted, key=len, reverse=True)
    words = [(rf"{re.escape(path)}(?![\w-])", folders[path]) for path in longest_first({*folders} - {"/", "~"})]
    hosts -= {"", "localhost"}
    words += [(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<host>") for name in longest_first(hosts)]
    words += [(rf"(?<=/){re.escape(_user())}(?![\w-])", "<user>")]
    words += [(r"[^\n\t -~\u00a0-\ud7ff\ue000-\U0010ffff]", "\ufffd")]
    patterns = [(re.compile(pattern), word) for pattern, word in words]

    def redact(text: str) -> str:
        for pattern, word in patterns:
            text = pattern.sub(word, text)
        return text

    return redact


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user that has no name
        return str(os.getuid())


def _line(result: Result, row: CaseResult) -> str:
    """Returns a row in one line."""
    return f"{_mark(row)} {result.check.section} {result.check.name}: " + ": ".join(
        filter(None, (row.case, _said(row)))
    )


def _said(row: CaseResult) -> str:
    return "; ".join(filter(None, (_cut(row.says), _cut(show_figures(row.figures)))))


def _mark(row: CaseResult) -> str:
    return "passed" if row.passed else "FAILED"


def _log_name(result: Result) -> str:
    return f"logs/{result.check.section}-{result.check.name}.txt"


def _as_json(result: Result, redact: Callable[[str], str]) -> dict[str, Any]:
    return {
        "section": result.check.section,
        "name": result.check.name,
        "command": ["python", *map(redact, result.check.command[1:])],
        "outcome": result.outcome,
        "not_tried": result.not_tried,
        "seconds": round(result.seconds, 2),
        "remedy": result.check.remedy,
        "log": _log_name(result),
        "rows": [
            {"case": row.case, "passed": row.passed, "says": row.says, "figures": _finite(row.figures)}
            for row in result.rows
        ],
    }


def _finite(figures: dict[str, float]) -> dict[str, float | str]:
    """Returns figures as JSON can have them: words for infinity and what is no number."""
    return {name: value if math.isfinite(value) else str(value) for name, value in figures.items()}


def _page(verdict: str, about: dict[str, Any], results: Sequence[Result]) -> Iterator[str]:
    yield f"# Doctor: {verdict}" + ("" if about["state"] == "finished" else f" ({about['state']})")
    yield ""
    form = "quick form" if about["quick"] else "whole form"
    yield f"- {about['began']}, {about['seconds']:.0f} s, {form}, model {about['model']}, dsv3 {about['dsv3']}"
    for row in (row for result in results for row in result.rows if row.case in _HEAD):
        yield f"- {row.case}: {_cell(row.says)}"
    failed = [result for result in results if result.outcome == "failed"]
    if failed:
        yield from ("", "## What failed, and what to try", "")
    for result in failed:
        first = next(row for row in result.rows if not row.passed)
        yield f"- **{result.check.section}: {result.check.name}**: {_cell(first.case)}: {_cell(first.says)}."
        yield f"  {result.check.remedy} Log: `{_log_name(result)}`"
    for section in dict.fromkeys(result.check.section for result in results):
        yield from ("", f"## {section}", "", "| check | case | result | details |", "|---|---|---|---|")
        for result in results:
            if result.check.section == section:
                yield from _lines(result)


def _lines(result: Result) -> Iterator[str]:
    """Yields the lines of a check in its section's table."""
    name = f"{result.check.name}, {result.seconds:.0f} s"
    if result.not_tried:
        yield f"| {name} | | not tried | {_cell(result.not_tried)} |"
    passed = sum(row.passed for row in result.rows)
    if result.check.counted and passed:
        yield f"| {name} | | passed | {passed} of {len(result.rows)} |"
    for row in result.rows:
        if not (row.passed and result.check.counted):
            yield f"| {name} | {_cell(row.case)} | {_mark(row)} | {_escape(_said(row))} |"


def _cell(text: str) -> str:
    return _escape(_cut(text))


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SAID else text[:_SAID] + "..."
