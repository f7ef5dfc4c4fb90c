"""Whatever a check does, it costs its own rows: the others run, and the report says what happened."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tools.doctor.checks import Check
from tools.doctor.run import Report, examine

ROOT = Path(__file__).parents[3]
GOOD = 'print(\'{"case": "good", "passed": true, "figures": {"error": 0.5, "limit": NaN}}\', flush=True)\n'
BAD = 'print(\'{"case": "bad", "passed": false, "says": "differs by 3, 1 is allowed"}\', flush=True)\n'
FAULTS = {  # what a check does, and what the row of its process says
    "raises": ("raise RuntimeError('CUDA_ERROR_X')", "exit status 1, but no row failed; the last line of its log: Run"),
    "raises_late": (GOOD + "raise RuntimeError('CUDA_ERROR_X')", "exit status 1, but no row failed"),
    "hangs": ("import time; time.sleep(600)", "killed after 1 s"),
    "segfaults": (
        GOOD + "import os; os.kill(os.getpid(), 11)",
        'ended by SIGSEGV, after 1 rows; in File "<string>", line',
    ),
    "writes_stacks": (  # as a check does before its time is up: those of other threads first, then the main one's
        f"{GOOD}import faulthandler, os, threading, time\n"
        "threading.Thread(target=lambda: time.sleep(600), daemon=True).start()\n"
        "def here():\n  while not os.fstat(2).st_size: time.sleep(0.1)\n"
        "faulthandler.dump_traceback_later(0.5); here(); time.sleep(1); os.kill(os.getpid(), 9)",
        'ended by SIGKILL, after 1 rows; in File "<string>", line 5 in here',
    ),
    "aborts": ("import os; os.abort()", "ended by SIGABRT"),
    "odd_status": (GOOD + "raise SystemExit(77)", "exit status 77"),
    "says_nothing": ("", "exit status 0, but it printed no row"),
    "hides": (BAD, "exit status 0, but a row failed"),
    "claims": (GOOD + "raise SystemExit(1)", "exit status 1, but no row failed"),
    "tried_after_all": (GOOD + "raise SystemExit(2)", "exit status 2 (nothing could be tried), but it printed rows"),
    "prints_garbage": (GOOD + "print('W0000 a warning')", "prints a line that is not a row: 'W0000 a warning'"),
    "prints_other_json": ('print(\'{"case": "x", "passed": 1}\')', "prints a line that is not a row"),
    "nests": ("print('{\"case\":' * 100_000)", "prints a line that is not a row"),
    "prints_megabytes": (f"for _ in range(30_000): {GOOD}", "prints a line that is not a row"),
    "prints_no_text": ("import os; os.write(1, bytes(range(256)))", "prints a line that is not a row"),
}


def check(name: str, code: str, seconds: float = 60.0, **fields: bool) -> Check:
    return Check("faults", name, (sys.executable, "-c", code), "Try something else.", seconds, **fields)


def run(tmp_path: Path, *checks: Check) -> tuple[int, list[str], dict]:
    """Returns the exit status, what was said, and the report."""
    said: list[str] = []
    report = Report(tmp_path / "report", tmp_path / "models" / "tiny", quick=False)
    status = examine(checks, report, said.append, said.append)
    return status, said, json.loads((tmp_path / "report" / "report.json").read_text("utf-8"))


def test_each_fault_costs_its_own_rows(tmp_path):
    faults = [check(name, code, 1 if name == "hangs" else 60) for name, (code, _) in FAULTS.items()]
    status, said, written = run(tmp_path, check("before", GOOD), *faults, check("after", GOOD))

    found = {one["name"]: one for one in written["checks"]}
    assert list(found) == ["before", *FAULTS, "after"]
    assert {name for name, one in found.items() if one["outcome"] == "passed"} == {"before", "after"}
    for name, (code, says) in FAULTS.items():
        *rows, last = found[name]["rows"]
        assert last["case"] == name and not last["passed"] and last["says"].startswith(says), last
        if code.startswith(GOOD):
            assert rows[0] == {"case": "good", "passed": True, "says": "", "figures": {"error": 0.5, "limit": "nan"}}
    assert (status, written["status"], written["state"]) == (1, 1, "finished")
    assert "2 of 18 checks passed, 16 failed" in said[-2]
    page = (tmp_path / "report/report.md").read_text("utf-8")
    assert page.count("Try something else.") == len(FAULTS)
    with zipfile.ZipFile(tmp_path / "report/report.zip") as file:
        assert file.read("report/report.md").decode() == page
        assert "CUDA_ERROR_X" in file.read("report/logs/faults-raises.txt").decode()
        assert "Fatal Python error" in file.read("report/logs/faults-segfaults.txt").decode(), "says where it crashed"


def test_what_a_check_leaves_running_ends_with_it(tmp_path):
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"print(child.pid, file=sys.stderr)\n{GOOD}"
    )
    status, _, written = run(tmp_path, check("leaves", code))

    assert (status, written["checks"][0]["outcome"]) == (0, "passed")
    assert is_gone(int((tmp_path / "report" / written["checks"][0]["log"]).read_text()))


def test_statuses_say_whether_anything_was_tried(tmp_path):
    nothing = check("nothing", "import sys; print('no second device', file=sys.stderr); sys.exit(2)")
    status, said, written = run(tmp_path / "a", nothing)
    assert (status, written["checks"][0]["outcome"]) == (2, "not tried")
    assert "not tried faults nothing: no second device" in said

    assert run(tmp_path / "b", nothing, check("good", GOOD))[0] == 0
    assert run(tmp_path / "c", nothing, check("bad", BAD + "raise SystemExit(1)"), check("good", GOOD))[0] == 1


def test_a_check_that_lists_others_is_each_of_them(tmp_path):
    code = f"import sys\nif '--list' in sys.argv: sys.exit(print('one two'))\nif sys.argv[-1] == 'two': 1 / 0\n{GOOD}"
    status, _, written = run(tmp_path, check("operations", code, each=True, counted=True))

    assert status == 1
    assert [(one["name"], one["outcome"]) for one in written["checks"]] == [("one", "passed"), ("two", "failed")]
    page = (tmp_path / "report/report.md").read_text()
    assert "1 of 1" in page and "ZeroDivisionError" in page


@pytest.mark.parametrize("code", ["1 / 0", "print('../../x')", "", "print(*range(1000))"])
def test_a_list_that_is_none_costs_that_check(tmp_path, code):
    status, _, written = run(tmp_path, check("operations", code, each=True), check("after", GOOD))

    assert status == 1
    assert [(one["name"], one["outcome"]) for one in written["checks"]] == [
        ("operations", "failed"),
        ("after", "passed"),
    ]


def test_a_program_that_cannot_be_started_costs_that_check(tmp_path):
    absent = dataclasses.replace(check("absent", ""), command=("/nowhere/at/all",))
    status, _, written = run(tmp_path, absent, check("after", GOOD))

    assert status == 1
    assert "cannot be started" in written["checks"][0]["rows"][0]["says"]


def test_a_report_that_cannot_be_written_costs_no_check(tmp_path):
    """The first check takes the folder away, as a full disk would take what is written to it."""
    took = f"import shutil\n{GOOD}shutil.rmtree({str(tmp_path / 'report')!r})"
    said: list[str] = []
    report = Report(tmp_path / "report", tmp_path / "tiny", quick=False)

    assert examine([check("takes", took), check("after", GOOD)], report, said.append, said.append) == 1
    assert sum("cannot be written" in line for line in said) == 3
    assert [line for line in said if line.startswith("passed faults after: good")]


def test_names_of_this_machine_stay_on_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setattr("socket.gethostname", lambda: "node7.corp.example")
    text = f"/home/alice/x {tmp_path}/models/tiny {sys.prefix}/bin/ptxas /scratch/alice/y node7 on node7.corp.example"
    code = (
        "import json, sys\n"
        f"text = {text!r}\n"
        "print(json.dumps({'case': text, 'passed': True, 'says': text + chr(27) + '[2J' + chr(0xd800)}))\n"
        "print(text, file=sys.stderr)"
    )
    _, said, _ = run(tmp_path, check("tells", code))

    clean = "~/x <models>/tiny <python>/bin/ptxas /scratch/<user>/y <host> on <host>"
    assert clean in said[1]
    with zipfile.ZipFile(tmp_path / "report/report.zip") as file:
        everything = "\n".join(file.read(name).decode() for name in file.namelist())
    assert file.namelist() == ["report/report.md", "report/report.json", "report/logs/faults-tells.txt"]
    assert not [name for name in ("alice", "node7", str(tmp_path), sys.prefix, "\x1b") if name in everything]


@pytest.mark.parametrize(("number", "state", "ends"), [(2, "interrupted", 1), (9, "not finished", -signal.SIGKILL)])
def test_a_doctor_that_is_interrupted_or_killed_leaves_what_it_has(tmp_path, number, state, ends):
    """Its second check interrupts or kills it; the report then has the first, and says that it is not whole."""
    kills = f"import os, time; os.kill(os.getppid(), {number}); time.sleep({number == 2} and 60)"
    code = (
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "from tests.tools.doctor.test_faults import GOOD, check, run\n"
        f"checks = check('first', GOOD), check('second', {kills!r}), check('third', GOOD)\n"
        "sys.exit(run(pathlib.Path(sys.argv[1]), *checks)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=300)

    assert done.returncode == ends, done.stderr
    written = json.loads((tmp_path / "report/report.json").read_text())
    assert (written["state"], [one["name"] for one in written["checks"]]) == (state, ["first"])
    assert state in (tmp_path / "report/report.md").read_text()
    assert (tmp_path / "report/report.zip").exists() == (state == "interrupted")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_command_ends_its_check_and_writes_its_report_where_nobody_reads_what_it_says(tmp_path, number):
    """Nor does a text that the terminal cannot show stop it."""
    says = 'print(\'{"case": "\\\\u20ac", "passed": true}\')'
    code = (
        f"import signal; signal.signal({int(number)}, signal.SIG_DFL)\n"  # nohup ignores it
        "import launch.doctor as doctor\n"
        "from tests.tools.doctor.test_faults import GOOD, check\n"
        f"ends = 'import os, time; os.kill(os.getppid(), {int(number)}); time.sleep(600)'\n"
        f"doctor.table = lambda model, quick: [check('first', GOOD), check('says', {says!r}), check('ends', ends)]\n"
        "doctor.flags.run(doctor.main)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code, "--output", str(tmp_path)]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=300)
    os.close(writer)

    assert done.returncode == 1, done.stderr
    written = json.loads((tmp_path / "report.json").read_text())
    assert (written["state"], [one["name"] for one in written["checks"]]) == ("interrupted", ["first", "says"])
    assert written["checks"][1]["rows"][0]["case"] == "\u20ac"
    assert (tmp_path / "report.zip").exists()


def is_gone(pid: int) -> bool:
    """Waits until a process has ended; its new parent may not have reaped it yet."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False
