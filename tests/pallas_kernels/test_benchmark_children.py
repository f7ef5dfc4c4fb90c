"""Rows measured in child processes: one that raises, hangs or kills its process does not affect the others."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import children
from benchmarks.record import Report

FAKE = """
import os, signal, sys, time
from benchmarks.gpu import children
from benchmarks.record import Report
from pallas_kernels.checks import Row
from pallas_kernels.checks.case import ContextLostError

def measure(name, roofs, backend):
    if name == "raises": raise ValueError("no such kernel")
    if name == "hangs": time.sleep(600)
    if name == "kills": os.kill(os.getpid(), signal.SIGSEGV)
    if name == "loses": raise ContextLostError("illegal address")
    if name == "lies": return Row("", False, "is off", {"us": 1.0})
    return Row("", True, "", {"us": 2.0 * roofs["rate"], "process": os.getpid()})

children.roofs_here = lambda: Row("roofs", True, "a fake", {"rate": 3.0})
names = ("good", "raises", "kills", "after", "lies", "loses", "hangs", "last")
cases = {**{("table", name): name for name in names}, ("other", "row"): "row"}
sys.exit(children.main(Report(), "a file", "fake", cases, {}, measure))
"""


def test_a_failure_affects_only_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    keys = [("table", name) for name in ("good", "raises", "kills", "after", "lies", "loses", "hangs", "last")]
    keys.append(("other", "row"))
    command = [sys.executable, str(script), "--seconds", "15"]
    report = Report()
    assert children.measure_all(report, command, keys, 15, time.monotonic() + 500) == 1
    roofs, table, other = report.tables
    assert roofs.rows == [["a fake", 3]] and (table.title, other.title) == ("table", "other")
    assert table.columns == ["case", "us", "process", "says"]
    by_name = {str(name): figures for name, *figures in (*table.rows, *other.rows)}
    assert list(by_name) == [name for _, name in keys]
    assert {name for name, figures in by_name.items() if figures[-1] == ""} == {"good", "after", "last", "row"}
    (us, process, _), (_, later, _) = by_name["good"], by_name["after"]
    assert us == 6 and process != later
    says = {name: str(figures[-1]) for name, figures in by_name.items()}
    assert says["raises"] == "WRONG: raised ValueError: no such kernel" and says["lies"] == "WRONG: is off"
    assert "SIGSEGV" in says["kills"] and "took too long" in says["hangs"] and "context is gone" in says["loses"]


def test_rows_without_time_are_named() -> None:
    roofs = json.dumps({"case": "roofs: roofs", "passed": True, "says": "", "figures": {"rate": 1}})
    command = [sys.executable, "-c", f"print({roofs!r})"]
    report = Report()
    assert children.measure_all(report, command, [("table", "row")], 5, time.monotonic()) == 0
    assert report.tables[-1].rows == [["row", "left out: --minutes are over"]]


def test_without_a_gpu_it_says_so() -> None:
    ran = subprocess.run([sys.executable, "-m", "benchmarks.gpu.fp8_gemm"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2 and "needs a Hopper GPU" in ran.stderr
