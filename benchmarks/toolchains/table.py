"""The page of tables that a run of the matrix leaves: what was tried, what failed, what spills."""

from collections.abc import Iterator
from typing import Any

from benchmarks.toolchains.columns import PARTS

_NO = "not run"


def page(results: dict[str, dict[str, Any]]) -> str:
    """Writes the tables of the results, by column."""
    return "\n".join([*_columns(results), "", *_spills(results), "", *_failed(results), ""])


def failures(part: dict[str, Any]) -> list[str]:
    """Returns a line for each case of a part that failed, and for a part that did not end by itself."""
    lines = [f"{row['case']}: {row['says']}" for row in part["rows"] if not row["passed"]]
    return [*lines, *([part["crashed"]] if part["crashed"] else [])]


def _columns(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| column | jax | triton | commit | kernels | steps | executables |"
    yield "|---|---|---|---|---|---|---|"
    for name, result in results.items():
        parts = result["parts"]
        commits = ", ".join(sorted({part["commit"] for part in parts.values()}))
        cells = [_passed(parts, prefix) for prefix in (("mosaic", "triton"), ("steps",), ("executables",))]
        versions = result["versions"]
        yield f"| {name} | {versions['jax']} | {versions['triton']} | {commits} | " + " | ".join(cells) + " |"


def _passed(parts: dict[str, Any], prefixes: tuple[str, ...]) -> str:
    found = [part for name, part in parts.items() if name.startswith(prefixes)]
    rows = [row for part in found for row in part["rows"]]
    if not rows:
        return _NO
    text = f"{sum(row['passed'] for row in rows)} of {len(rows)}" + ", not all ended" * any(p["crashed"] for p in found)
    left = ", ".join(name for name in PARTS if name.startswith(prefixes) and name not in parts)
    return text + (f"; {_NO}: {left}" if left else "")


def _spills(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yields a line per kernel that spills in some column: bytes stored and loaded per thread."""
    spilled: dict[str, dict[str, int]] = {}
    known: set[tuple[str, str]] = set()
    for column, result in results.items():
        for part in result["parts"].values():
            for row in part["rows"]:
                if "spilled" in row["figures"]:
                    known.add((column, row["case"]))
                    if row["figures"]["spilled"]:
                        spilled.setdefault(row["case"], {})[column] = row["figures"]["spilled"]
    yield "| bytes that a thread spills, stored and loaded | " + " | ".join(results) + " |"
    yield "|---" * (len(results) + 1) + "|"
    for case in sorted(spilled):
        cells = [str(spilled[case].get(column, 0)) if (column, case) in known else _NO for column in results]
        yield f"| {case} | " + " | ".join(cells) + " |"
    counts = [str(len([1 for each, _ in known if each == column]) or _NO) for column in results]
    yield "| kernels compiled | " + " | ".join(counts) + " |"


def _failed(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "Failed:" if any(map(_lines, results.values())) else "Nothing failed."
    for column, result in results.items():
        yield from (f"- {column}: {line}" for line in _lines(result))


def _lines(result: dict[str, Any]) -> list[str]:
    return [line for part in result["parts"].values() for line in failures(part)]
