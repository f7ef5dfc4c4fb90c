"""Writes the figures of the performance pages from the results of benchmarks.

    python -m benchmarks.pages                     fills the pages
    python -m benchmarks.pages --again [NAME...]   measures results anew, one after the other, then fills the pages

A page holds its text, and for each result a block between `<!-- result NAME -->` and `<!-- end -->`: the command, what
it ran on, and the tables of benchmarks/results/NAME.json. What stands in a block is overwritten.

`--again` without names repeats the results of a CPU that need nothing from elsewhere, and that took at most 90 seconds
or were never timed. A word in capitals in a command, such as PID or PYTHON, stands for something of the reader's, so
such a command is not repeated.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.record import RESULTS, ROOT, Table

PAGES = (*sorted((ROOT / "docs" / "performance").glob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md")))
_SHORT_S = 90.0
_BLOCK = re.compile(r"(<!-- result ([\w.-]+) -->)\n.*?<!-- end -->", re.DOTALL)
_PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]+\b")
_LONGEST_S = 1800.0


def result_of(name: str) -> dict[str, Any]:
    """Returns a stored result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def filled(text: str) -> str:
    """Returns the text of a page with the stored results in its blocks."""
    return _BLOCK.sub(lambda found: "\n".join([found[1], "", *_lines(result_of(found[2])), "<!-- end -->"]), text)


def blocks(text: str) -> list[str]:
    """Returns the names of the results that a page shows."""
    return [found[2] for found in _BLOCK.finditer(text)]


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield from (_origin(result), "")
    for table in (Table(**each) for each in result["tables"]):
        yield from (f"*{table.title}*", "", *table.lines(), "")


def _origin(result: dict[str, Any]) -> str:
    """Returns the lines of a page that say where figures come from."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    busy = "" if result["quiet"] else "; **other programs kept it busy**"
    origin = f"{result['date']}, commit {result['commit']}: {result['machine']}; {versions}{busy}."
    return f"`{result['command']}`\n\n{origin}"


def fill() -> None:
    """Overwrites the blocks of all pages."""
    for page in PAGES:
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            print(f"written: {page.relative_to(ROOT)}")


def needed_by(result: dict[str, Any]) -> list[str]:
    """Returns the words in a command that stand for something of the reader's."""
    return _PLACEHOLDER.findall(re.sub(r"\b[A-Z_]+=\S+", "", result["command"]))


def short_ones() -> list[str]:
    """Returns the results of a CPU that need nothing from elsewhere and did not take long."""
    found = {path.stem: result_of(path.stem) for path in sorted(RESULTS.glob("*.json"))}
    found = {name: each for name, each in found.items() if not name.startswith("gpu.") and not needed_by(each)}
    return [name for name, each in found.items() if each["seconds"] < _SHORT_S]


def again(name: str) -> bool:
    """Repeats the command of a result, which is then recorded; returns whether it ended as a benchmark does."""
    words = shlex.split(result_of(name)["command"])
    before = words[: words.index("python")]
    given = dict(word.split("=", 1) for word in before if "=" in word)
    module, *arguments = words[words.index("-m") + 1 :]
    case = name.removeprefix(module.removeprefix("benchmarks.")).removeprefix("-")
    command = [*(word for word in before if "=" not in word), sys.executable, "-m", module, *arguments]
    command.append(f"--record={case}" if case else "--record")
    try:
        return subprocess.run(command, cwd=ROOT, env=os.environ | given, timeout=_LONGEST_S).returncode in (0, 1)
    except subprocess.TimeoutExpired:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", nargs="*", metavar="NAME")
    names = parser.parse_args().again
    failed = []
    for name in short_ones() if names == [] else names or ():
        if found := needed_by(result_of(name)):
            parser.error(
                f"{name}: put something in place of {', '.join(found)} and run the command with --record yourself"
            )
        failed += [] if again(name) else [name]
    fill()
    print("\n".join(f"failed: {name}" for name in failed), file=sys.stderr, end="\n" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
