"""The matrix of toolchains in its toy form, and what its page in the docs must hold."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.record import Report
from benchmarks.toolchains import __main__ as matrix
from benchmarks.toolchains import columns
from dsv3.processes.child import ChildResult

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance" / "toolchains.md").read_text()
NAME = columns.COLUMNS[0].name


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> tuple[int, str]:
    """Runs a part of the first column; returns the exit status and the tables."""
    monkeypatch.setattr(sys, "argv", ["toolchains", str(folder), "--column", NAME, *arguments])
    report = Report()
    status = matrix.main(report)
    return status, "\n".join(line for table in report.tables for line in table.lines())


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the environment that is there, with the CUDA toolkits that the machine has."""
    monkeypatch.setattr(columns, "prepare", lambda *_: Path(sys.executable))
    monkeypatch.setattr(
        columns, "command", lambda python, part: [str(python), "-m", "benchmarks.toolchains.cases", part]
    )


@pytest.mark.aot
@pytest.mark.usefixtures("here")
def test_a_kernel_in_the_environment_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own compiles it; a second run finds the result."""
    status, text = run(monkeypatch, tmp_path, "--part", "toy")
    assert status == 0 and "| kernels compiled | 3 |" in text
    rows = json.loads((tmp_path / "results" / f"{NAME}-toy.json").read_text())["rows"]
    assert {row["case"].split(": ")[1] for row in rows} == {"mla_combine", "mla_decode", "mla_write"}
    assert all(row["passed"] and 0 < row["figures"]["registers"] <= 255 for row in rows)
    monkeypatch.setattr(matrix, "tried", None)
    assert run(monkeypatch, tmp_path, "--part", "toy") == (0, text)


@pytest.mark.usefixtures("here")
def test_a_crash_costs_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = "noise\nF1124 16:01:28 load_ir_module.cc:29] no libdevice\n*** Check failure stack trace: ***"
    row = {"case": "decode: mla_decode", "passed": True, "says": "", "figures": {"registers": 168, "spilled": 72}}
    ended = ChildResult(-6, False, 1.0, "not a row\n" + json.dumps(row) + "\n", log)
    monkeypatch.setattr(matrix, "run_limited", lambda *_: ended)
    status, text = run(monkeypatch, tmp_path, "--part", "mosaic")
    assert status == 1 and "| decode: mla_decode | 72 |" in text and "1 of 1, not all ended" in text
    assert f"| {NAME} |  | ended by SIGABRT: F1124 16:01:28 load_ir_module.cc:29] no libdevice |" in text


def test_the_tables_leave_out_what_has_not_run() -> None:
    kernel = {"case": "a", "passed": True, "says": "", "figures": {"registers": 1, "spilled": 8}}
    part = {"rows": [kernel], "crashed": "", "commit": "c", "versions": {"jax": "0.12.0.1", "triton": "3.9.0"}}
    other = {**part, "rows": [{**kernel, "case": "b", "figures": {"registers": 1, "spilled": 0}}]}
    report = Report()
    assert not matrix.tabulate(report, {"one": {"mosaic": part}, "two": {"mosaic": other}})
    text = "\n".join(line for table in report.tables for line in table.lines())
    assert "| a | 8 | not run |" in text and "| b |" not in text
    assert "| one | 0.12.0.1 | 3.9.0 | c | 1 of 1; not run: triton-A100, " in text and "| not run | not run |" in text


def test_the_folder_lies_outside_of_the_tree(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, ROOT / "build" / "toolchains")
    assert "inside of the repository" in capsys.readouterr().err


def test_what_cannot_be_tried_costs_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """pip finds no package; or a part compiles nothing, as where the machine's CUDA toolkit cannot be hidden."""
    with monkeypatch.context() as patched:
        patched.setattr(columns.sys, "executable", "/bin/false")
        assert run(patched, tmp_path, "--part", "mosaic") == (2, "")
    assert f"{NAME}, mosaic: /bin/false -m venv" in capsys.readouterr().err
    monkeypatch.setattr(columns, "prepare", lambda *_: Path(sys.executable))
    ended = ChildResult(2, False, 1.0, "", "mount: /usr/local/cuda: permission denied")
    monkeypatch.setattr(matrix, "run_limited", lambda *_: ended)
    assert run(monkeypatch, tmp_path, "--part", "mosaic") == (2, "")
    assert f"{NAME}, mosaic: mount: /usr/local/cuda" in capsys.readouterr().err


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
