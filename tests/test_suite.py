"""The suite itself."""

import pathlib
import subprocess
import sys


def test_it_runs_without_xdist() -> None:
    one = "tests/test_docs.py::test_every_test_that_a_page_names_exists"
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", one]
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
