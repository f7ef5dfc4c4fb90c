"""Child processes: every way to end is reported, time limits hold, and a link ends when either process ends."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from dsv3.processes import child
from dsv3.processes.child import ChildResult, LinkedChild, run_limited


def _run(code: str, seconds: float = 60.0) -> ChildResult:
    return run_limited([sys.executable, "-c", code], seconds)


def test_output_log_and_status_are_returned():
    ended = _run("import sys; print('to the output'); print('to the log', file=sys.stderr); sys.exit(3)")

    assert (ended.status, ended.timed_out, ended.cause) == (3, False, "exit status 3")
    assert (ended.output, ended.log) == ("to the output\n", "to the log\n")


def test_a_signal_is_named():
    ended = _run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")

    assert ended.status == -signal.SIGSEGV
    assert ended.cause == "ended by SIGSEGV"


def test_a_child_that_hangs_is_killed_with_its_own_children():
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    ended = _run(code, seconds=5)

    assert ended.timed_out
    assert ended.status == -signal.SIGKILL
    assert _is_gone(int(ended.output))


def test_grandchildren_are_killed_when_a_child_ends():
    code = (
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)"
    )
    ended = _run(code)

    assert (ended.status, ended.timed_out) == (0, False)
    assert _is_gone(int(ended.output))


def test_only_the_end_of_much_output_is_kept():
    ended = _run("print('x' * 3_000_000 + 'the end')")

    assert len(ended.output) == 1 << 20
    assert ended.output.endswith("the end\n")


def test_a_child_whose_parent_was_killed_ends_at_its_alarm(monkeypatch):
    monkeypatch.setattr(child, "_ALARM_S", -58.0)  # so that it comes before the parent's limit
    ended = _run("import time; time.sleep(600)")

    assert (ended.status, ended.timed_out) == (-signal.SIGALRM, False)


def test_a_missing_program_is_an_error():
    with pytest.raises(FileNotFoundError, match="/nowhere/program"):
        run_limited(["/nowhere/program"], 5)


def test_long_lived_processes_are_started_in_one_module():
    """Short commands may use `subprocess.run`."""
    root = Path(child.__file__).parents[2]
    sources = [path for name in ("dsv3", "launch", "router") for path in (root / name).rglob("*.py")]
    found = {
        str(path.relative_to(root)) for path in sources if re.search(r"\bPopen\(|create_subprocess", path.read_text())
    }
    assert found == {"dsv3/processes/child.py"}


def _is_gone(pid: int) -> bool:
    """Waits until a process has ended, reaped or not."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


_ECHO = "tests.dsv3.processes.echo"


def test_a_linked_child_reads_only_from_its_parent():
    """Its own children do not inherit the link as standard input."""
    linked = LinkedChild(_ECHO, "said:")
    linked.link.sendall(b"hello")
    assert linked.link.recv(100) == b"said: hello, and b'' on the standard input"
    linked.link.close()
    assert linked.wait(30) == 0 and linked.end() == 0


def test_a_linked_child_that_is_killed_ends_the_link():
    linked = LinkedChild(_ECHO, "said:")
    assert linked.status is None
    linked.kill()
    assert linked.link.recv(100) == b""
    assert linked.end() == linked.status == -signal.SIGKILL
    linked.kill()  # no effect
    linked.link.close()


def test_a_child_that_does_not_end_is_killed_after_the_grace_time():
    stubborn = child.ChildProcess(["sleep", "600"])
    assert stubborn.wait(0.05) is None
    assert stubborn.end(grace_s=0.05) == -signal.SIGKILL
