"""Several processes of one host that end together: `deploy/node.py`, with scripts in the place of `launch.serve`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy import node as command
from launch import node
from tests.tools.doctor.test_faults import is_gone

ROOT = Path(__file__).parents[2]
# A process that prints its pid. It ends with 0 after SIGTERM if its flag is not "stays", and with the status that its
# flag gives after SIGUSR1.
SCRIPT = """
import os, signal, sys, time
number = int(sys.argv[-1].partition("=")[2])
kind = sys.argv[1 + number]
signal.signal(signal.SIGTERM, signal.SIG_IGN if kind == "stays" else lambda *_: (print("drained"), sys.exit(0)))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(int(kind)))
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""
RUN = (
    "import sys; from deploy import node as command; from launch import node; "
    "node._SERVE = (sys.executable, '-c', {script!r}); node._END_S = {end_s}; "
    "sys.exit(command.main(sys.argv[1:]))"
)


class Node:
    """`deploy.node` with a process for each of `kinds`."""

    def __init__(self, *kinds: str, end_s: float = 60.0, drain_s: float = 60.0) -> None:
        code = RUN.format(script=SCRIPT, end_s=end_s)
        flags = [f"--processes_per_node={len(kinds)}", f"--drain_timeout={drain_s}", "--", *kinds]
        command = [sys.executable, "-c", code, *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        said = sorted(self._next() for _ in kinds)
        self.pids = [int(line.split()[-1]) for line in said]

    def _next(self) -> str:
        assert self.process.stdout is not None
        return next(line for line in self.process.stdout if " pid " in line)

    def end(self) -> tuple[int, list[str]]:
        """Returns the exit status and what was said last."""
        assert self.process.stdout is not None
        lines = self.process.stdout.read().splitlines()
        return self.process.wait(60), lines


def test_each_process_has_its_place_and_a_single_one_needs_none():
    assert node.places(["--port=0"], 1, 0, 1) == [["--port=0"]]
    shared = ["--port=0", "--num_processes=6", "--processes_per_node=2"]
    assert node.places(["--port=0"], 3, 1, 2) == [[*shared, "--process_id=2"], [*shared, "--process_id=3"]]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num_nodes=2", "--node_rank=2", "--processes_per_node=8"], "--node_rank 2 is not from 0 to 1"),
        (["--processes_per_node=0"], "must be at least 1"),
        ([], "--processes_per_node"),
    ],
)
def test_a_wrong_command_line_starts_nothing(flags, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main([*flags, "--", "--port=0"])
    assert says in capsys.readouterr().err


def test_a_signal_reaches_all_and_the_end_is_in_order():
    started = Node("serves", "serves")
    started.process.send_signal(signal.SIGTERM)
    status, lines = started.end()
    assert status == 0 and sorted(lines[:-1]) == ["[0] drained", "[1] drained"]
    assert lines[-1] == "exit statuses of processes 0 to 1: [0, 0]"


def test_a_failure_ends_the_others():
    started = Node("serves", "3")
    os.kill(started.pids[1], signal.SIGUSR1)
    status, lines = started.end()
    assert status == 1 and lines == ["[0] drained", "exit statuses of processes 0 to 1: [0, 3]"]


def test_an_end_in_order_is_awaited_and_not_disturbed():
    """An instance that drains ends process by process; a signal would cut the others' requests off."""
    started = Node("serves", "0", end_s=1.0)
    os.kill(started.pids[1], signal.SIGUSR1)
    status, lines = started.end()
    assert status == 1 and lines == ["exit statuses of processes 0 to 1: [-9, 0]"]


@pytest.mark.parametrize("signalled", [True, False])
def test_what_does_not_end_is_killed(signalled):
    started = Node("stays", "3", end_s=0.5, drain_s=0.5)
    if signalled:
        started.process.send_signal(signal.SIGTERM)
    else:
        os.kill(started.pids[1], signal.SIGUSR1)
    status, _ = started.end()
    assert status == 1 and all(map(is_gone, started.pids))


def test_the_processes_do_not_outlive_it():
    started = Node("serves", "serves")
    os.kill(started.process.pid, signal.SIGKILL)
    assert all(map(is_gone, started.pids))
    assert started.process.wait(60) == -signal.SIGKILL


def test_nothing_is_left_where_a_process_cannot_be_started(monkeypatch):
    """The first one runs by then."""
    made = []
    right = node._start

    def start(command, process_id):
        if made:
            raise OSError("no more processes")
        made.append(right([sys.executable, "-c", "import time; time.sleep(600)"], process_id))
        return made[0]

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(node, "_start", start)
    try:
        with pytest.raises(OSError, match="no more processes"):
            command.main(["--processes_per_node=2", "--", "x"])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    child, reader = made[0]
    assert child.status == -signal.SIGKILL
    deadline = time.monotonic() + 30
    reader.join(deadline - time.monotonic())
    assert not reader.is_alive()
