"""Rows measured in child processes: one that raises, hangs or kills its process does not affect the others."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import children

FAKE = """
import os, signal, sys, time
from benchmarks.gpu import children
from benchmarks.record import Report
from pallas_kernels.checks import Row
from pallas_kernels.checks.case import ContextLostError

def measure(key, roofs):
    table, name = key
    if name == "raises": raise ValueError("no such kernel")
    if name == "hangs": time.sleep(600)
    if name == "kills": os.kill(os.getpid(), signal.SIGSEGV)
    if name == "loses": raise ContextLostError("illegal address")
    if name == "lies": return Row("", False, "is off", {"us": 1.0})
    return Row("", True, "", {"us": 2.0 * roofs["rate"], "process": os.getpid()})

children.roofs_here = lambda: Row("roofs", True, "a fake", {"rate": 3.0})
sys.exit(children.main(Report(), "a file", "fake", [], measure, lambda: iter(())))
"""


def test_a_failure_affects_only_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    keys = [("table", name) for name in ("good", "raises", "kills", "after", "lies", "loses", "hangs", "last")]
    keys.append(("other", "row"))
    command = [sys.executable, str(script), "--seconds", "15"]
    run = children.Run(tmp_path / "out" / "fake", "fake")
    assert children.measure_all(run, command, keys, 15, time.monotonic() + 500) == 1
    rows = json.loads((tmp_path / "out" / "fake.json").read_text())["rows"]
    assert [(row["table"], row["name"]) for row in rows] == keys
    by_name = {row["name"]: row for row in rows}
    assert {name for name, row in by_name.items() if row["passed"]} == {"good", "after", "last", "row"}
    assert by_name["good"]["figures"]["us"] == 6
    assert by_name["good"]["figures"]["process"] != by_name["after"]["figures"]["process"]
    says = {name: row["says"] for name, row in by_name.items()}
    assert says["raises"] == "raised ValueError: no such kernel" and says["lies"] == "is off"
    assert "SIGSEGV" in says["kills"] and "took too long" in says["hangs"] and "context is gone" in says["loses"]
    text = (tmp_path / "out" / "fake.md").read_text()
    assert "## table" in text and "## other" in text and "| raises |" in text and "| a fake | 3 |" in text
    assert [table.title for table in run.tables()][1:] == ["table", "other"]


def test_rows_without_time_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roofs = json.dumps({"case": "roofs: roofs", "passed": True, "says": "", "figures": {"rate": 1}})
    command = [sys.executable, "-c", f"print({roofs!r})"]
    run = children.Run(tmp_path / "fake", "fake")
    assert children.measure_all(run, command, [("table", "row")], 5, time.monotonic()) == 0
    assert json.loads((tmp_path / "fake.json").read_text())["left_out"] == ["table: row"]


@pytest.mark.parametrize("benchmark", ["fp8_gemm"])
def test_without_a_gpu_it_says_so(benchmark: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.gpu.{benchmark}", "--out", str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2 and "needs a Hopper GPU" in ran.stderr and not (tmp_path / "out").exists()
