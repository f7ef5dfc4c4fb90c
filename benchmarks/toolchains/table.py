"""The page of tables that a run of the matrix leaves: what was tried, what failed, what spills."""

from collections.abc import Iterator
from typing import Any

from benchmarks.record import Cell, Table
from benchmarks.toolchains.columns import PARTS

_NO = "not run"
_GROUPS = {"kernels": ("mosaic", "triton"), "steps": ("steps",), "executables": ("executables",)}


def page(results: dict[str, dict[str, Any]]) -> str:
    """Writes the tables of the results, by column."""
    tried = Table("", ["column", "jax", "triton", "commit", *_GROUPS], list(map(_tried, results, results.values())))
    failed = [
        f"- {c}: {line}" for c, result in results.items() for p in result["parts"].values() for line in failures(p)
    ]
    last = ["Failed:", *failed] if failed else ["Nothing failed."]
    return "\n".join([*tried.lines(), "", *_spills(results).lines(), "", *last, ""])


def failures(part: dict[str, Any]) -> list[str]:
    """Returns a line for each case of a part that failed, and for a part that did not end by itself."""
    lines = [f"{row['case']}: {row['says']}" for row in part["rows"] if not row["passed"]]
    return [*lines, *([part["crashed"]] if part["crashed"] else [])]


def _tried(name: str, result: dict[str, Any]) -> list[Cell]:
    parts, versions = result["parts"], result["versions"]
    commits = ", ".join(sorted({part["commit"] for part in parts.values()}))
    return [name, versions["jax"], versions["triton"], commits, *(_passed(parts, g) for g in _GROUPS.values())]


def _passed(parts: dict[str, Any], prefixes: tuple[str, ...]) -> str:
    found = [part for name, part in parts.items() if name.startswith(prefixes)]
    rows = [row for part in found for row in part["rows"]]
    if not rows:
        return _NO
    text = f"{sum(row['passed'] for row in rows)} of {len(rows)}" + ", not all ended" * any(p["crashed"] for p in found)
    left = ", ".join(name for name in PARTS if name.startswith(prefixes) and name not in parts)
    return text + (f"; {_NO}: {left}" if left else "")


def _spills(results: dict[str, dict[str, Any]]) -> Table:
    """Returns a line per kernel that spills in some column: bytes stored and loaded per thread."""
    spilled = {column: dict(_spilled(result)) for column, result in results.items()}
    cases = sorted({case for found in spilled.values() for case, size in found.items() if size})
    rows: list[list[Cell]] = [[case, *(spilled[column].get(case, _NO) for column in results)] for case in cases]
    counts: list[Cell] = ["kernels compiled", *(len(spilled[column]) or _NO for column in results)]
    return Table("", ["bytes that a thread spills, stored and loaded", *results], [*rows, counts])


def _spilled(result: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for part in result["parts"].values():
        yield from ((row["case"], row["figures"]["spilled"]) for row in part["rows"] if "spilled" in row["figures"])
