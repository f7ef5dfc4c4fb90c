"""The matrix of toolchains in its toy form, and what its page in the docs must hold."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.toolchains import __main__ as matrix
from benchmarks.toolchains import columns, table
from dsv3.processes.child import ChildResult

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance" / "toolchains.md").read_text()


@pytest.mark.aot
def test_a_kernel_in_the_environment_that_is_there(tmp_path: Path) -> None:
    """A process of its own compiles it; the page has its column, and a second run finds the result."""
    assert matrix.main([str(tmp_path), "--here"]) == 0
    results = json.loads((tmp_path / "results" / "here.json").read_text())
    rows = results["parts"]["toy"]["rows"]
    assert {row["case"].split(": ")[1] for row in rows} == {"mla_combine", "mla_decode", "mla_write"}
    assert all(row["passed"] and 0 < row["figures"]["registers"] <= 255 for row in rows)
    written = (tmp_path / "toolchains.md").stat().st_mtime_ns
    assert matrix.main([str(tmp_path), "--here"]) == 0
    assert (tmp_path / "toolchains.md").stat().st_mtime_ns == written


def test_a_crash_costs_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = "noise\nF1124 16:01:28 load_ir_module.cc:29] no libdevice\n*** Check failure stack trace: ***"
    row = {"case": "decode: mla_decode", "passed": True, "says": "", "figures": {"registers": 168, "spilled": 72}}
    ended = ChildResult(-6, False, 1.0, "not a row\n" + json.dumps(row) + "\n", log)
    monkeypatch.setattr(matrix, "run_limited", lambda *_: ended)
    assert matrix.main([str(tmp_path), "--here"]) == 1
    (line,) = table.failures(json.loads((tmp_path / "results" / "here.json").read_text())["parts"]["toy"])
    assert line == "ended by SIGABRT: F1124 16:01:28 load_ir_module.cc:29] no libdevice"
    page = (tmp_path / "toolchains.md").read_text()
    assert "| decode: mla_decode | 72 |" in page and f"- here: {line}" in page


def test_the_page_leaves_out_what_has_not_run() -> None:
    kernel = {"case": "a", "passed": True, "says": "", "figures": {"registers": 1, "spilled": 8}}
    part = {"rows": [kernel], "crashed": "", "seconds": 1, "commit": "c"}
    versions = {"jax": "0.12.0.1", "triton": "3.9.0"}
    other = {**part, "rows": [{**kernel, "case": "b", "figures": {"registers": 1, "spilled": 0}}]}
    results = {
        "one": {"versions": versions, "parts": {"mosaic": part}},
        "two": {"versions": versions, "parts": {"mosaic": other}},
    }
    page = table.page(results)
    assert "| a | 8 | not run |" in page and "| b |" not in page
    assert "| one | 0.12.0.1 | 3.9.0 | c | 1 of 1; not run: triton-A100, " in page and "| not run | not run |" in page
    assert "Nothing failed." in page


def test_the_folder_lies_outside_of_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matrix.main([str(ROOT / "build" / "toolchains")])
    assert "inside of the repository" in capsys.readouterr().err


def test_a_package_that_pip_does_not_find_costs_its_column(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(columns.sys, "executable", "/bin/false")
    assert matrix.main([str(tmp_path), "--column", columns.COLUMNS[0].name, "--part", "mosaic"]) == 2
    assert f"{columns.COLUMNS[0].name}, mosaic: /bin/false -m venv" in capsys.readouterr().err


def test_no_part_finds_another_ptxas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "bin" / "ptxas"
    own.parent.mkdir()
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", f"{own.parent}:/nowhere")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_cuda_data_dir=/elsewhere")
    environment = columns.environment(tmp_path)
    assert environment["PATH"] == "/nowhere" and "XLA_FLAGS" not in environment


def test_jax_is_bounded_by_what_the_page_has_seen() -> None:
    """The oldest release that pyproject.toml takes, and one of the newest minor version below its upper bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    bounds = {
        line.split(";")[0].split(">=")[1].strip()
        for line in [*project["dependencies"], *extras]
        if re.match(r"jax\b(?!-triton)", line)
    }
    assert len(bounds) == 1, bounds
    oldest, newest = re.fullmatch(r"([\d.]+),<([\d.]+)", bounds.pop()).groups()
    seen = set(re.findall(r"^\| (?:oldest|newest)-cuda1[23]-ptxas[\d.]+ \| ([\d.]+) \|", PAGE, flags=re.MULTILINE))
    major, minor = map(int, newest.split("."))
    assert oldest in seen and any(version.startswith(f"{major}.{minor - 1}.") for version in seen), seen
    assert columns.jax_bounds() == {"oldest": f"=={oldest}", "newest": f">={oldest},<{newest}"}


def test_the_page_is_what_the_script_writes_of_each_pinned_ptxas() -> None:
    """Each extra's pin is a column of the page."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("cuda12", "cuda13"):
        (pin,) = re.findall(r"nvidia-cuda-nvcc(?:-cu12)?==([\d.]+)\.\*", "\n".join(extras[extra]))
        assert f"| newest-{extra}-ptxas{pin} |" in PAGE
