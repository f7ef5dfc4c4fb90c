"""`python -m launch.plan` on the command line."""

import json
import subprocess
import sys

import pytest

from tests.launch import preloaded


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "launch.plan", *arguments], capture_output=True, text=True)


@pytest.mark.aot
def test_one_node_of_80_gb_is_refused(tmp_path) -> None:
    written = tmp_path / "plan.json"
    result = plan("node_8xh800", f"--json={written}", f"--plot={tmp_path / 'plan.png'}")
    assert result.returncode == 1, result.stderr
    assert "does not fit" in result.stdout
    assert "98.621" in result.stdout
    plan_json = json.loads(written.read_text())
    assert plan_json["verdict"]["fits"] is False
    assert (
        plan_json["memory"]["needed"]
        == sum(plan_json["memory"]["weights"].values()) + 44_902_121_472 + (plan_json["memory"]["state"])
    )
    assert plan_json["steps"] == []
    assert not (tmp_path / "plan.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode_ep288",), "neither one of prefill_ep32, decode_ep144, node_8xh200, node_8xh800 nor a file"),
        (("decode_ep144", "--model=/nowhere"), "nor a directory with a config.json"),
        (("decode_ep144", "--json=/nowhere/plan.json"), "its directory does not exist"),
        (("decode_ep144", "--speculative_config=mtp"), "--speculative_config: 'mtp' is not a JSON object"),
        (("decode_ep144", "--acceptance=high"), "--acceptance: 'high' is not a number"),
        (("decode_ep144", "--acceptance=0.8"), "without drafts: give speculative_config"),
        ((), "expected DEPLOYMENT"),
        (("train", "--mesh=stage=2,rows=2"), "'rows=2' is not AXIS=SIZE"),
        (("node_8xh200", "--mesh=stage=2"), "--mesh is for train"),
    ],
)
def test_errors_are_one_line_with_status_2(arguments, message) -> None:
    result = preloaded.run(*arguments, command="plan")
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_training_run_is_planned(tmp_path) -> None:
    written = tmp_path / "plan.json"
    result = plan("train", "--config=tiny", "--mesh=stage=2,expert=2", "--micro_batches=4", f"--json={written}")
    assert result.returncode == 0, result.stderr
    assert "31.9 ms" in result.stdout
    written_plan = json.loads(written.read_text())
    assert written_plan["fits"]
    assert len(written_plan["memory"]) == 2
    assert written_plan["pair_wire_bytes"] == 4 * 256 * 192 * 2, (
        "four transfers of the other device's row of 256 tokens"
    )


@pytest.mark.aot
def test_a_file_whose_devices_do_not_divide_the_experts(tmp_path) -> None:
    path = tmp_path / "three.toml"
    path.write_text('device = "H800"\nnodes = 3\ndecode_requests = 8\n')
    result = plan(str(path))
    assert result.returncode == 2
    assert (
        "three: 256 expert replicas do not divide over 24 devices: add redundant experts to reach 264" in result.stderr
    )
