"""`python -m launch.train` refuses what it cannot run, in one line."""

import subprocess
import sys

import pytest

from tests.launch import preloaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=nothing"], "--config=nothing: no training configuration there"),
        (["--config=tiny", "--steps=5"], "--steps=5: 5 steps are too few for 100 of warm-up"),
        (["--resume", "--output=/nonexistent/run"], "no checkpoint in /nonexistent/run"),
        (["--mesh=stage=2,rows=2"], "'rows=2' is not AXIS=SIZE; write stage=N, data=N, expert=N, or several"),
        (["--mesh=stage=8,expert=8"], "this machine has 8 device(s), not 64; on a CPU set XLA_FLAGS=--xla_force_host"),
        (["--mesh=stage=2", "--micro_batches=3"], "DualPipe over 2 ranks needs an even number of micro-batches"),
    ],
)
def test_errors_are_one_line_with_status_2(arguments: list[str], message: str) -> None:
    result = preloaded.run(*arguments, command="train")
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_training_is_refused_if_jax_does_not_start(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "rocm")  # no plugin for these is ever installed here
    command = [sys.executable, "-m", "launch.train", f"--output={tmp_path / 'run'}"]
    result = subprocess.run(command, cwd=preloaded.ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2, result.stderr
    assert "jax does not start with JAX_PLATFORMS=rocm (Unable to initialize backend 'rocm'" in result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "run").exists()
