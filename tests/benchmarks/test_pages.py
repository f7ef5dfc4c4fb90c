"""Figures cannot go stale: pages are what results say, and every command that a text names exists."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks import pages
from benchmarks.record import RESULTS, ROOT, Report, Table, encode, shown, spread

FOLDERS = ("benchmarks", "deploy", "docs", "dsv3", "launch", "pallas_kernels", "router", "sharding", "tests", "tools")
RESULT_NAMES = sorted(path.stem for path in RESULTS.glob("*.json"))
_COMMAND = re.compile(r"-m benchmarks\.([a-z][\w.]*)([^`\n|#'\"]*)")
_NAMED = re.compile(r"(?<![\w/.])benchmarks[./]([a-z_]\w*(?:[./][a-z_]\w*)*)")
_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")


def texts() -> list[Path]:
    files = (file for folder in FOLDERS for suffix in ("md", "py") for file in (ROOT / folder).rglob(f"*.{suffix}"))
    return [*ROOT.glob("*.md"), *(file for file in files if file != Path(__file__))]


@cache
def source_of(module: str) -> str | None:
    """The source of a benchmark, with that of what reads its arguments; None where there is none."""
    path = ROOT / "benchmarks" / module.replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return None
    source = file.read_text()
    return source + ((ROOT / "benchmarks/gpu/children.py").read_text() if "children.main(" in source else "")


def _is_file(name: str) -> bool:
    path = ROOT / "benchmarks" / name.replace(".", "/")
    return path.exists() or path.with_suffix(".py").exists()


def problems_of(module: str, arguments: str) -> list[str]:
    """What is wrong with a command: no such benchmark, or no such flag."""
    source = source_of(module)
    if source is None:
        return [f"no benchmark is called {module}"]
    flags = {flag.replace("-", "_") for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", arguments)}
    known = {flag.replace("-", "_") for flag in re.findall(r'"--([a-z][\w-]*)"', source)} | {"record", "help"}
    calls = re.findall(r"arguments\(\s*__doc__,(.*?)\n", re.sub(r",\n\s+", ", ", source))
    known |= {name for call in calls for name in re.findall(r"(\w+)=", call)}
    return [f"{module} has no --{flag}" for flag in flags - known]


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_what_its_results_say(page: Path) -> None:
    assert pages.filled(page.read_text()) == page.read_text(), "run: python -m benchmarks.pages"


def test_every_result_is_on_a_page() -> None:
    assert {name for page in pages.PAGES for name in pages.blocks(page.read_text())} == set(RESULT_NAMES)


@pytest.mark.parametrize("name", RESULT_NAMES)
def test_a_result_is_whole_and_its_command_exists(name: str) -> None:
    result = pages.result_of(name)
    [(module, arguments)] = _COMMAND.findall(result["command"])
    assert not problems_of(module, arguments)
    assert name == module or name.startswith(f"{module}-")
    assert {"date", "commit", "machine", "versions", "quiet", "seconds"} <= set(result)
    assert result["tables"] and all(len(row) == len(t["columns"]) for t in result["tables"] for row in t["rows"])
    assert (RESULTS / f"{name}.json").read_text() == encode(result), "not as `--record` writes it"


def test_texts_name_commands_that_exist() -> None:
    found = []
    for path in texts():
        text = path.read_text()
        found += [f"{path.relative_to(ROOT)}: {p}" for c in _COMMAND.findall(text) for p in problems_of(*c)]
        for named in _NAMED.findall(text):
            parts = re.split(r"[./]", named)
            ways = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
            if not any(_is_file(way) or (ROOT / "benchmarks" / f"{way}.{parts[-1]}").exists() for way in ways):
                found.append(f"{path.relative_to(ROOT)}: benchmarks.{named}")
    assert not found


def test_links_from_and_to_pages_lead_somewhere() -> None:
    wrong = []
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")):
        for target, anchor in _LINK.findall(page.read_text()):
            if "://" in target or target.startswith("mailto:"):
                continue
            path = (page.parent / target).resolve() if target else page
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not wrong


@cache
def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_a_row_that_does_not_fit_its_columns_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    report.table("Times", ["case", "ms"], [["a", 1234.5678], ["b", None]])
    assert capsys.readouterr().out == "\nTimes\n\n| case | ms |\n|---|---|\n| a | 1,235 |\n| b |  |\n"
    assert report.tables == [Table("Times", ["case", "ms"], [["a", 1234.6], ["b", None]])]
    with pytest.raises(ValueError, match="no row of the columns"):
        report.table("Times", ["case", "ms"], [["a"]])


def test_cells() -> None:
    assert [shown(cell) for cell in (0.123456, 12.0, 150.0, 18432, "x", None)] == [
        "0.123",
        "12",
        "150",
        "18,432",
        "x",
        "",
    ]
    assert spread([1, 3, 2]) == "2.00 (1.00 to 3.00)"


def test_what_a_command_needs_is_seen() -> None:
    command = "JAX_PLATFORMS=cpu XLA_FLAGS=--xla_x=8 python -m benchmarks.soak --server_pid PID"
    assert pages.needed_by({"command": command}) == ["PID"]
    assert json.loads(encode({"command": command, "tables": []})) == {"command": command, "tables": []}
