"""The doctor's own checks: as they are on this CPU, and what they find on machines that something is wrong with."""

import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from dsv3.engine import build
from dsv3.engine.memory import DeviceMemory, WorkingMemoryFile
from tests.tools.doctor.test_faults import is_gone
from tools.doctor import checks, fits, install, serve
from tools.doctor.rows import CaseResult, run_cases
from tools.doctor.run import Report, examine

ROOT = Path(__file__).parents[3]
BUNDLED = ROOT / "dsv3/bundled"


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def row_of(capsys, case: str) -> dict:
    """Runs one case of `install machine`."""
    run_cases({case: install.CASES["machine"][case]})
    return rows(capsys.readouterr().out)[0]


def test_installation_and_memory_of_this_cpu(tmp_path):
    """Runs them as the command does; on a CPU nothing of them fails."""
    said: list[str] = []
    chosen = [check for check in checks.table(BUNDLED, quick=True) if check.section in ("install", "fits")]
    status = examine(chosen, Report(tmp_path, BUNDLED, quick=True), said.append, said.append)

    written = json.loads((tmp_path / "report.json").read_text())
    assert (status, [check["outcome"] for check in written["checks"]]) == (0, ["passed"] * 3), said
    found = {row["case"]: row for check in written["checks"] for row in check["rows"]}
    assert found.keys() == {*install.CASES["machine"], *install.CASES["jax"], "memory"}
    assert "jaxlib" in found["versions"]["says"] and "(cpu)" in found["devices"]["says"]
    assert found["memory"]["figures"]["tokens in the cache"] == 131_072
    assert "x cpu (cpu)" in (tmp_path / "report.md").read_text()


def test_the_doctors_process_imports_no_jax():
    code = "import sys; import launch.doctor as d; d.table(d.Path(sys.argv[1]), False); print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code, BUNDLED], cwd=ROOT, text=True) == "False\n"


