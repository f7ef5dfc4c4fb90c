"""The check of stored programs: as it is on this machine, and what it says where a store does not serve."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.doctor import stored

ROOT = Path(__file__).parents[3]


def test_programs_of_one_process_serve_the_next():
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tools.doctor.stored"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    rows = {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(rows) == ["written", "found", "equal"]
    assert rows["found"]["figures"]["found"] == rows["written"]["figures"]["programs"] > 0


def seen(**fields) -> dict:
    return {"asked": ["decode", "sample"], "traced": ["decode", "sample"], "seconds": 1.0, "outputs": "[1]", **fields}


@pytest.mark.parametrize(
    ("second", "case", "says"),
    [
        (seen(traced=["decode"]), "found", "1 of 2 were traced and compiled again: decode"),
        (seen(traced=[], outputs="[2]"), "equal", "ValueError: stored programs gave [2], new ones [1]"),
        (RuntimeError("ended by SIGSEGV"), "found", "RuntimeError: ended by SIGSEGV"),
    ],
)
def test_a_second_process_that_traces_answers_otherwise_or_crashes(tmp_path, capsys, second, case, says):
    answers = [seen(), second]

    def child(folder: Path) -> dict:
        (folder / "programs-x").mkdir(exist_ok=True)
        (folder / "programs-x/decode").write_bytes(b"x")
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    assert stored.check_store(tmp_path, child) == 1
    rows = {row["case"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["written"]["passed"] and not rows[case]["passed"] and rows[case]["says"] == says


def test_a_first_process_that_stores_nothing_or_crashes(tmp_path, capsys):
    assert stored.check_store(tmp_path, lambda folder: seen()) == 1
    assert "no program was stored" in capsys.readouterr().out
    assert stored.check_store(tmp_path, lambda folder: 1 / 0) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_where_no_program_can_be_stored_nothing_is_tried(tmp_path, capsys):
    assert stored.check_store(tmp_path, lambda folder: {"nothing": "Triton"}) == 2
    assert capsys.readouterr() == ("", "Triton\n")
