"""`python -m launch.plan fleet` on the command line."""

import json
import subprocess
import sys

import pytest


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_published_day_is_planned_without_jax(tmp_path) -> None:
    written = tmp_path / "fleet.json"
    arguments = ["x", "fleet", "--traffic=day6", f"--json={written}"]
    code = (
        "import runpy, sys\n"
        f"sys.argv = {arguments!r}\n"
        "try:\n    runpy.run_module('launch.plan', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as ended:\n    assert not ended.code\n"
        "assert 'jax' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "226.75" in result.stdout and "$87,072" in result.stdout
    fleet = json.loads(written.read_text())
    assert fleet["terms"] == {"token_bytes": 70_272, "gpu_hour": 2.0}
    assert fleet["as_charted"]["nodes"] == 226.75


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fleet",), "fleet needs --traffic=day6"),
        (("fleet", "--traffic=day7"), "value should be one of <day6>"),
        (("fleet", "--traffic=day6", "--plot=x.png"), "fleet takes no --plot"),
        (("fleet", "--traffic=day6", "--gpu_hour=0"), "--gpu_hour 0: must be a number above 0"),
        (("fleet", "--traffic=day6", "--gpu_hour=nan"), "--gpu_hour nan: must be a number above 0"),
        (("fleet", "--traffic=day6", "--model=kimi_k2"), "give --prefill_plan for --model kimi_k2"),
        (("fleet", "--traffic=day6", "--decode_plan=/nowhere"), "/nowhere: cannot be read"),
        (("decode_ep144", "--traffic=day6"), "--traffic is for fleet"),
    ],
)
def test_errors_are_one_line_with_status_2(arguments, message) -> None:
    result = plan(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