def test_kernels_are_checked_in_quick_form_where_there_is_no_gpu(monkeypatch):
    for quick, gpus, expected in ((False, 0, True), (False, 8, False), (True, 8, True)):
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        monkeypatch.setattr(checks, "count_gpus", lambda gpus=gpus: gpus)
        found = {check.section: check for check in checks.table(BUNDLED, quick)}
        assert ("--quick" in found["kernels"].command) == expected
        assert ("serve" in found) == (not quick)


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--model", "/no/where"], "--model"), (["--output", "/proc/x"], "--output")]
)
def test_a_wrong_command_line_ends_with_status_2(arguments, says):
    done = subprocess.run([sys.executable, "-m", "launch.doctor", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and says in done.stderr


def test_a_check_that_hangs_says_where():
    command = [
        sys.executable,
        "-m",
        "tools.doctor.child",
        "0.5",
        "timeit",
        "-n1",
        "-r1",
        "import time; time.sleep(600)",
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        said = next(line for line in process.stderr if "timeit" in line)
        process.kill()
    assert "in inner" in said or "timeit.py" in said


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Makes an nvidia-smi that runs a line of sh."""

    def make(line: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return make


def test_gpus_are_counted_and_those_that_others_use_are_named(smi, capsys):
    smi("echo 'NVIDIA H200, 143771, 9.0'; echo 'NVIDIA H200, 143771, 9.0'")
    assert row_of(capsys, "gpus")["says"] == "2 x NVIDIA H200 (143771 MiB, compute capability 9.0)"
    smi("echo 4; echo 71234")
    found = row_of(capsys, "other processes")
    assert not found["passed"] and "GPU 1: 74.7 GB" in found["says"]
    smi("echo 4; echo '[N/A]'")
    assert row_of(capsys, "other processes")["passed"]


def test_a_driver_that_does_not_answer_is_a_failed_row(smi, capsys):
    smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    found = row_of(capsys, "gpus")
    assert not found["passed"] and "Driver/library version mismatch" in found["says"]
    assert row_of(capsys, "other processes")["says"] == "not known: nvidia-smi does not say"


def test_what_several_gpus_need_of_the_system_is_missed(monkeypatch, capsys):
    monkeypatch.setattr(install, "count_gpus", lambda: 8)
    sizes = namedtuple("sizes", "total free")
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: sizes(2**26, 2**26))
    monkeypatch.setattr(install, "_infiniband", lambda: ["mlx5_0: 4: ACTIVE, 400 Gb/sec"])
    monkeypatch.setattr("resource.getrlimit", lambda which: (2**23, 2**23))
    said = {case: row_of(capsys, case) for case in ("shared memory", "locked memory", "compilation cache")}
    assert not any(row["passed"] for row in said.values())
    assert "--shm-size" in said["shared memory"]["says"] and "ulimit -l" in said["locked memory"]["says"]


def test_two_plugins_are_one_too_many(monkeypatch, capsys):
    each = namedtuple("each", "name version")
    found = [each("jax", "1"), each("jax-cuda12-plugin", "1"), each("jax-cuda13-plugin", "1")]
    monkeypatch.setattr("importlib.metadata.distributions", lambda: found)
    assert "uninstall one" in row_of(capsys, "versions")["says"]


def test_a_device_that_multiplies_wrong_is_found(monkeypatch):
    import jax

    monkeypatch.setattr(jax, "jit", lambda function: lambda x, y: function(x, y).at[3, 4].add(1))
    with pytest.raises(ValueError, match=r"computes wrong: .* differs by up to 1"):
        install.CASES["jax"]["products"]()


def test_the_account_of_a_gpu(monkeypatch, tmp_path):
    """A CPU pretends to be bounded, by little and then by too little."""
    monkeypatch.setattr(build, "use_compilation_cache", lambda _: tmp_path)
    monkeypatch.setattr(WorkingMemoryFile, "read", lambda _: 10_000_000)
    monkeypatch.setattr(build, "device_memory", lambda _: DeviceMemory(10**9, 8 * 10**8))
    found = fits.memory(BUNDLED)
    assert found.passed and found.figures["total GB"] == 1.0 and found.figures["pool GB"] == 0.8
    assert found.figures["working GB"] == 0.01 and found.figures["cache GB"] > 0.1

    monkeypatch.setattr(build, "device_memory", lambda _: DeviceMemory(10**7, 10**7))
    with pytest.raises(ValueError, match="the model does not fit"):
        fits.memory(BUNDLED)


def test_a_cpu_without_room_for_the_weights(monkeypatch):
    monkeypatch.setattr(fits, "free_bytes", lambda: 1e9)
    found = fits.memory(BUNDLED)
    assert not found.passed and "do not fit into 1.00 GB" in found.says


def test_a_server_that_does_not_start_is_a_failed_row(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    assert serve.check_server(tmp_path, 120) == 1
    [found] = rows(capsys.readouterr().out)
    assert "the server ended with status 1" in found["says"] and "rope_theta" in found["says"]


def test_a_server_that_takes_too_long_is_killed_with_its_engine(monkeypatch, capsys):
    """It has come so far that its engine's process, which has a session of its own, is there."""
    pids = []
    tree = serve.StartedServer.tree
    monkeypatch.setattr(serve.StartedServer, "tree", lambda self: pids.extend(found := tree(self)) or found)
    monkeypatch.setattr(serve.StartedServer, "wait_ready", until_the_engine_is_there)

    assert serve.check_server(BUNDLED, 60) == 1
    assert rows(capsys.readouterr().out)[0]["says"] == "RuntimeError: too long"
    assert pids and all(map(is_gone, pids))


def until_the_engine_is_there(server: serve.StartedServer, seconds: float) -> None:
    said: list[str] = []
    while not server._next(seconds, said)[1].startswith("loading"):
        pass
    raise RuntimeError("too long")


def report(completed: int, errors: dict) -> dict:
    times = {"p50": 1.0, "p99": 2.0} if completed else None
    rates = {"output_tokens_per_s": 10.0, "total_tokens_per_s": None}
    sent = completed + sum(each["count"] for each in errors.values())
    counts = {"sent": sent, "completed": completed, "failed": sent - completed}
    return {"requests": counts, "errors": errors, "throughput": rates, "ttft_ms": times, "itl_ms": times}


def test_a_load_passes_where_requests_end_and_none_fails():
    good = serve._load_row(report(7, {}))
    assert good.passed and good.figures == {
        "requests": 7,
        "output_tokens_per_s": 10.0,
        **{f"{name}_ms {rank}": value for name in ("ttft", "itl") for rank, value in (("p50", 1.0), ("p99", 2.0))},
    }
    assert serve._load_row(report(0, {})) == CaseResult(
        "load", False, "no request was answered in 20 s", {"requests": 0, "output_tokens_per_s": 10.0}
    )
    failed = serve._load_row(report(7, {"500": {"count": 2, "example": "boom"}}))
    assert not failed.passed and failed.says == "2 of 9 requests failed: 2 x 500: boom"
