"""Docs say which test holds what they promise: each test that they name exists. They name every flag."""

import pathlib
import re
import runpy

from dsv3.batch.options import BatchOptions
from dsv3.config.declaration import options_of
from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.config.server_options import ServerOptions
from router.options import RouterOptions
from tools.simulate.options import SimulateOptions

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
# `server/test_x.py`, `server/test_x.py::test_y`, or `test_y` by itself after one of these.
NAMED = re.compile(r"`(?:(?P<file>[\w/]*test_\w+\.py)(?:::(?P<test>test_\w+))?|(?P<alone>test_\w+))`")


def names_by_file() -> dict[str, set[str]]:
    files = (ROOT / "tests").rglob("test_*.py")
    pattern = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
    return {f"/{file.relative_to(ROOT)}": set(pattern.findall(file.read_text())) for file in files}


def test_every_test_that_a_page_names_exists() -> None:
    known, missing, count = names_by_file(), [], 0
    for page in PAGES:
        found: set[str] = set()
        for named in NAMED.finditer(page.read_text()):
            count += 1
            if named["file"]:
                files = [tests for file, tests in known.items() if file.endswith("/" + named["file"])]
                found = set().union(*files)
                wrong = not files or (named["test"] is not None and named["test"] not in found)
            else:
                wrong = named["alone"] not in found
            if wrong:
                missing.append(f"{page.relative_to(ROOT)}: {named[0]}")
    assert not missing
    assert count > 50


def headings_of(page: pathlib.Path) -> set[str]:
    """The anchors of a page, as GitHub and editors make them of its headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_files_and_headings() -> None:
    broken, count = [], 0
    for page in [*PAGES, *(ROOT / "examples").glob("*.md"), *(ROOT / "deploy").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, heading = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            count += 1
            if "://" in link or (target.exists() and (not heading or heading in headings_of(target))):
                continue
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken
    assert count > 200


def test_every_flag_of_every_command_is_on_a_page() -> None:
    declared = (ServerOptions, EngineOptions, ClusterOptions, BatchOptions, RouterOptions, SimulateOptions)
    names = {each.name for options in declared for each in options_of(options)}
    for source in [*(ROOT / "launch").glob("*.py"), ROOT / "deploy/ray_cluster.py"]:
        names |= set(re.findall(r'(?:DEFINE_\w+|add_argument)\(\s*"(?:--)?(\w+)"', source.read_text()))
    said = set(re.findall(r"--(?:no)?([a-z]\w+)", "\n".join(page.read_text() for page in PAGES)))
    assert len(names) > 120 and names - {"arguments"} <= said


def test_the_glossary_has_few_words_of_our_own() -> None:
    words = (ROOT / "docs/glossary.md").read_text().partition("## Words")[2]
    rows = re.findall(r"^\| (\*.*?) \|", words, re.MULTILINE)
    assert 10 < len(rows) <= 40


def test_pictures_are_those_that_the_script_draws() -> None:
    folder = ROOT / "docs/pictures"
    pictures = runpy.run_path(str(folder / "draw.py"))["PICTURES"]
    assert {file.stem for file in folder.glob("*.svg")} == set(pictures)
    for name, draw in pictures.items():
        assert (folder / f"{name}.svg").read_text() == draw().svg(), f"run python {folder / 'draw.py'}"
